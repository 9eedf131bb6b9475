"""Plain TCP and WebSocket as two forms of the same: bytes in, messages out, and back. Pure."""

from __future__ import annotations

import http
from collections.abc import Iterator
from typing import NoReturn, Protocol

from websockets.datastructures import Headers, MultipleValuesError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from envbus.bus.codec import encode
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.door import (
    TurnedAwayError,
    check_token,
    is_welcome_origin,
    shown_token,
)
from envbus.bus.gateway.framing import StreamReader, pack, pack_for_stream, unpack
from envbus.bus.headers import encode_header
from envbus.bus.messages import PROTOCOL_VERSION, Failed, Header, Kind
from envbus.bus.transport import Frames

__all__ = ["Carriage", "StreamCarriage", "WebSocketCarriage"]

#: Bytes of a WebSocket's reason for closing (RFC 6455, 5.5).
_MAX_REASON = 123


class Carriage(Protocol):
    """How one connection carries messages.

    Attributes:
        has_token: The right token was shown by other means than a message.
        over: The other side wants to end, or broke the carriage's own rules.
    """

    has_token: bool
    over: bool

    def receive(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages that `data` completes; to be exhausted before the next call.

        Raises:
            TurnedAwayError: The client may not come in.
            DecodeError: What came is malformed or over a limit.
        """
        ...

    def take_unsent(self) -> bytes:
        """Return what the carriage itself has to say: answers to handshakes and pings."""
        ...

    def wrap(self, frames: Frames) -> bytes:
        """Return the bytes that carry a message; none if the carriage is not open."""
        ...

    def probe(self) -> bytes:
        """Return what a living client answers at once; none: the system's TCP does that."""
        ...

    def farewell(self, reason: TurnedAwayError) -> bytes:
        """Return the last words: why the connection ends."""
        ...


class StreamCarriage:
    """Messages behind their lengths, on plain TCP or TLS."""

    def __init__(self, config: GatewayConfig) -> None:
        self.has_token = False
        self.over = False
        self._reader = StreamReader(config.max_message_bytes)

    def receive(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages that `data` completes."""
        return self._reader.feed(data)

    def take_unsent(self) -> bytes:
        """Return nothing: there is no handshake."""
        return b""

    def wrap(self, frames: Frames) -> bytes:
        """Return a message behind its length."""
        return pack_for_stream(frames)

    def probe(self) -> bytes:
        """Return nothing: TCP has its keepalive."""
        return b""

    def farewell(self, reason: TurnedAwayError) -> bytes:
        """Return a failure message."""
        return pack_for_stream(_failure(reason))


class WebSocketCarriage:
    """Binary messages of a WebSocket; of its own are handshake, fragments, pings and closing."""

    def __init__(self, config: GatewayConfig) -> None:
        self.has_token = False
        self.over = False
        self._config = config
        self._protocol = ServerProtocol(max_size=config.max_message_bytes)
        #: Fragments of a message that is not complete.
        self._fragments: list[bytes] = []

    def receive(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages that `data` completes."""
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                if self._protocol.eof_sent:
                    return  # what came right behind it was no WebSocket
                self._answer(event)
            elif isinstance(event, Frame):
                message = self._assemble(event)
                if message is not None:
                    yield unpack(message)

    def take_unsent(self) -> bytes:
        """Return answers to handshake, pings and closing."""
        return self._collect()

    def wrap(self, frames: Frames) -> bytes:
        """Return a binary message."""
        if self._protocol.state is not State.OPEN:
            return b""
        self._protocol.send_binary(pack(frames))
        return self._collect()

    def probe(self) -> bytes:
        """Return a ping."""
        if self._protocol.state is not State.OPEN:
            return b""
        self._protocol.send_ping(b"")
        return self._collect()

    def farewell(self, reason: TurnedAwayError) -> bytes:
        """Return a failure message and a reason to close; by HTTP if that is not over yet."""
        words = self.wrap(_failure(reason))
        if words:
            text = str(reason).encode()[:_MAX_REASON].decode(errors="ignore")
            self._protocol.fail(CloseCode.POLICY_VIOLATION, text)
        elif self._protocol.state is State.CONNECTING and not self._protocol.eof_sent:
            self._reply(http.HTTPStatus.SERVICE_UNAVAILABLE, str(reason))
        return words + self._collect()

    def _answer(self, request: Request) -> None:
        """Let a client in, or tell by HTTP why not."""
        token = self._config.token
        origin, shown = _header(request.headers, "Origin"), None
        if not is_welcome_origin(origin, self._config.origins):
            self._refuse(
                http.HTTPStatus.FORBIDDEN,
                f"pages from {origin!r} may not connect; the gateway's 'origins' lists who may",
            )
        if token is not None:
            shown = shown_token(_header(request.headers, "Authorization"), request.path)
        if token is not None and shown is not None:
            try:
                check_token(shown, token)
            except TurnedAwayError as error:
                self._refuse(http.HTTPStatus.UNAUTHORIZED, str(error))
            self.has_token = True
        self._protocol.send_response(self._protocol.accept(request))

    def _refuse(self, status: http.HTTPStatus, why: str) -> NoReturn:
        self._reply(status, why)
        raise TurnedAwayError(why)

    def _reply(self, status: http.HTTPStatus, why: str) -> None:
        self._protocol.send_response(self._protocol.reject(status, f"{why}\n"))

    def _assemble(self, frame: Frame) -> bytes | None:
        """Return the message that `frame` completes, or None."""
        if frame.opcode is Opcode.TEXT:
            raise TurnedAwayError("messages are binary; this one is text")
        if frame.opcode not in (Opcode.BINARY, Opcode.CONT):
            return None
        if frame.fin and not self._fragments:
            return bytes(frame.data)
        self._fragments.append(bytes(frame.data))
        if not frame.fin:
            return None
        message = b"".join(self._fragments)
        self._fragments.clear()
        return message

    def _collect(self) -> bytes:
        pieces = self._protocol.data_to_send()
        self.over |= b"" in pieces  # the end of what is sent
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _header(headers: Headers, name: str) -> str | None:
    try:
        return headers.get(name)
    except MultipleValuesError:
        raise TurnedAwayError(f"the request has several headers {name}") from None


def _failure(reason: TurnedAwayError) -> Frames:
    header = Header(PROTOCOL_VERSION, Kind.FAILURE, 0, Failed.__name__)
    return [encode_header(header), *encode(Failed(code=reason.code, message=str(reason)))]
