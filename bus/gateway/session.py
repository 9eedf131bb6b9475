"""One connection from its first byte to its last: who it is, and what may pass. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from envbus.bus.brief import printable
from envbus.bus.broker.control import NOBODY
from envbus.bus.errors import EncodeError, ProtocolError, VersionMismatchError
from envbus.bus.gateway.access import TurnedAwayError, check_token
from envbus.bus.gateway.client_framing import Framing, failure_of
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header, message
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import lengths_of
from envbus.bus.wire.messages import (
    Failed,
    FailureCode,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    Token,
    Welcome,
)

__all__ = ["STRANGERS_BYTES", "Budget", "GatewaySession"]

#: What may come before hello is through: HTTP's headers and a token, or a hello with all the
#: services and names that a broker takes.
STRANGERS_BYTES: Final = 64 * 1024
#: Seconds until a mark that has no answer is taken for lost, with a broker that was started again;
#: times how many have none: a broker that is away for long does not find one for each 5 seconds.
_PATIENCE: Final = 5.0
#: Bytes that libzmq takes for a frame besides those that are in it, which may be none.
_FRAME_BYTES: Final = 64
#: Incarnation of what a gateway itself says for a client, who may have said hello with any: what is
#: of a former one the broker passes over without an answer.
_NEWEST: Final = 2**64 - 1
#: What a header that names such a type holds: most messages need not be read.
_HELLO, _WELCOME = Hello.__name__.encode(), Welcome.__name__.encode()


class GatewaySession:
    """Lets a client in, and its messages through untouched, save the limit that Welcome tells.

    Attributes:
        joined: The client was let in and said hello.
        ended: Why the connection ends, once it is to end; "" if its client wants it.
        lease: Seconds of silence after which the broker takes the client for gone; 0.0: it has not
            welcomed it yet, or watches it otherwise.
    """

    def __init__(self, framing: Framing, config: GatewayConfig) -> None:
        self.joined = False
        self.ended: str | None = None
        self.lease = 0.0
        self._framing = framing
        self._tokens = config.tokens
        self._limit = config.max_message_bytes
        self._unsent = b""
        #: Bytes that came before hello.
        self._strange_bytes = 0
        #: Of the last hello; None: the broker has answered it.
        self._hello_id: int | None = None

    @property
    def client(self) -> str:
        """Whose token was shown; "": it has no name."""
        return self._framing.client

    def receive(self, data: bytes) -> list[list[memoryview]]:
        """Return the messages for the broker that `data` completes.

        What is wrong with them ends the session; messages before that are returned.
        """
        messages: list[list[memoryview]] = []
        if self.ended is not None:
            return messages
        try:
            for frames in self._framing.receive(data):
                if self.joined:
                    if _HELLO in bytes(frames[0]):
                        self._on_hello(frames)
                    messages.append(frames)
                elif self._let_in(frames):
                    messages.append(frames)
            if not self.joined:
                self._strange_bytes += len(data)
                if self._strange_bytes > STRANGERS_BYTES:
                    raise TurnedAwayError(f"{STRANGERS_BYTES} bytes came and no hello among them")
        except TurnedAwayError as error:
            self.end(error)
        except ProtocolError as error:
            self.end(TurnedAwayError(str(error)))
        self._unsent = self._framing.take_unsent() + self._unsent
        if self._framing.over and self.ended is None:
            self.ended = ""
        return messages

    def wrap(self, frames: Frames) -> bytes:
        """Return the bytes that carry a message of the broker's."""
        if self.ended is not None:
            return b""
        try:
            if self._hello_id is not None:
                frames = self._on_answer(frames)
            return self._framing.wrap(frames) if frames else b""
        except EncodeError as error:  # another peer's, which no framing takes
            self.end(TurnedAwayError(f"a message cannot be carried: {error}"))
            return b""

    def probe(self) -> bytes:
        """Return what makes a living client say something, or nothing if TCP does that."""
        return b"" if self.ended is not None else self._framing.probe()

    def end(self, reason: TurnedAwayError) -> None:
        """End the session; `take_unsent` then has the last words."""
        if self.ended is None:
            self.ended = str(reason)
            self._unsent += self._framing.farewell(reason)

    def take_unsent(self) -> bytes:
        """Return what is to be sent to the client besides messages of the broker's."""
        unsent, self._unsent = self._unsent, b""
        return unsent

    def goodbye(self) -> Frames | None:
        """Return what tells the broker that this peer is gone; None if it never knew it."""
        if not self.joined:
            return None
        return message(Kind.NOTICE, Goodbye(), incarnation=_NEWEST)

    def _let_in(self, frames: list[memoryview]) -> bool:
        """Take a first message; return whether it is the hello, for the broker."""
        try:
            header = decode_header(frames[0])
        except VersionMismatchError as error:
            raise TurnedAwayError(str(error), FailureCode.VERSION, error.request_id) from error
        request_id = header.request_id if header.kind is Kind.REQUEST else 0
        if header.payload_type == Token.__name__:
            shown = decode(Token, frames[1:])
            if self._tokens:
                self._framing.client = check_token(shown.token, self._tokens)
            self._framing.has_token = True
            return False
        if self._tokens and not self._framing.has_token:
            raise TurnedAwayError(
                "a token is wanted before anything else; this client showed none",
                request_id=request_id,
            )
        if not self._on_hello(frames):
            what = printable(header.payload_type[:40])
            reason = TurnedAwayError(
                f"say hello first: this was a {what}", FailureCode.NOT_JOINED, request_id
            )
            if not request_id:
                raise reason
            self._unsent += self._framing.wrap(failure_of(reason))  # and the connection stays
            return False
        self.joined = True
        self._framing.admit()
        return True

    def _on_hello(self, frames: list[memoryview]) -> bool:
        """Note a hello, whose answer is awaited; return whether it is one."""
        try:
            header = decode_header(frames[0])
        except ProtocolError:
            return False  # the broker will say so
        if header.payload_type != Hello.__name__ or header.kind is not Kind.REQUEST or header.to:
            return False
        self._hello_id = header.request_id
        return True

    def _on_answer(self, frames: Frames) -> Frames:
        """Look at what may be the answer to hello; return what the client gets, if it goes on."""
        try:
            header = decode_header(frames[0])
            if header.request_id != self._hello_id:
                return frames
            if header.kind is Kind.REPLY and header.payload_type == Welcome.__name__:
                welcome = decode(Welcome, frames[1:])
                self._hello_id, self.lease = None, welcome.lease
                limit = min(welcome.max_message_bytes, self._limit)
                told = msgspec.structs.replace(welcome, max_message_bytes=limit)
                return [encode_header(header), *encode(told)]
            if header.kind is Kind.FAILURE:
                failed = decode(Failed, frames[1:])
                self._hello_id = None
                self.end(TurnedAwayError(failed.message, failed.code, header.request_id))
                return []
        except ProtocolError:
            pass  # whatever it is, it is nothing of ours
        return frames


