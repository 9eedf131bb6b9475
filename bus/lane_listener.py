"""Where peers of this user and host come in without ZeroMQ: the broker's side.

Leaves out where that is (`lane_address.py`) and what is said once they are in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Iterable
from typing import Final

from envbus.bus.errors import ClosedError, DecodeError
from envbus.bus.forking import disown_in_forks
from envbus.bus.lane_address import ADDRESSES_EXIST, introduced, lane_address, path_of
from envbus.bus.stream_end import StreamEnd

__all__ = ["LaneListener", "address_of"]

logger = logging.getLogger("envbus.bus.lane_listener")

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
