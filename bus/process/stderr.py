"""What children write to stderr: passed on to the driver's, and its end kept.

Leaves out when: the fork server's loop does it (`forkserver.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from typing import Final

__all__ = ["StderrRelay"]

#: Bytes taken in at one time; as many may wait for room.
_CHUNK: Final = 64 * 1024
#: Bytes of a child's stderr that are kept. The dump of a crash in a dozen threads fits.
_TAIL_BYTES: Final = 16 * 1024
#: What a pipe that has any room takes without blocking (PIPE_BUF).
_WRITE: Final = 4096
#: What a file may have room for later says: a full disk, a quota, a log that is cut off when large.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Bytes taken at a child's end: what a pipe holds at most, unless somebody goes on writing.
_LAST_CHUNK: Final = 1024 * 1024


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
            self._read(_CHUNK)
            self._write()

    def finish(self) -> None:
        """The child has ended: take what is left in the pipe."""
        if self._source >= 0:
            self._read(_LAST_CHUNK)
            self._hang_up()
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

    def _read(self, most: int) -> None:
        while most > 0:
            try:
                data = os.read(self._source, min(most, _CHUNK))
            except BlockingIOError:
                return
            if not data:
                self._hang_up()
                return
            most -= len(data)
            self.tail += data
            del self.tail[:-_TAIL_BYTES]
            if not self._target_gone:
                self._waiting += data

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
