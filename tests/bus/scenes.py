"""Short ways to set up a broker core and to look at its effects, for the tests of the core."""

from __future__ import annotations

from typing import TypeVar

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Ask,
    BrokerConfig,
    Effect,
    FailLocal,
    Send,
)
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Kind,
)
from tests.bus.testing import (
    drive,
    hello_from,
    payload_of,
)

FRAMES = (b"payload", b"buffer")
E = TypeVar("E")


def core_with(
    *peers: str, config: BrokerConfig | None = None, heartbeat: float = 0.0, capacity: int = 1
) -> BrokerCore:
    """A core with ready peers that offer `env`; without `config` they may ask each other."""
    core = BrokerCore(config or BrokerConfig(embedded=False))
    drive(
        core,
        [
            hello_from(name.encode(), services=["env"], heartbeat=heartbeat, capacity=capacity)
            for name in peers
        ],
    )
    return core


def ask(to: bytes | str = b"a", timeout: float = 1.0) -> Ask:
    return Ask(to, "Step", timeout, FRAMES)


def sent(peer: bytes, wire_id: int, ttl: float = 1.0, payload_type: str = "Step") -> Send:
    """What carries request `wire_id` to `peer`."""
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, wire_id, payload_type, ttl)
    return Send(peer, header, FRAMES, wire_id)


def only(effects: list[Effect], kind: type[E]) -> E:
    """The one effect of that class."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def failures(effects: list[Effect]) -> dict[int, FailureCode]:
    """Local failures by wire id."""
    return {
        effect.wire_id: effect.failed.code for effect in effects if isinstance(effect, FailLocal)
    }


def sends(effects: list[Effect]) -> list[tuple[bytes, int]]:
    """Requests sent: to whom, and which."""
    return [
        (effect.peer, effect.wire_id)
        for effect in effects
        if isinstance(effect, Send) and effect.wire_id
    ]


def failure_in(send: Send) -> Failed:
    """What a peer is told in a FAILURE."""
    assert send.header.kind is Kind.FAILURE
    assert send.header.payload_type == "Failed"
    failed = payload_of(send.frames, Failed)
    assert isinstance(failed, Failed)
    return failed
