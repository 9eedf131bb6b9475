from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.bus.broker.deadlines import LOCAL, Pending, PendingRequests


def pending(
    wire_id: int,
    *,
    origin: bytes = LOCAL,
    request_id: int = 0,
    holder: bytes = b"worker",
    deadline: float = 1.0,
) -> Pending:
    return Pending(origin, request_id, wire_id, holder, "", deadline, deadline, "Step")


def ids(requests: list[Pending]) -> list[int]:
    return [request.wire_id for request in requests]


def test_only_the_holder_may_settle() -> None:
    requests = PendingRequests()
    first = pending(1)
    requests.open(first)
    assert requests.settle(1, b"another") is None
    assert requests.settle(1, b"worker") is first
    assert requests.settle(1, b"worker") is None
    assert len(requests) == 0


def test_a_queued_request_is_settled_by_nobody() -> None:
    requests = PendingRequests()
    requests.open(pending(1, holder=b""))
    assert requests.settle(1, b"worker") is None


def test_requests_expire_at_their_deadline_in_order_of_it() -> None:
    requests = PendingRequests()
    for wire_id, deadline in ((1, 3.0), (2, 1.0), (3, 2.0)):
        requests.open(pending(wire_id, deadline=deadline))
    assert requests.next_deadline() == 1.0
    assert ids(requests.expire(0.999)) == []
    assert ids(requests.expire(2.0)) == [2, 3]
    assert requests.next_deadline() == 3.0


def test_a_settled_request_does_not_expire() -> None:
    requests = PendingRequests()
    requests.open(pending(1))
    requests.settle(1, b"worker")
    assert requests.expire(2.0) == []
    assert requests.next_deadline() is None


def test_a_lost_peer_drops_what_it_held_and_what_it_asked() -> None:
    requests = PendingRequests()
    requests.open(pending(3, holder=b"a"))
    requests.open(pending(1, holder=b"b"))
    requests.open(pending(2, holder=b"b", origin=b"a", request_id=7))
    assert ids(requests.drop_peer(b"a")) == [2, 3]
    assert not requests.has(b"a", 7)
    assert ids(requests.unsettled()) == [1]


def test_an_id_in_flight_is_not_opened_twice() -> None:
    requests = PendingRequests()
    requests.open(pending(1, origin=b"a", request_id=7))
    with pytest.raises(ValueError, match="request 1 is pending already"):
        requests.open(pending(1))
    with pytest.raises(ValueError, match="7"):
        requests.open(pending(2, origin=b"a", request_id=7))
    requests.open(pending(2, origin=b"b", request_id=7))
    assert len(requests) == 2


def test_dead_deadlines_do_not_pile_up() -> None:
    requests = PendingRequests()
    for wire_id in range(1, 20_001):
        requests.open(pending(wire_id, deadline=1e9 + wire_id))
        requests.settle(wire_id, b"worker")
    assert requests.num_deadlines < 300
    assert requests.next_deadline() is None
    assert requests.num_deadlines == 0


class PendingMachine(RuleBasedStateMachine):
    """Against a plain dict of what is unsettled."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = PendingRequests()
        self.model: dict[int, Pending] = {}
        self.next_id = 1
        self.now = 0.0

    peers = st.sampled_from([b"a", b"b", b"c"])

    @rule(
        origin=st.sampled_from([LOCAL, b"a", b"b"]),
        holder=st.sampled_from([b"", b"a", b"b", b"c"]),
        timeout=st.sampled_from([0.5, 1.0, 5.0]),
    )
    def open(self, origin: bytes, holder: bytes, timeout: float) -> None:
        request = pending(
            self.next_id,
            origin=origin,
            request_id=self.next_id * 10,
            holder=holder,
            deadline=self.now + timeout,
        )
        self.next_id += 1
        self.requests.open(request)
        self.model[request.wire_id] = request

    @precondition(lambda self: self.next_id > 1)
    @rule(data=st.data(), holder=peers)
    def settle(self, data: st.DataObject, holder: bytes) -> None:
        wire_id = data.draw(st.integers(1, self.next_id))
        expected = self.model.get(wire_id)
        if expected is not None and expected.holder == holder:
            del self.model[wire_id]
            assert self.requests.settle(wire_id, holder) is expected
        else:
            assert self.requests.settle(wire_id, holder) is None

    @rule(seconds=st.sampled_from([0.0, 0.25, 2.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        late = {number for number, entry in self.model.items() if entry.deadline <= self.now}
        assert set(ids(self.requests.expire(self.now))) == late
        for number in late:
            del self.model[number]

    @rule(peer=peers)
    def drop(self, peer: bytes) -> None:
        gone = [n for n, entry in self.model.items() if peer in (entry.holder, entry.origin)]
        assert ids(self.requests.drop_peer(peer)) == sorted(gone)
        for number in gone:
            del self.model[number]

    @invariant()
    def agrees(self) -> None:
        self.requests.check_invariants()
        assert {entry.wire_id for entry in self.requests.unsettled()} == self.model.keys()
        deadlines = [entry.deadline for entry in self.model.values()]
        assert self.requests.next_deadline() == min(deadlines, default=None)


TestPendingMachine = PendingMachine.TestCase
