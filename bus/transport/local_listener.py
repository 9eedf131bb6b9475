"""Streams of peers of this user and host: where they come in without ZeroMQ, and one end of each.

A local link's address follows from that of the broker. It is an abstract one: no file, and none is
left behind; it belongs to the network namespace, as a loopback port does. Leaves out what is said
once they are in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterable
from typing import Final

from envbus.bus.errors import ClosedError, DecodeError
from envbus.bus.forking import disown_in_forks
from envbus.bus.transport.interface import BACKLOG
from envbus.bus.transport.unix_sockets import owner_of
from envbus.bus.wire.frames import Buffer
from envbus.bus.wire.framing import StreamReader, pack_for_stream
from envbus.bus.wire.limits import MAX_MESSAGE_BYTES

__all__ = [
    "ADDRESSES_EXIST",
    "INTRODUCTION",
    "LocalListener",
    "StreamEnd",
    "address_of",
    "introduced",
    "local_link_address",
    "path_of",
]

logger = logging.getLogger("envbus.bus.transport.local_listener")

#: Whether this platform has sockets without a file.
ADDRESSES_EXIST: Final = sys.platform == "linux"
#: First frame of the first packet; the second is the identity.
INTRODUCTION: Final = b"envbus link 1"
#: Longest identity, as ZeroMQ has it.
_MAX_IDENTITY_BYTES: Final = 255
#: Connections that have not said who they are; the oldest is cut off for a newer one.
_MAX_STRANGERS: Final = 64


class LocalListener:
    """Sockets beside a broker's endpoints, and who connects to them. Used by one thread.

    Args:
        endpoints: The broker's; those beside which there can be none are passed over.
    """

    def __init__(self, endpoints: Iterable[str] = ()) -> None:
        self._listeners: dict[int, socket.socket] = {}
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
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            logger.info("no local links beside %s: %s", endpoint, exc)
            return
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._poller.register(listener.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `arrivals` is worth a call."""
        return self._poller.fileno()

    def arrivals(self) -> list[tuple[bytes, StreamEnd]]:
        """Return who has come in: identity and connection."""
        arrived = []
        for fd, _ in self._poller.poll(0.0):
            listener = self._listeners.get(fd)
            if listener is not None:
                self._accept(listener)
            elif (arrival := self._introduce(fd)) is not None:
                arrived.append(arrival)
        return arrived

    def close(self) -> None:
        """Close all listeners, and who has not said who it is. Idempotent."""
        for listener in self._listeners.values():
            listener.close()
        for end in self._strangers.values():
            end.close()
        self._listeners.clear()
        self._strangers.clear()
        self._poller.close()

    #: In a forked copy; the owner's epoll, which both share, is left alone.
    disown = close

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptors left: a listener that stays would be a busy loop
            logger.error("no more local links, new peers use ZeroMQ: %s", exc)
            self._poller.unregister(listener.fileno())
            del self._listeners[listener.fileno()]
            listener.close()
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
    """Return where the local link beside an endpoint is, now; None: there is none."""
    if not ADDRESSES_EXIST:
        return None
    path, file = path_of(endpoint), None
    if path is not None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        file = status.st_dev, status.st_ino
    return local_link_address(endpoint, file)


def path_of(endpoint: str) -> str | None:
    """Return the file of an `ipc://` endpoint, which `local_link_address` asks about; else None."""
    scheme, _, path = endpoint.partition("://")
    return path if scheme == "ipc" and path and not path.startswith("@") else None


def local_link_address(endpoint: str, file: tuple[int, int] | None = None) -> bytes | None:
    """Return the address of the local link beside `endpoint`, or None if there can be none.

    Args:
        endpoint: What the broker is bound to.
        file: Device and inode of an `ipc://` endpoint's file, which tell it from one of that
            path in another container; None: there is none.
    """
    scheme, _, address = endpoint.partition("://")
    if path_of(endpoint) is not None:
        return None if file is None else b"\0envbus.link.ipc.%x.%x" % file
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
    return f"\0envbus.link.tcp.{ip}.{number}".encode()


def introduced(frames: list[bytes]) -> bytes | None:
    """Return the identity of who begins with these frames; None: that is nobody."""
    if len(frames) != 2 or frames[0] != INTRODUCTION:
        return None
    identity = frames[1]
    if not 0 < len(identity) <= _MAX_IDENTITY_BYTES or identity[0] == 0:
        return None
    return identity


#: Bytes to read at one go: more than a socket holds at most by default, so that a message that is
#: there is hardly ever cut; and at most, while a larger one comes.
_READ_BYTES: Final = 1 << 18
_MOST_READ_BYTES: Final = 1 << 20


class StreamEnd:
    """Messages in, messages out; nothing waits. Used by one thread.

    As `LocalLinkEnd`, for those who were not given a socketpair: without descriptors that go with
    it, and without trust that what was begun is ended.

    Args:
        sock: A Unix stream socket; closed with this.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = StreamReader(MAX_MESSAGE_BYTES)
        self._inbox: deque[list[memoryview]] = deque()
        #: What of a packet that was begun waits for room.
        self._rest = memoryview(b"")
        disown_in_forks(self)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def is_of_this_user(self) -> bool:
        """Whether the process at the other end belongs to this one's user."""
        return owner_of(self._socket)[1] == os.geteuid()

    def is_of_this_process(self) -> bool:
        """Whether the other end is in this process."""
        return owner_of(self._socket)[0] == os.getpid()

    #: A packet from frames.
    pack = staticmethod(pack_for_stream)

    def write(self, packet: bytes) -> bool:
        """Send a packet; False if there is no room now. See `finish`.

        Raises:
            ClosedError: The other side is gone.
        """
        if self._rest and not self.finish():
            return False
        sent = self._send(packet)
        if sent == 0:
            return False
        if sent < len(packet):
            self._rest = memoryview(packet)[sent:]
        return True

    def finish(self) -> bool:
        """Send what `write` has only begun; False if there is still no room for all of it.

        Raises:
            ClosedError: The other side is gone.
        """
        while self._rest:
            sent = self._send(self._rest)
            if sent == 0:
                return False
            self._rest = self._rest[sent:]
        return True

    @property
    def has_begun(self) -> bool:
        """Whether there is something to `finish`."""
        return len(self._rest) > 0

    def receive(self) -> list[Buffer] | None:
        """Return the next message, or None if there is none that is whole now.

        Raises:
            ClosedError: The other side is gone.
            DecodeError: It sends what is no message. Nothing can be read behind it.
        """
        inbox = self._inbox
        if inbox:
            return inbox.popleft()
        missing = self._reader.missing
        size = _READ_BYTES if missing <= _READ_BYTES else min(missing, _MOST_READ_BYTES)
        try:
            data = self._socket.recv(size)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ClosedError(f"the other side of the local link is gone: {exc}") from exc
        if not data:
            raise ClosedError("the other side of the local link is gone")
        inbox.extend(self._reader.feed(data))
        return inbox.popleft() if inbox else None

    @property
    def has_more(self) -> bool:
        """Whether `receive` has a message without a look at the socket."""
        return bool(self._inbox)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    #: In a forked copy, which the owner does not notice.
    disown = close

    def _send(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise ClosedError(f"the other side of the local link is gone: {exc}") from exc
