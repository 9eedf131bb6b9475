"""Where peers of this user and host come in without ZeroMQ, and the broker's side of it.

A lane's address follows from that of the broker. It is an abstract one: no file, and none is left
behind; it belongs to the network namespace, as a loopback port does. Leaves out what is said once
they are in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import sys
from collections.abc import Iterable
from typing import Final

from envbus.bus.errors import ClosedError, DecodeError
from envbus.bus.forking import disown_in_forks
from envbus.bus.stream_end import StreamEnd

__all__ = [
    "ADDRESSES_EXIST",
    "INTRODUCTION",
    "LaneListener",
    "address_of",
    "introduced",
    "lane_address",
    "path_of",
]

logger = logging.getLogger("envbus.bus.lane_listener")

#: Whether this platform has sockets without a file.
ADDRESSES_EXIST: Final = sys.platform == "linux"
#: First frame of the first packet; the second is the identity.
INTRODUCTION: Final = b"envbus lane 1"
#: Longest identity, as ZeroMQ has it.
_MAX_IDENTITY_BYTES: Final = 255
#: Connections that have not said who they are; the oldest is cut off for a newer one.
_MAX_STRANGERS: Final = 64
#: Connections waiting to be accepted.
_BACKLOG: Final = 128


class LaneListener:
    """Sockets beside a broker's endpoints, and who is at their doors. Used by one thread.

    Args:
        endpoints: The broker's; those beside which there can be none are passed over.
    """

    def __init__(self, endpoints: Iterable[str] = ()) -> None:
        self._doors: dict[int, socket.socket] = {}
        #: Who has not said yet who they are, oldest first.
        self._strangers: dict[int, StreamEnd] = {}
        self._poller = select.epoll()
        disown_in_forks(self)
        for endpoint in endpoints:
            self.offer(endpoint)

    def offer(self, endpoint: str) -> None:
        """Listen beside an endpoint that is bound; if that cannot be, peers use it itself."""
        address = address_of(endpoint)
        if address is None:
            return
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.bind(address)
            door.listen(_BACKLOG)
        except OSError as exc:
            door.close()
            logger.info("no lanes beside %s: %s", endpoint, exc)
            return
        door.setblocking(False)
        self._doors[door.fileno()] = door
        self._poller.register(door.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `arrivals` is worth a call."""
        return self._poller.fileno()

    def arrivals(self) -> list[tuple[bytes, StreamEnd]]:
        """Return who has come in: identity and connection."""
        arrived = []
        for fd, _ in self._poller.poll(0.0):
            door = self._doors.get(fd)
            if door is not None:
                self._accept(door)
            elif (arrival := self._introduce(fd)) is not None:
                arrived.append(arrival)
        return arrived

    def close(self) -> None:
        """Close all doors, and who stands before them. Idempotent."""
        for door in self._doors.values():
            door.close()
        for end in self._strangers.values():
            end.close()
        self._doors.clear()
        self._strangers.clear()
        self._poller.close()

    def disown(self) -> None:
        """In a forked copy: be closed; the owner's epoll, which both share, is left alone."""
        self.close()

    def _accept(self, door: socket.socket) -> None:
        try:
            sock, _ = door.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptors left: a door that stays open would be a busy loop
            logger.error("no more lanes, new peers use ZeroMQ: %s", exc)
            self._poller.unregister(door.fileno())
            del self._doors[door.fileno()]
            door.close()
            return
        end = StreamEnd(sock)
        if not end.is_of_this_user():
            end.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._cut_off(next(iter(self._strangers)))
        self._strangers[end.fileno()] = end
        self._poller.register(end.fileno(), select.EPOLLIN)

    def _introduce(self, fd: int) -> tuple[bytes, StreamEnd] | None:
        end = self._strangers.get(fd)
        if end is None:
            return None  # cut off a moment ago
        try:
            frames = end.receive()
            if frames is None:
                return None
            identity = introduced([bytes(frame) for frame in frames[:3]])
        except (ClosedError, DecodeError):
            identity = None
        if identity is None:
            self._cut_off(fd)
            return None
        self._poller.unregister(fd)
        del self._strangers[fd]
        return identity, end

    def _cut_off(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._poller.unregister(fd)
        self._strangers.pop(fd).close()


def address_of(endpoint: str) -> bytes | None:
    """Return where the lane beside an endpoint is, now; None: there is none."""
    if not ADDRESSES_EXIST:
        return None
    path, file = path_of(endpoint), None
    if path is not None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        file = status.st_dev, status.st_ino
    return lane_address(endpoint, file)


def path_of(endpoint: str) -> str | None:
    """Return the file of an `ipc://` endpoint, which `lane_address` asks about; else None."""
    scheme, _, path = endpoint.partition("://")
    return path if scheme == "ipc" and path and not path.startswith("@") else None


def lane_address(endpoint: str, file: tuple[int, int] | None = None) -> bytes | None:
    """Return the address of the lane beside `endpoint`, or None if there can be none.

    Args:
        endpoint: What the broker is bound to.
        file: Device and inode of an `ipc://` endpoint's file, which tell it from one of that
            path in another container; None: there is none.
    """
    scheme, _, address = endpoint.partition("://")
    if path_of(endpoint) is not None:
        return None if file is None else b"\0envbus.lane.ipc.%x.%x" % file
    if scheme != "tcp":
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        number = int(port)
    except ValueError:
        return None  # a name, or a wildcard
    if not ip.is_loopback or not 0 < number < 1 << 16:
        return None
    return f"\0envbus.lane.tcp.{ip}.{number}".encode()


def introduced(frames: list[bytes]) -> bytes | None:
    """Return the identity of who begins with these frames; None: that is nobody."""
    if len(frames) != 2 or frames[0] != INTRODUCTION:
        return None
    identity = frames[1]
    if not 0 < len(identity) <= _MAX_IDENTITY_BYTES or identity[0] == 0:
        return None
    return identity
