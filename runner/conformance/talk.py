"""Raw connections to a bridge: frames out, frames in, and requests, one at a time.

No patience, and each answer is judged by the protocol's rules. One class of link per transport.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import select
import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol, cast
from urllib.parse import quote

import zmq

from envbus.actors.external.protocol import BRIDGE
from envbus.bus.errors import ConfigError, DecodeError, ProtocolError
from envbus.bus.transport.curve_keys import PeerKeys
from envbus.bus.transport.zmq_sockets import check_room
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import StreamReader, pack, pack_for_stream, unpack
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    Goodbye,
    Header,
    Hello,
    Kind,
    Notice,
    Payload,
    R,
    Request,
    Welcome,
)
from envbus.runner.conformance.address import Address

__all__ = [
    "BrokenRuleError",
    "FailureError",
    "LinkEndedError",
    "NoAnswerError",
    "StreamLink",
    "Talk",
    "TalkLink",
    "WebSocketLink",
    "ZmqLink",
    "open_link",
]

#: Longest message that is taken, in bytes.
MAX_MESSAGE_BYTES = 64 * 2**20
#: Seconds behind a deadline in which what has come is still read; some send without end.
_GRACE = 1.0
#: Seconds that an event loop has to see what is there already.
_A_LOOK = 0.01


class LinkEndedError(Exception):
    """The other side has closed the connection, or broken its rules; the text says which."""


class TalkLink(Protocol):
    """One connection. Used by one thread."""

    def send(self, frames: Frames) -> None:
        """Send a message.

        Raises:
            LinkEndedError: The connection is closed.
        """
        ...

    def receive(self, timeout: float) -> list[Any] | None:
        """Return the frames of the next message, or None if there is none in `timeout` seconds.

        Raises:
            LinkEndedError: The connection was closed, or what came is no message.
        """
        ...

    def close(self) -> None:
        """End the connection. Idempotent."""
        ...


class StreamLink:
    """Messages behind their lengths, on plain TCP or TLS."""

    def __init__(self, address: Address, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            try:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
            except BaseException:
                self._socket.close()
                raise
        self._reader = StreamReader(MAX_MESSAGE_BYTES)
        self._ready: deque[list[memoryview]] = deque()

    def send(self, frames: Frames) -> None:
        """Send a message."""
        self.send_bytes(pack_for_stream(frames))

    def send_bytes(self, data: bytes) -> None:
        """Send what need not be a message."""
        try:
            self._socket.sendall(data)
        except OSError as exc:
            raise LinkEndedError(f"the connection is closed: {exc}") from exc

    def receive(self, timeout: float) -> list[Any] | None:
        """Return the next message."""
        deadline = time.monotonic() + timeout
        while not self._ready:
            pending = getattr(self._socket, "pending", int)()
            left = max(deadline - time.monotonic(), 0.0)
            if not pending and not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data = self._socket.recv(1 << 16)
                self._ready.extend(self._reader.feed(data))
            except DecodeError as exc:
                raise LinkEndedError(f"what came is no message: {exc}") from exc
            except (OSError, ValueError) as exc:
                raise LinkEndedError(f"the connection broke: {exc}") from exc
            if not data:
                raise LinkEndedError("the other side closed the connection")
        return self._ready.popleft()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class WebSocketLink:
    """Binary messages of a WebSocket.

    By asyncio, though all waits block: websockets' blocking client reads and writes TLS in two
    threads, of which Python before 3.13 breaks one connection of some hundreds.
    """

    def __init__(
        self, address: Address, timeout: float, tls: ssl.SSLContext | None, token: str | None
    ) -> None:
        from websockets.asyncio.client import connect

        async def opened() -> Any:
            return await connect(
                address.url(f"?token={quote(token)}" if token else ""),
                ssl=tls,
                open_timeout=timeout,
                close_timeout=1.0,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )

        self._loop = asyncio.new_event_loop()
        try:
            self._socket = self._loop.run_until_complete(opened())
        except BaseException:
            self._loop.close()
            raise

    def send(self, frames: Frames) -> None:
        """Send a message."""
        from websockets.exceptions import ConnectionClosed

        try:
            self._loop.run_until_complete(self._socket.send(pack(frames)))
        except ConnectionClosed as exc:
            raise LinkEndedError(f"the connection is closed: {exc}") from exc

    def receive(self, timeout: float) -> list[Any] | None:
        """Return the next message."""
        from websockets.exceptions import ConnectionClosed

        message = asyncio.wait_for(self._socket.recv(), max(timeout, _A_LOOK))
        try:
            data = self._loop.run_until_complete(message)
        except asyncio.TimeoutError:
            return None
        except ConnectionClosed as exc:
            raise LinkEndedError(f"the other side closed the connection: {exc}") from exc
        if isinstance(data, str):
            raise LinkEndedError("a text message came; messages are binary")
        try:
            return list(unpack(data))
        except DecodeError as exc:
            raise LinkEndedError(f"what came is no message: {exc}") from exc

    def close(self) -> None:
        """End the connection."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._socket.close())
            self._loop.close()


