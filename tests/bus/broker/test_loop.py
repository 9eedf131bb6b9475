from __future__ import annotations

import itertools
from typing import Any

import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, FailLocal
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import TransportError
from envbus.bus.wire.codec import encode, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Failed, FailureCode, Header, Hello, Kind
from tests.bus.memory_transport import MemoryNetwork


class Flood:
    """A transport by which nonsense comes without end; each look at its clock takes a while."""

    def __init__(self) -> None:
        self.taken = 0
        self._ticks = itertools.count()

    def clock(self) -> float:
        return next(self._ticks) * 1e-4

    def receive(self) -> tuple[bytes, list[bytes]]:
        self.taken += 1
        return b"peer", [b"nonsense"]

    def send(self, peer: bytes, frames: Any) -> None:
        assert peer == b"peer"
        assert frames

    def wait(self, timeout: float) -> bool:
        assert timeout >= 0
        return True


def test_a_flood_does_not_keep_the_owner_from_its_turn() -> None:
    flood: Any = Flood()
    broker = Broker(flood, BrokerCore(BrokerConfig()), flood.clock)
    begun = flood.clock()
    assert broker.poll(0.0) == []
    assert flood.clock() - begun < 1.0
    assert 1000 <= flood.taken < 5000


class Silence:
    """A transport by which one peer says hello, and nothing else comes however long one waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hides_messages = False
        self._hello = [
            encode_header(Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "Hello")),
            *encode(Hello(name="peer", services=["env"], capacity=1, pid=1)),
        ]

    def receive(self) -> tuple[bytes, list[Any]] | None:
        hello, self._hello = self._hello, []
        return (b"peer", hello) if hello else None

    def send(self, peer: bytes, frames: Any) -> None:
        assert (peer, bool(frames)) == (b"peer", True)

    def user_of(self, frames: Any) -> str:
        assert frames
        return ""

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return False


def test_who_has_answered_looks_again_where_the_descriptor_has_not_told_of_all() -> None:
    """Who looked again behind each answer would wait for what comes of it, and answer that."""
    silence: Any = Silence()
    broker = Broker(silence, BrokerCore(BrokerConfig()), lambda: silence.now)
    broker.poll(0.0)
    assert broker.answer(b"peer", 2, Failed(code=FailureCode.NO_PEER, message="nobody"))
    assert not broker.has_more
    silence.hides_messages = True
    assert broker.has_more


class BrokenOff(Silence):
    """Somebody's handler of a signal raises while there is nothing to do but wait."""

    def wait(self, timeout: float) -> bool:
        raise InterruptedError


def test_a_wait_that_is_broken_off_may_have_used_up_what_the_descriptor_tells() -> None:
    transport: Any = BrokenOff()
    broker = Broker(transport, BrokerCore(BrokerConfig()), lambda: transport.now)
    broker.poll(0.0)
    assert not broker.has_more
    with pytest.raises(InterruptedError):
        broker.poll(1.0)
    assert broker.has_more
    broker.poll(0.0)
    assert not broker.has_more


def test_an_owner_that_was_away_while_nothing_was_asked_judges_in_time() -> None:
    silence: Any = Silence()
    broker = Broker(silence, BrokerCore(BrokerConfig()), lambda: silence.now)
    broker.expect(b"peer", "peer", 0)
    broker.poll(0.0)
    silence.now += 60.0
    request_id = broker.ask(b"peer", "Step", [b""], timeout=1.0)
    asked_at = silence.now
    outcomes: list[Any] = []
    while not outcomes:
        outcomes = broker.poll(10.0)
    assert [(end.wire_id, end.failed.code) for end in outcomes] == [
        (request_id, FailureCode.TIMEOUT)
    ]
    assert silence.now - asked_at < 1.1


class Narrow:
    """A transport by which peers say hello, and some messages cannot be sent."""

    def __init__(self) -> None:
        self.failures = 0
        self.sent: list[bytes] = []
        self.hellos: list[bytes] = []

    def receive(self) -> tuple[bytes, list[Any]] | None:
        if not self.hellos:
            return None
        peer = self.hellos.pop()
        hello = Hello(name=peer.decode(), services=["env"], pid=1)
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "Hello")
        return peer, [encode_header(header), *encode(hello)]

    def send(self, peer: bytes, frames: Any) -> None:
        assert frames
        if self.failures:
            self.failures -= 1
            raise TransportError("no descriptor")
        self.sent.append(peer)

    def user_of(self, frames: Any) -> str:
        assert frames
        return ""


def test_a_request_that_cannot_be_sent_after_its_wait_fails_and_takes_no_other_along() -> None:
    narrow: Any = Narrow()
    broker = Broker(narrow, BrokerCore(BrokerConfig()), lambda: 0.0)
    broker.expect(b"peer", "peer", 0)
    narrow.hellos = [b"peer"]
    broker.poll(0.0)
    asked = [broker.ask("env", "Choose", [b""], timeout=1.0) for _ in range(3)]
    narrow.sent, narrow.failures = [], 1
    broker.cancel(asked[0])
    ends = [end for end in broker.poll(0.0) if isinstance(end, FailLocal)]
    assert [(end.wire_id, end.failed.code) for end in ends] == [(asked[1], FailureCode.OVERLOADED)]
    assert [broker.is_pending(number) for number in asked] == [False, False, True]
    assert narrow.sent == [b"peer"]
    narrow.failures = 1
    broker.cancel(asked[2])
    with pytest.raises(TransportError, match="no descriptor"):
        broker.ask("env", "Choose", [b""], timeout=1.0)
    assert not broker.is_pending(asked[-1] + 1)


def test_with_closes_a_broker() -> None:
    network = MemoryNetwork()
    with Broker(network.router(), BrokerCore(BrokerConfig())) as broker:
        assert broker.poll(0.0) == []
    assert network.router().closed
