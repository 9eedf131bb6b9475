"""Plain TCP and WebSocket as two forms of the same: bytes in, messages out, and back.

Leaves out who is let in: `access.py`. Pure.
"""

from __future__ import annotations

import http
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeAlias

from websockets.datastructures import Headers, MultipleValuesError
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from envbus.bus.gateway.access import (
    TurnedAwayError,
    check_token,
    is_welcome_origin,
    shown_token,
)
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.wire.codec import message
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import (
    BEGINNING,
    StreamReader,
    TooLarge,
    begun_request,
    pack,
    pack_for_stream,
    unpack,
)
from envbus.bus.wire.messages import Failed, Kind

__all__ = [
    "Framing",
    "StreamFraming",
    "WebSocketFraming",
    "failure_of",
]

#: Bytes of a WebSocket's reason for closing (RFC 6455, 5.5), and of a frame's mask (5.3).
_MAX_REASON = 123
_MASK_BYTES = 4
#: Pings, and other frames that are no messages, of who has not said hello.
_MOST_FRAMES_OF_STRANGERS = 64


class StreamFraming:
    """Messages behind their lengths, on plain TCP or TLS.

    Attributes:
        has_token: A right token was shown.
        client: Whose it was; "": it has no name.
        over: The other side wants to end, or broke the framing's own rules.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.has_token = False
        self.client = ""
        self.over = False
        self._limit = config.max_message_bytes
        self._reader = StreamReader(self._limit)
        self._unsent = b""

    def receive(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages that `data` completes; to be exhausted before the next call.

        A request that is over the limit is failed by its id, if that can be read, and passed over.

        Raises:
            TurnedAwayError: The client may not come in, or sent what is over the limit and no
                request.
            DecodeError: What came is malformed.
        """
        return self._reader.feed(data)

    def admit(self) -> None:
        """Pass over requests that are too large from now on."""
        self._reader.on_too_large = self._on_too_large

    def take_unsent(self) -> bytes:
        """Return failures of what was too large."""
        unsent, self._unsent = self._unsent, b""
        return unsent

    def wrap(self, frames: Frames) -> bytes:
        """Return a message behind its length."""
        return pack_for_stream(frames)

    def probe(self) -> bytes:
        """Return nothing: TCP has its keepalive."""
        return b""

    def farewell(self, reason: TurnedAwayError) -> bytes:
        """Return a failure message."""
        return pack_for_stream(failure_of(reason))

    def _on_too_large(self, message: TooLarge) -> None:
        reason = _too_large(message, self._limit)
        if not reason.request_id:
            raise reason
        self._unsent += self.farewell(reason)  # and the connection goes on


class WebSocketFraming:
    """Binary messages of a WebSocket; of its own are handshake, fragments, pings and closing.

    It has the methods and attributes of a `StreamFraming`.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.has_token = False
        self.client = ""
        self.over = False
        self._config = config
        self._protocol = _Protocol(max_size=config.max_message_bytes)
        self._protocol.last_words = self._on_too_large
        #: Frames that may come and be no message; None: any number.
        self._allowed: int | None = _MOST_FRAMES_OF_STRANGERS
        #: What has come of a message in fragments. One piece: many may be empty.
        self._fragments = bytearray()

    def receive(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages that `data` completes; raises as a `StreamFraming` does."""
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
                elif self._allowed is not None:
                    self._allowed -= 1
                    if self._allowed < 0:
                        raise TurnedAwayError(
                            f"{_MOST_FRAMES_OF_STRANGERS} frames came and no hello among them"
                        )

    def admit(self) -> None:
        """Take any number of pings. What is too large is failed, and ends the connection."""
        self._allowed = None

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
        words = self.wrap(failure_of(reason))
        if words:
            text = str(reason).encode()[:_MAX_REASON].decode(errors="ignore")
            self._protocol.fail(CloseCode.POLICY_VIOLATION, text)
        elif self._protocol.state is State.CONNECTING and not self._protocol.eof_sent:
            self._reply(http.HTTPStatus.SERVICE_UNAVAILABLE, str(reason))
        return words + self._collect()

    def _answer(self, request: Request) -> None:
        """Let a client in, or tell by HTTP why not."""
        tokens = self._config.tokens
        origin, shown = _header(request.headers, "Origin"), None
        if not is_welcome_origin(origin, self._config.origins):
            self._refuse(
                http.HTTPStatus.FORBIDDEN,
                f"pages from {origin!r} may not connect; the gateway's 'origins' lists who may",
            )
        if tokens:
            shown = shown_token(_header(request.headers, "Authorization"), request.path)
        if shown is not None:
            try:
                self.client = check_token(shown, tokens)
            except TurnedAwayError as error:
                self._refuse(http.HTTPStatus.UNAUTHORIZED, str(error))
            self.has_token = True
        try:
            response = self._protocol.accept(request)
        except UnicodeEncodeError:  # of websockets before 17, which quotes a header in its answer
            self._refuse(http.HTTPStatus.BAD_REQUEST, "a header of the request is no text")
        self._protocol.send_response(response)

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
        self._fragments += frame.data
        if not frame.fin:
            return None
        message = bytes(self._fragments)
        self._fragments.clear()
        return message

    def _on_too_large(self, size: int, masked: bytes) -> bytes:
        """Return the failure of a message that is too large, of which this much has come."""
        begun = bytes(self._fragments) if self._fragments else _unmasked(masked)
        size += len(self._fragments)
        message = TooLarge(size, begun_request(begun[:BEGINNING]))
        return pack(failure_of(_too_large(message, self._config.max_message_bytes)))

    def _collect(self) -> bytes:
        pieces = self._protocol.data_to_send()
        self.over |= b"" in pieces  # the end of what is sent
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


#: How one connection carries messages.
Framing: TypeAlias = StreamFraming | WebSocketFraming


class _Protocol(ServerProtocol):
    """Says why, before it fails a connection for a message over the limit (code 1009).

    A frame's length is read before its mask and content, so that these are what is left to read.
    """

    last_words: Callable[[int, bytes], bytes]

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        """Fail the connection."""
        if code == CloseCode.MESSAGE_TOO_BIG and self.state is State.OPEN:
            error = sys.exc_info()[1]
            size = error.size if isinstance(error, PayloadTooBig) else None
            begun = bytes(self.reader.buffer[: _MASK_BYTES + BEGINNING])
            self.send_binary(self.last_words(size or 0, begun))
        super().fail(code, reason)


def _unmasked(data: bytes) -> bytes:
    mask, content = data[:_MASK_BYTES], data[_MASK_BYTES:]
    return bytes(byte ^ mask[index % _MASK_BYTES] for index, byte in enumerate(content))


def _too_large(message: TooLarge, limit: int) -> TurnedAwayError:
    return TurnedAwayError(
        f"a message of {message.size} bytes is over the limit of {limit} "
        "(max_message_bytes of the gateway); it was not passed on",
        request_id=message.request_id,
    )


def _header(headers: Headers, name: str) -> str | None:
    try:
        return headers.get(name)
    except MultipleValuesError:
        raise TurnedAwayError(f"the request has several headers {name}") from None


def failure_of(reason: TurnedAwayError) -> Frames:
    """Return the message that tells a client why."""
    failed = Failed(code=reason.code, message=str(reason))
    return message(Kind.FAILURE, failed, reason.request_id)
