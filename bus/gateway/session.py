"""One connection from its first byte to its last: who it is, and what may pass. Pure."""

from __future__ import annotations

from envbus.bus.codec import decode, encode
from envbus.bus.errors import ProtocolError, VersionMismatchError
from envbus.bus.gateway.carriage import Carriage
from envbus.bus.gateway.door import TurnedAwayError, check_token
from envbus.bus.headers import decode_header, encode_header
from envbus.bus.messages import PROTOCOL_VERSION, FailureCode, Goodbye, Header, Kind, Token
from envbus.bus.transport import Frames

__all__ = ["Session"]


class Session:
    """Lets a client in, and its messages through untouched.

    Args:
        carriage: How messages are carried.
        token: What the client has to show; None: nothing.

    Attributes:
        joined: A message for the broker came.
        ended: Why the connection ends, once it is to end; "" if its client wants it.
    """

    def __init__(self, carriage: Carriage, token: str | None) -> None:
        self.joined = False
        self.ended: str | None = None
        self._carriage = carriage
        self._token = token
        self._unsent = b""
        self._incarnation = 0

    def receive(self, data: bytes) -> list[list[memoryview]]:
        """Return the messages for the broker that `data` completes.

        What is wrong with them ends the session; messages before that are returned.
        """
        messages: list[list[memoryview]] = []
        if self.ended is not None:
            return messages
        try:
            for frames in self._carriage.receive(data):
                if self.joined or self._let_in(frames):
                    messages.append(frames)
        except TurnedAwayError as error:
            self.end(error)
        except ProtocolError as error:
            self.end(TurnedAwayError(str(error)))
        self._unsent = self._carriage.take_unsent() + self._unsent
        if self._carriage.over and self.ended is None:
            self.ended = ""
        return messages

    def wrap(self, frames: Frames) -> bytes:
        """Return the bytes that carry a message of the broker's."""
        return b"" if self.ended is not None else self._carriage.wrap(frames)

    def probe(self) -> bytes:
        """Return what makes a living client say something, or nothing if TCP does that."""
        return b"" if self.ended is not None else self._carriage.probe()

    def end(self, reason: TurnedAwayError) -> None:
        """End the session; `take_unsent` then has the last words."""
        if self.ended is None:
            self.ended = str(reason)
            self._unsent += self._carriage.farewell(reason)

    def take_unsent(self) -> bytes:
        """Return what is to be sent to the client besides messages of the broker's."""
        unsent, self._unsent = self._unsent, b""
        return unsent

    def goodbye(self) -> Frames | None:
        """Return what tells the broker that this peer is gone; None if it never knew it."""
        if not self.joined:
            return None
        header = Header(
            PROTOCOL_VERSION, Kind.NOTICE, 0, Goodbye.__name__, incarnation=self._incarnation
        )
        return [encode_header(header), *encode(Goodbye())]

    def _let_in(self, frames: list[memoryview]) -> bool:
        """Take a first message; return whether it is for the broker."""
        try:
            header = decode_header(frames[0])
        except VersionMismatchError as error:
            raise TurnedAwayError(str(error), FailureCode.VERSION) from error
        if header.payload_type == Token.__name__:
            shown = decode(Token, frames[1:])
            if self._token is not None:
                check_token(shown.token, self._token)
            self._carriage.has_token = True
            return False
        if self._token is not None and not self._carriage.has_token:
            raise TurnedAwayError("a token is wanted before anything else; this client showed none")
        self.joined = True
        self._incarnation = header.incarnation
        return True
