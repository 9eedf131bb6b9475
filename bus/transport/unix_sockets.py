"""Descriptors over Unix sockets, waiting for such sockets, and being woken up by one.

Leaves out what is said over them (`process/channel.py`, `process/pipe.py`).
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol

from envbus.bus.descriptors import opening
from envbus.bus.interrupts import interruptible

__all__ = [
    "Bell",
    "owner_of",
    "receive_with_descriptors",
    "rights",
    "wait_for",
    "wait_for_answer",
]

#: Most descriptors that one `receive_with_descriptors` takes in; Linux sends up to 253 at once.
_MAX_DESCRIPTORS: Final = 64
_RIGHTS_SPACE: Final = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
#: Process, user and group at the other end of a socket.
_CREDENTIALS: Final = struct.Struct("3i")
#: Seconds of one wait: poll(2) takes milliseconds in a C int, some 24 days.
_LONGEST_WAIT: Final = 1e6
#: Seconds for an answer during which Ctrl-C is kept, also on a busy machine.
_USUAL_ANSWER: Final = 1.0


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return what `socket.sendmsg` takes to send duplicates of `fds`."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def receive_with_descriptors(
    sock: socket.socket, size: int, flags: int = 0
) -> tuple[bytes, list[int], bool]:
    """Return up to `size` bytes from a socket, and what came with them.

    Returns:
        The bytes, empty after a hang-up; the descriptors, which child processes do not inherit
        and which the caller closes; and whether descriptors were lost, because this process
        may not open any more.

    Raises:
        BlockingIOError: Nothing is there now, or within the socket's time-out.
    """
    try:
        data, ancillary, found, _ = sock.recvmsg(size, _RIGHTS_SPACE, _CLOEXEC | flags)
    except ConnectionResetError:
        return b"", [], False
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not _CLOEXEC:
        for fd in fds:
            os.set_inheritable(fd, False)
    return data, list(fds), bool(found & socket.MSG_CTRUNC)


def owner_of(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a connection, as the kernel knows them."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return process, user


def wait_for(file: _HasFileno, events: int, deadline: float) -> int:
    """Wait for `events` (of `select.poll`) until `deadline`; return those that are there.

    Args:
        file: What to wait for.
        events: `select.POLLIN`, `select.POLLOUT`; a hang-up is always waited for.
        deadline: Seconds of `time.monotonic`; one that has passed asks without waiting.
    """
    poller = select.poll()
    poller.register(file, events)
    left = min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT)
    found = poller.poll(left * 1000)
    return found[0][1] if found else 0


def wait_for_answer(file: _HasFileno, deadline: float) -> int:
    """Wait for something to read, as `wait_for`; after a second Ctrl-C may break it off.

    For answers that come at once, unless what is asked is still importing, stopped or stuck.
    """
    usual = min(deadline, time.monotonic() + _USUAL_ANSWER)
    found = wait_for(file, select.POLLIN, usual)
    if not found and usual < deadline:
        with interruptible():
            found = wait_for(file, select.POLLIN, deadline)
    return found


class Bell:
    """Wakes who waits for a descriptor, from any thread. Rung twice, it rings once.

    Used under a lock of its owner where there are several threads, so that who comes for what the
    bell tells of finds it rung. There is no descriptor until somebody asks for it.

    Attributes:
        rung: Whether it rings.
    """

    def __init__(self) -> None:
        self.rung = False
        #: Who is woken has the first one.
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def fileno(self) -> int:
        """Return the descriptor that is readable while it rings.

        Raises:
            TransportError: There is none left.
        """
        if self._ends is None:
            with opening("no descriptor to wait for can be made"):
                ear, waker = socket.socketpair()
            ear.setblocking(False)
            self._ends = ear, waker
            if self.rung:  # twice would do no harm: another thread may ring just now
                waker.send(b".")
        return self._ends[0].fileno()

    def ring(self) -> None:
        """Ring until `silence`."""
        if not self.rung:
            self.rung = True
            if self._ends is not None:
                with contextlib.suppress(OSError):  # it was closed: nobody waits any more
                    self._ends[1].send(b".")

    def silence(self) -> None:
        """Ring no more. By who waits."""
        if self.rung:
            if self._ends is not None:
                with contextlib.suppress(BlockingIOError):
                    self._ends[0].recv(64)
            self.rung = False  # last: broken off before, it is silenced again

    def close(self) -> None:
        """Close both ends. Idempotent."""
        for end in self._ends or ():
            end.close()
