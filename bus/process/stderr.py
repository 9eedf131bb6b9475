"""What children write to stderr: passed on to the driver's, and its end kept.

The end of what a running child wrote lies in a nameless file of the fork server that other
processes of its user can open. So nobody need answer whoever looks: neither child nor driver, which
may hang. Leaves out when it is done (`forkserver.py`), and how it looks (`exit_report.py`).
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import select
import stat
import struct
import time
from typing import Final

from envbus.bus.memory.memfd import FOUND_BY_LABEL, create_memfd, open_labelled
from envbus.bus.process.descendants import parent_of

__all__ = ["TAIL_BYTES", "StderrRelay", "StderrTails", "read_tail"]

#: Bytes taken in at one time; as many may wait for room.
_CHUNK: Final = 64 * 1024
#: Bytes of a child's stderr that are kept. The dump of a crash in a dozen threads fits.
TAIL_BYTES: Final = 16 * 1024
#: What a pipe that has any room takes without blocking (PIPE_BUF).
_WRITE: Final = 4096
#: What a file may have room for later says: a full disk, a quota, a log that is cut off when large.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Bytes taken at a child's end: what a pipe holds at most, unless somebody goes on writing.
_LAST_CHUNK: Final = 1024 * 1024

#: What the file of tails is called, for people, and in `/proc/<pid>/fd`.
_LABEL: Final = "envbus-stderr"
#: What each of its slots begins with: process id, 0 if it is free, and bytes of the tail behind it.
_HEADER: Final = struct.Struct("=II")
_SLOT: Final = _HEADER.size + TAIL_BYTES
#: Slots that are looked at: no fork server has more children, and anybody may have made the file.
_MOST_SLOTS: Final = 1 << 14
#: Times that a slot is read until it stands still: a child may be writing all the time.
_READS: Final = 8


class StderrRelay:
    """A pipe from one child to what the driver has as stderr.

    Never waits: as long as there is no room (a stopped terminal, a pipe that nobody reads), the
    child's own pipe is left to fill up, and the child blocks as it would without a relay.
    """

    def __init__(self, target_fd: int) -> None:
        """Make the pipe.

        Args:
            target_fd: Where to pass it on to; it stays the caller's.
        """
        self._target = _never_waiting(target_fd)
        try:
            self._source, self.child_fd = os.pipe()
        except OSError:
            os.close(self._target)
            raise
        os.set_blocking(self._source, False)
        self._waiting = bytearray()
        self._target_gone = False
        #: The end of what the child wrote.
        self.tail = bytearray()
        self._tails: StderrTails | None = None
        self._pid = 0
        self._slot: int | None = None

    def show_as(self, pid: int, tails: StderrTails) -> None:
        """Have others find the tail in `tails`, as that of process `pid`, until `finish`."""
        self._pid, self._tails = pid, tails

    def close_child_fd(self) -> None:
        """Close the end that the child has by now."""
        os.close(self.child_fd)
        self.child_fd = -1

    @property
    def is_done(self) -> bool:
        """Whether nobody writes any more and all was passed on."""
        return self._source < 0 and not self._waiting

    def register(self, poller: select.poll) -> None:
        """Have `poller` wake up when `pump` has something to do."""
        if self._waiting:
            poller.register(self._target, select.POLLOUT)
        elif self._source >= 0:
            poller.register(self._source, select.POLLIN)

    def pump(self) -> None:
        """Pass on what is there, as far as there is room."""
        self._write()
        if not self._waiting and self._source >= 0:
            if self._read(_CHUNK):
                self._show()
            self._write()

    def finish(self) -> None:
        """The child has ended: take what is left in the pipe."""
        if self._source >= 0:
            self._read(_LAST_CHUNK)
            self._hang_up()
        self._hide()
        self._write()

    def flush(self, deadline: float) -> None:
        """Pass the rest on, waiting for room until `deadline`, in seconds of `time.monotonic`."""
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._target, select.POLLOUT)
            poller.poll(left * 1000)
            self._write()

    def close(self) -> None:
        """Let go of all descriptors. Idempotent."""
        self.close_server_fds()
        if self.child_fd >= 0:
            self.close_child_fd()

    def close_server_fds(self) -> None:
        """Let go of all but the child's end. Idempotent."""
        self._hang_up()
        if self._target >= 0:
            os.close(self._target)
            self._target = -1
        self._waiting.clear()

    def _read(self, most: int) -> bool:
        """Take what is there, of about so many bytes; return whether that was something."""
        left = most
        while left > 0:
            try:
                data = os.read(self._source, min(left, _CHUNK))
            except BlockingIOError:
                break
            if not data:
                self._hang_up()
                break
            left -= len(data)
            self.tail += data
            del self.tail[:-TAIL_BYTES]
            if not self._target_gone:
                self._waiting += data
        return left < most

    def _show(self) -> None:
        if self._tails is not None:
            if self._slot is None:
                self._slot = self._tails.take_slot()
            self._tails.write(self._slot, self._pid, self.tail)

    def _hide(self) -> None:
        if self._tails is not None and self._slot is not None:
            self._tails.free_slot(self._slot)
            self._slot = None

    def _write(self) -> None:
        while self._waiting and _has_room(self._target):
            try:
                del self._waiting[: os.write(self._target, self._waiting[:_WRITE])]
            except BlockingIOError:  # others write there, too, and were faster
                return
            except OSError as exc:  # a terminal that was closed, a pipe without a reader
                self._target_gone = exc.errno not in _NO_ROOM
                self._waiting.clear()

    def _hang_up(self) -> None:
        if self._source >= 0:
            with contextlib.suppress(OSError):
                os.close(self._source)
            self._source = -1


