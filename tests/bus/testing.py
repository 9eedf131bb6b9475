"""For tests of the bus and of what is built on it: a clock to set, short ways to make events.

Imports no socket and no clock: a test with these runs in microseconds and cannot hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Effect,
    Event,
    Received,
)
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
)

__all__ = [
    "FakeClock",
    "drive",
    "failed_by",
    "frames_of",
    "goodbye_from",
    "heartbeat_of",
    "hello_from",
    "notice_from",
    "payload_of",
    "reply_from",
    "request_from",
]

#: Stands for a payload whose content does not matter.
_OPAQUE: Frames = (b"opaque",)


class FakeClock:
    """A clock that stands still until it is told to move. Calling it gives the time.

    Args:
        start: Seconds it shows first.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __repr__(self) -> str:
        return f"FakeClock({self._now})"

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on; raises ValueError for going back, as no monotonic clock does."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now += seconds


def drive(
    core: BrokerCore, events: Iterable[Event], *, now: float = 0.0, check: bool = True
) -> list[Effect]:
    """Hand `events` to `core` at time `now` and return all effects, in order.

    Args:
        core: What decides.
        events: What happens.
        now: Seconds.
        check: Whether `core.check_invariants()` is called after each event.
    """
    effects: list[Effect] = []
    for event in events:
        effects += core.handle(event, now)
        if check:
            core.check_invariants()
    return effects


def frames_of(payload: Payload) -> list[bytes]:
    """Return the frames of a payload without arrays, such as the control messages."""
    return [msgspec.msgpack.encode(payload)]


def payload_of(frames: Frames, payload_type: type[Payload]) -> Payload:
    """Return the payload without arrays that `frames` hold."""
    return msgspec.msgpack.decode(frames[0], type=payload_type)


def hello_from(
    peer: bytes,
    *,
    name: str | None = None,
    services: Sequence[str] = (),
    capacity: int = 1,
    heartbeat: float = 0.0,
    incarnation: int = 0,
    request_id: int = 1,
    version: int = PROTOCOL_VERSION,
    user: str = "",
) -> Received:
    """Return the event of a peer's hello; its name is its identity unless given."""
    hello = Hello(
        name=peer.decode() if name is None else name,
        services=list(services),
        capacity=capacity,
        heartbeat=heartbeat,
    )
    header = Header(version, Kind.REQUEST, request_id, "Hello", 5.0, incarnation)
    return Received(peer, header, frames_of(hello), user)


def goodbye_from(peer: bytes, *, incarnation: int = 0) -> Received:
    """Return the event of a peer's goodbye."""
    return notice_from(peer, "Goodbye", frames=frames_of(Goodbye()), incarnation=incarnation)


def heartbeat_of(peer: bytes, *, sender: bytes | None = None) -> Received:
    """Return the event of a heartbeat of `peer`, sent over the socket `sender`."""
    sender = peer + b".heartbeat" if sender is None else sender
    return notice_from(sender, "Heartbeat", frames=frames_of(Heartbeat(identity=peer)))


def request_from(
    peer: bytes,
    request_id: int,
    *,
    to: str = "",
    payload_type: str = "Act",
    ttl: float = 1.0,
    incarnation: int = 0,
    frames: Frames = _OPAQUE,
) -> Received:
    """Return the event of a peer's request."""
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, request_id, payload_type, ttl, incarnation, to)
    return Received(peer, header, frames)


def reply_from(
    peer: bytes,
    request_id: int,
    *,
    payload_type: str = "StepResult",
    incarnation: int = 0,
    frames: Frames = _OPAQUE,
) -> Received:
    """Return the event of a peer's reply; `request_id` is that of the `Send`'s header."""
    header = Header(PROTOCOL_VERSION, Kind.REPLY, request_id, payload_type, 0.0, incarnation)
    return Received(peer, header, frames)


def failed_by(
    peer: bytes,
    request_id: int,
    *,
    code: FailureCode = FailureCode.REMOTE,
    message: str = "boom",
    incarnation: int = 0,
) -> Received:
    """Return the event of a peer's failure."""
    header = Header(PROTOCOL_VERSION, Kind.FAILURE, request_id, "Failed", 0.0, incarnation)
    return Received(peer, header, frames_of(Failed(code=code, message=message)))


def notice_from(
    peer: bytes,
    payload_type: str,
    *,
    to: str = "",
    incarnation: int = 0,
    frames: Frames = _OPAQUE,
) -> Received:
    """Return the event of a peer's notice."""
    header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, payload_type, 0.0, incarnation, to)
    return Received(peer, header, frames)