class ZmqLink:
    """A DEALER socket, with what its monitor tells of the handshake.

    Raises:
        TransportError: There are too few descriptors.
    """

    def __init__(self, address: Address, keys: PeerKeys | None) -> None:
        check_room()
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"d" + os.urandom(15))
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(address.url())

    def wait_for_handshake(self, timeout: float) -> str | None:
        """Wait until the connection is ready; return why it is not, or None if it is."""
        from zmq.utils.monitor import recv_monitor_message

        deadline = time.monotonic() + timeout
        seen = "nothing listens there"
        while self._monitor.poll(int(1e3 * max(deadline - time.monotonic(), 0.0))):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return None
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "the keys were refused"
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return "the security mechanisms differ: only one side uses keys, or other ones"
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return "the connection was closed in the handshake"
            if event == zmq.EVENT_CONNECTED:
                seen = "the connection stands, and nobody answers the handshake"
        return seen

    def send(self, frames: Frames) -> None:
        """Send a message."""
        self._socket.send_multipart(list(frames))

    def receive(self, timeout: float) -> list[Any] | None:
        """Return the next message."""
        if not self._socket.poll(math.ceil(1e3 * timeout)):
            return None
        return list(self._socket.recv_multipart())

    def close(self) -> None:
        """End the connection."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=200)


def open_link(
    address: Address,
    *,
    timeout: float = 5.0,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    keys: PeerKeys | None = None,
) -> TalkLink:
    """Return a connection that stands.

    Args:
        address: Where to; `tls` of it is kept to also where no context is given.
        timeout: Seconds until it stands.
        token: Of a gateway; shown here by a WebSocket only.
        tls: What TLS is made with; None: what this host trusts, where the address has TLS.
        keys: For ZeroMQ.

    Raises:
        ConfigError: Keys do not belong to this transport, or WebSocket's library is missing.
        OSError, LinkEndedError: There is no connection.
        TransportError: There are too few descriptors for one.
    """
    if keys is not None and address.transport != "zmq":
        raise ConfigError("keys belong to ZeroMQ; TCP and WebSocket have a token and TLS")
    if address.tls and tls is None:
        tls = ssl.create_default_context()
    if address.transport == "stream":
        return StreamLink(address, timeout, tls)
    if address.transport == "websocket":
        return WebSocketLink(address, timeout, tls, token)
    link = ZmqLink(address, keys)
    reason = link.wait_for_handshake(timeout)
    if reason is not None:
        link.close()
        raise LinkEndedError(reason)
    return link


class BrokenRuleError(Exception):
    """The other side broke a rule of the protocol; the text says which."""


class NoAnswerError(Exception):
    """A request was not answered in time."""


class FailureError(Exception):
    """A request ended in a FAILURE.

    Attributes:
        failed: What it said.
    """

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code.value}: {failed.message}")
        self.failed = failed


class Talk:
    """Asks over a link.

    Args:
        link: A connection that stands.
        timeout: Seconds to wait for an answer unless told otherwise; the deadline that requests
            carry is as far away.
    """

    def __init__(self, link: TalkLink, timeout: float = 5.0) -> None:
        self.link = link
        self.timeout = timeout
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """Return an id that no request of this connection has had."""
        return next(self._ids)

    def ask(
        self,
        request: Request[R],
        *,
        to: str = BRIDGE,
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> R:
        """Send a request and return its answer.

        Raises:
            RefusedError, NoAnswerError, BrokenRuleError, LinkEndedError: What else may come.
        """
        wait = self.timeout if timeout is None else timeout
        number = self.next_id() if request_id is None else request_id
        self.send(request, Kind.REQUEST, request_id=number, ttl=wait, to=to)
        # A server judges deadlines by its own clock; its failure needs time to arrive.
        return self.answer_to(request, number, wait + 1.0)

    def answer_to(self, request: Request[R], request_id: int, timeout: float) -> R:
        """Return the answer to a request that was sent."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            frames = self.link.receive(max(left, 0.0)) if left > -_GRACE else None
            if frames is None:
                raise NoAnswerError(
                    f"{type(request).__name__} was not answered in {timeout:.3g} s: neither REPLY "
                    "nor FAILURE"
                )
            header = self._header(frames)
            if header.kind in (Kind.NOTICE, Kind.REQUEST):
                continue
            if header.request_id == request_id:
                return self._judge(request, header, frames)
            if header.request_id == 0 and header.kind is Kind.FAILURE:
                raise FailureError(self._decode(Failed, frames))

    def tell(self, notice: Notice) -> None:
        """Send what wants no answer."""
        self.send(notice, Kind.NOTICE)

    def send(
        self,
        payload: Payload,
        kind: Kind,
        *,
        request_id: int = 0,
        ttl: float = 0.0,
        to: str = "",
        version: int = PROTOCOL_VERSION,
    ) -> None:
        """Send a message with exactly such a header."""
        header = Header(version, kind, request_id, type(payload).__name__, ttl, 0, to)
        self.link.send([encode_header(header), *encode(payload)])

    def say_hello(self, name: str, *, heartbeat: float = 10.0) -> Welcome:
        """Join the broker."""
        return self.ask(Hello(name=name, services=[], heartbeat=heartbeat), to="")

    def close(self) -> None:
        """Leave."""
        with suppress(Exception):  # whoever is gone need not be told
            self.tell(Goodbye())
        self.link.close()

    def _judge(self, request: Request[R], header: Header, frames: Frames) -> R:
        if header.kind is Kind.FAILURE:
            if header.payload_type != Failed.__name__:
                raise BrokenRuleError(f"a FAILURE carries {header.payload_type}, not Failed")
            raise FailureError(self._decode(Failed, frames))
        wanted = request.reply_type
        if header.payload_type != wanted.__name__:
            raise BrokenRuleError(
                f"{type(request).__name__} is answered by {header.payload_type}, not by "
                f"{wanted.__name__}"
            )
        return cast("R", self._decode(wanted, frames))

    @staticmethod
    def _header(frames: Frames) -> Header:
        try:
            return decode_header(bytes(frames[0]))
        except ProtocolError as exc:
            raise BrokenRuleError(f"a header cannot be read: {exc}") from exc

    @staticmethod
    def _decode(kind: type[Any], frames: Frames) -> Any:
        try:
            return decode(kind, frames[1:])
        except DecodeError as exc:
            raise BrokenRuleError(f"{kind.__name__} cannot be read: {exc}") from exc