class Budget:
    """What one connection has passed on to the broker and that may not have taken yet, in bytes.

    A broker answers in the order in which it takes messages what it answers at once. So a *mark*, a
    request to nobody behind a client's messages, is answered when all of those were taken.

    Args:
        limit: Beyond it nothing more is to be passed on.
        first_id: Ids of marks count up from here. Nobody can guess it: a client could ask under
            the id of the next mark, before what that stands behind was taken.
    """

    def __init__(self, limit: int, first_id: int) -> None:
        self._limit = limit
        self._first_id = first_id
        self._bytes = 0
        #: Bytes before the newest mark that is not answered; 0: there is none.
        self._marked = 0
        self._marked_at = 0.0
        self._last_id = first_id
        #: Marks that are not answered, those that were given up included.
        self._out = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be passed on now."""
        return self._bytes >= self._limit

    @property
    def is_empty(self) -> bool:
        """Whether the broker has taken all that was passed on, as far as marks tell."""
        return not self._bytes

    def add(self, frames: Frames) -> None:
        """A message was passed on."""
        self._bytes += sum(lengths_of(frames)) + _FRAME_BYTES * len(frames)

    def wants_mark(self, now: float, *, is_last: bool = False) -> bool:
        """Whether a mark is to be passed on; the last one, behind which nothing comes, at once."""
        if is_last and self._bytes > self._marked:
            return True
        if self._marked:
            return now - self._marked_at > _PATIENCE * self._out
        return 2 * self._bytes >= self._limit

    def mark(self, now: float) -> Frames:
        """Return a mark that is passed on now."""
        self._marked, self._marked_at = self._bytes, now
        self._last_id += 1
        self._out += 1
        return message(
            Kind.REQUEST, Heartbeat(), self._last_id, ttl=60.0, incarnation=_NEWEST, to=NOBODY
        )

    def unmark(self) -> None:
        """The mark could not be passed on."""
        self._marked = 0
        self._out -= 1

    def takes(self, frames: Frames) -> bool:
        """Take what the broker sent if it answers a mark; return whether it does."""
        if not self._out:
            return False
        try:
            header = decode_header(frames[0])
        except ProtocolError:
            return False
        if (
            header.kind is not Kind.FAILURE
            or not self._first_id < header.request_id <= self._last_id
        ):
            return False
        self._out -= 1
        if header.request_id == self._last_id:
            self._bytes -= self._marked
            self._marked = self._out = 0  # those before it were answered before, or are lost
        return True
