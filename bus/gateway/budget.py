"""How much of what a client sent the broker may not have taken yet. Pure.

A broker answers in the order in which it takes messages what it answers at once. So a request to
nobody, behind a client's messages, is answered when all of those were taken.
"""

from __future__ import annotations

from typing import Final

from envbus.bus.codec import encode
from envbus.bus.control import NOBODY
from envbus.bus.errors import ProtocolError
from envbus.bus.headers import decode_header, encode_header
from envbus.bus.messages import PROTOCOL_VERSION, Header, Heartbeat, Kind
from envbus.bus.packets import lengths_of
from envbus.bus.transport import Frames

__all__ = ["Budget"]

#: Seconds until a mark that has no answer is taken for lost, with a broker that was started again.
_PATIENCE: Final = 5.0


class Budget:
    """What one connection has passed on to the broker, in bytes.

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

    def add(self, frames: Frames) -> None:
        """A message was passed on."""
        self._bytes += sum(lengths_of(frames))

    def wants_mark(self, now: float) -> bool:
        """Whether a mark is to be passed on."""
        if self._marked:
            return now - self._marked_at > _PATIENCE
        return 2 * self._bytes >= self._limit

    def mark(self, now: float) -> Frames:
        """Return a mark that is passed on now."""
        self._marked, self._marked_at = self._bytes, now
        self._last_id += 1
        self._out += 1
        header = Header(
            PROTOCOL_VERSION, Kind.REQUEST, self._last_id, Heartbeat.__name__, 60.0, to=NOBODY
        )
        return [encode_header(header), *encode(Heartbeat())]

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
            self._marked = 0
        return True
