"""How other processes of this host find a policy worker and reach it: a file and a socket.

The status file is a small file in the workers' folder, which only their user may enter: it says who
is up, and why others are not, and is replaced as a whole. At the handover socket, a Unix socket
there, descriptors are handed over. What comes over it is decoded, never unpickled. What cleans
TMPDIR up may remove both, which are then made again. Whether the owner is there says a sign without
a file. Leaves out what the descriptors are used for (`policy_worker.py`, `policy_connections.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from envbus.bus.complaints import Complaints
from envbus.bus.descriptors import opening
from envbus.bus.errors import ProtocolError
from envbus.bus.folders import is_own_folder
from envbus.bus.transport.interface import BACKLOG
from envbus.bus.transport.unix_sockets import receive_with_descriptors, rights
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Notice, Payload
from envbus.runner.inference.policy_protocol import OpenLocalLink, ShareRows

__all__ = [
    "Handover",
    "HandoverSocket",
    "OwnerSign",
    "StatusFile",
    "WorkerStatus",
    "close_all",
    "hand_over",
    "handover_path",
    "has_owner",
    "read_status",
    "status_exists",
    "write_status",
]

_NAME: Final = "status.json"

logger = logging.getLogger("envbus.runner.inference.policy_workers")

#: Bytes of one message; what is larger goes into a file.
_MAX_BYTES: Final = 4096
#: Seconds to wait where too many hand over.
_HANDOVER_TIMEOUT: Final = 1.0
_KNOWN: Final = {known.__name__: known for known in (OpenLocalLink, ShareRows)}


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    name: str
    incarnation: int
    #: "starting", "up", "down" (it will be started again) or "lost" (it will not).
    state: str
    #: How its last life ended; empty: it is in its first.
    reason: str = ""


class StatusFile(msgspec.Struct, frozen=True, kw_only=True):
    """All workers."""

    workers: list[WorkerStatus]

    def is_hopeless(self) -> bool:
        """Return whether no worker is or will be there."""
        return all(worker.state == "lost" for worker in self.workers)

    def describe(self) -> str:
        """Return who is not up, and why, for people."""
        return "; ".join(
            f"{worker.name}: {worker.reason or worker.state}"
            for worker in self.workers
            if worker.state != "up"
        )


def handover_path(directory: Path, name: str, incarnation: int) -> Path:
    """Return where a worker listens, in one of its lives."""
    return directory / f"{name}.{incarnation}"


def status_exists(directory: Path) -> bool:
    """Return whether there is a status file in the folder."""
    return os.path.exists(directory / _NAME)


def write_status(directory: Path, status: StatusFile) -> None:
    """Replace the file."""
    fresh = directory / f"{_NAME}.new"
    fresh.write_bytes(msgspec.json.encode(status))
    os.replace(fresh, directory / _NAME)


def read_status(directory: Path) -> StatusFile | None:
    """Return what is in the status file; None: there is none. See `has_owner`."""
    if not is_own_folder(directory):  # once it was removed, others may make one of that name
        return None
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=StatusFile)
    except FileNotFoundError:
        return None


class OwnerSign:
    """Says that the workers of a folder have an owner, from `show` to `hide` or the owner's end.

    An abstract Unix socket, so that nothing can remove it. Nobody reads what comes there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None

    def show(self) -> None:
        """Have it be there. Idempotent.

        Raises:
            TransportError: There is no descriptor for it.
        """
        if self._socket is not None:
            return
        with opening("there is no sign of policy workers"):
            fresh = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                fresh.bind(_sign_of(self._directory))
            except BaseException:
                fresh.close()
                raise
        self._socket = fresh

    def hide(self) -> None:
        """Take it away. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def has_owner(directory: Path) -> bool:
    """Return whether an `OwnerSign` is there; not from within another network namespace."""
    try:
        asker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # no descriptor is left: nobody knows
        return True
    with asker:
        return asker.connect_ex(_sign_of(directory)) == 0


def _sign_of(directory: Path) -> bytes:
    return b"\0envbus.owner." + os.fsencode(directory.name)


class Handover(NamedTuple):
    """A message with descriptors, which the receiver closes."""

    notice: Notice
    fds: list[int]


class HandoverSocket:
    """The worker's side. Used by one thread.

    Args:
        path: Where to listen; nothing may be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._poller = select.epoll()
        #: None: there is no folder yet.
        self._listener: socket.socket | None = None
        self._listen()
        self._callers: dict[int, socket.socket] = {}
        self._complaints = Complaints(logger)
        #: Given back when no descriptor is left, to send one caller away: else they would try on.
        self._spare = _any_descriptor()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` is worth a call."""
        return self._poller.fileno()

    def receive(self) -> list[Handover]:
        """Return what was handed over since the last call, without waiting.

        A socket that was removed is made again.
        """
        found: list[Handover] = []
        for _ in range(2):  # who has just come may have spoken already
            for fd, _events in self._poller.poll(0.0):
                if self._listener is not None and fd == self._listener.fileno():
                    self._accept(self._listener)
                else:
                    found += self._hear(fd)
        if not os.path.exists(self._path):
            try:
                self._listen()
            except OSError as exc:
                self._complaints.add("listen", f"nobody new can come to {self._path}: {exc}")
        return found

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        if self._listener is not None:
            self._listener.close()
        self._poller.close()
        close_all(self._spare)
        self._spare = []

    def _listen(self) -> None:
        """Listen at the path, if its folder is there; who came at a former socket was accepted."""
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            fresh.setblocking(False)
            fresh.bind(str(self._path))
            fresh.listen(BACKLOG)
            self._poller.register(fresh, select.EPOLLIN)
        except FileNotFoundError:  # the owner makes the folder first, and asks for a sign of life
            fresh.close()
            return
        except BaseException:
            fresh.close()
            raise
        if self._listener is not None:
            self._poller.unregister(self._listener)
            self._listener.close()
        self._listener = fresh

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                self._complaints.add("accept", f"nobody can be let in: {exc}")
                self._turn_away(listener)
                return
            caller.setblocking(False)
            self._callers[caller.fileno()] = caller
            self._poller.register(caller, select.EPOLLIN)
            if len(self._callers) > BACKLOG:  # the first one will not speak any more
                self._send_away(next(iter(self._callers)))

    def _turn_away(self, listener: socket.socket) -> None:
        """Close the connection of who came first, for whom there is no descriptor."""
        close_all(self._spare)
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        self._spare = _any_descriptor()

    def _hear(self, fd: int) -> list[Handover]:
        fds: list[int] = []
        try:
            data, fds, _ = receive_with_descriptors(self._callers[fd], _MAX_BYTES)
            self._send_away(fd)
            name, _, body = data.partition(b"\0")
            return [Handover(decode(_KNOWN[name.decode()], [body]), fds)]
        except BlockingIOError:
            return []
        except (ProtocolError, KeyError, UnicodeDecodeError) as exc:
            self._complaints.add("handover", f"a handover was not understood: {exc}")
            close_all(fds)
            return []

    def _send_away(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._callers.pop(fd).close()


def hand_over(path: Path, notice: Notice, fds: Sequence[int]) -> bool:
    """Hand over a message with descriptors, which stay the caller's; False: nobody is there."""
    data = type(notice).__name__.encode() + b"\0" + _encoded(notice)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(_HANDOVER_TIMEOUT)
        try:
            caller.connect(str(path))
            caller.sendmsg([data], rights(fds))
        except OSError:  # it is not there yet, or has ended, or it is stuck: so many hand over
            return False
    return True


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors; those that were closed by whoever took them over and failed are passed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _any_descriptor() -> list[int]:
    """Return a descriptor of nothing; none if there is none left."""
    try:
        return [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    except OSError:
        return []


def _encoded(payload: Payload) -> bytes:
    (data,) = encode(payload)
    return bytes(data)