class StderrTails:
    """A nameless file with a slot for each child that has written; `read_tail` reads it.

    Where other processes could not find the file, or there is no room for it, nothing is kept.
    """

    def __init__(self) -> None:
        self._fd = -1
        if FOUND_BY_LABEL:
            with contextlib.suppress(OSError):
                self._fd = create_memfd(_LABEL)
        #: Slots that were in use, as a heap: those at the beginning are taken first.
        self._free: list[int] = []
        self._count = 0

    def take_slot(self) -> int:
        """Return the number of a slot that nobody has."""
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def write(self, slot: int, pid: int, tail: bytes | bytearray) -> None:
        """Write into a slot that was taken what process `pid` has written last."""
        self._put(slot, _HEADER.pack(pid, len(tail)) + tail)

    def free_slot(self, slot: int) -> None:
        """Give a slot back: its process has ended."""
        self._put(slot, bytes(_HEADER.size))
        heapq.heappush(self._free, slot)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, slot: int, data: bytes) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # no memory, or a limit to the size of files
                os.pwrite(self._fd, data, slot * _SLOT)


def read_tail(pid: int) -> bytes | None:
    """Return the last `TAIL_BYTES` that a running child of a fork server wrote to stderr.

    Whoever started the fork server, which is not asked. None: no fork server has such a child, or
    it is another user's; or others cannot find its file, which needs Linux.
    """
    with contextlib.suppress(OSError):
        folder = f"/proc/{parent_of(pid)}/fd"
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                fd = open_labelled(f"{folder}/{number}", _LABEL, os.O_RDONLY)
                try:
                    return _find_tail(fd, pid)
                finally:
                    os.close(fd)
    return None


def _find_tail(fd: int, pid: int) -> bytes:
    """Return the tail of a process in a file that anybody may have written."""
    for slot in range(min(os.fstat(fd).st_size // _SLOT + 1, _MOST_SLOTS)):
        header = os.pread(fd, _HEADER.size, slot * _SLOT)
        if len(header) == _HEADER.size and _HEADER.unpack(header)[0] == pid:
            return _read_slot(fd, slot, pid)
    return b""


def _read_slot(fd: int, slot: int, pid: int) -> bytes:
    before = b""
    for _ in range(_READS):
        data = os.pread(fd, _SLOT, slot * _SLOT)
        if data == before:
            break
        before = data
    if len(data) < _HEADER.size:
        return b""
    owner, length = _HEADER.unpack_from(data)
    return data[_HEADER.size :][:length] if owner == pid else b""


def _never_waiting(fd: int) -> int:
    """Return a descriptor of the same file, a write to which never waits, if that can be had.

    The driver's own may not be made non-blocking: others write to it. So a pipe or terminal is
    opened anew; a socket cannot be, and a file never waits.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        with contextlib.suppress(OSError):  # no /proc, nobody reads it, or another user's
            return os.open(f"/proc/self/fd/{fd}", flags)
    return os.dup(fd)


def _has_room(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
