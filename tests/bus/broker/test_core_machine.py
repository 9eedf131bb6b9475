"""Random events against what a broker promises to those who ask."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Accepted,
    Ask,
    BrokerConfig,
    Cancel,
    Complete,
    Event,
    Expect,
    FailLocal,
    Malformed,
    PeerGone,
    PeerLeft,
    PeerReady,
    Received,
    Send,
    Tick,
    Unsendable,
)
from envbus.bus.broker.peers import PeerState
from envbus.bus.wire.messages import FailureCode, Header, Kind
from tests.bus.testing import (
    failed_by,
    goodbye_from,
    heartbeat_of,
    hello_from,
    notice_from,
    reply_from,
    request_from,
)

IDENTITIES = [b"a", b"b", b"c", b"d"]
NAMES = ["n1", "n2", "n3"]
SERVICES = ["env", "policy"]
TARGETS = st.sampled_from([*IDENTITIES, *NAMES, *SERVICES, "nobody"])


LIMITS = BrokerConfig(
    max_in_flight_per_peer=3,
    max_backlog=2,
    max_peers=3,
    blocked=frozenset({"Blocked"}),
    embedded=False,
)


class BrokerCoreMachine(RuleBasedStateMachine):
    """Keeps what the owner and each peer have been promised, and what peers were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.core = BrokerCore(LIMITS)
        self.now = 0.0
        self.next_id = 1
        self.local: set[int] = set()
        self.remote: set[tuple[bytes, int]] = set()
        #: What each peer was sent and did not answer: (peer, wire id).
        self.held: list[tuple[bytes, int]] = []
        self.sent: set[int] = set()

    identities = st.sampled_from(IDENTITIES)

    def happen(self, event: Event) -> None:
        joined = {peer for peer in IDENTITIES if self.core.peer_state(peer) is not PeerState.GONE}
        for effect in self.core.handle(event, self.now):
            match effect:
                case Accepted(wire_id):
                    assert isinstance(event, Ask)
                    self.local.add(wire_id)
                case Complete(wire_id, _, _):
                    assert isinstance(event, Received)
                    assert (event.peer, wire_id) in self.held, "answered by who did not hold it"
                    self.local.remove(wire_id)
                case FailLocal(wire_id, _):
                    self.local.remove(wire_id)
                case PeerReady(peer, _, _):
                    joined.add(peer)
                case PeerLeft(peer, _, _):
                    joined.discard(peer)
                    self.held = [entry for entry in self.held if entry[0] != peer]
                    self.remote = {entry for entry in self.remote if entry[0] != peer}
                case Send(peer, header, _, 0):
                    if header.kind in (Kind.REPLY, Kind.FAILURE) and header.payload_type not in (
                        "Welcome",
                    ):
                        self.remote.discard((peer, header.request_id))
                case Send(peer, header, _, wire_id):
                    assert peer in joined, "sent to somebody who is not there"
                    assert header.kind is Kind.REQUEST
                    assert header.request_id == wire_id
                    assert header.to == ""
                    assert 0.0 < header.ttl <= 5.0
                    self.held.append((peer, wire_id))
                    assert wire_id not in self.sent, "sent again"
                    self.sent.add(wire_id)
        self.core.check_invariants()

    # --- peers ---

    @rule(
        peer=identities,
        name=st.sampled_from(NAMES),
        services=st.lists(st.sampled_from(SERVICES), max_size=2),
        capacity=st.integers(0, 4),
        heartbeat=st.sampled_from([0.0, 0.5]),
        incarnation=st.integers(0, 2),
        user=st.sampled_from(["", "key"]),
    )
    def hello(
        self,
        peer: bytes,
        name: str,
        services: list[str],
        capacity: int,
        heartbeat: float,
        incarnation: int,
        user: str,
    ) -> None:
        self.happen(
            hello_from(
                peer,
                name=name,
                services=services,
                capacity=capacity,
                heartbeat=heartbeat,
                incarnation=incarnation,
                request_id=1_000_000,
                user=user,
            )
        )

    @rule(peer=identities, name=st.sampled_from(NAMES), incarnation=st.integers(0, 2))
    def expect(self, peer: bytes, name: str, incarnation: int) -> None:
        if self.core.peer_state(peer) is PeerState.GONE:
            self.happen(Expect(peer, name, incarnation))

    @rule(peer=identities)
    def die(self, peer: bytes) -> None:
        self.happen(PeerGone(peer, "exit code 9"))

    @rule(peer=identities)
    def goodbye(self, peer: bytes) -> None:
        self.happen(goodbye_from(peer, incarnation=9))

    @rule(peer=identities)
    def heartbeat(self, peer: bytes) -> None:
        self.happen(heartbeat_of(peer))

    @rule(peer=identities, frames=st.lists(st.binary(max_size=8), max_size=2))
    def nonsense(self, peer: bytes, frames: list[bytes]) -> None:
        self.happen(Malformed(peer, "junk"))
        for payload_type in ("Hello", "Heartbeat", "Failed", "Goodbye"):
            for kind in (Kind.REQUEST, Kind.NOTICE):
                if (kind, payload_type) != (Kind.NOTICE, "Goodbye"):
                    header = Header(1, kind, 1_000_000, payload_type, 1.0, 9)
                    self.happen(Received(peer, header, frames))

    @rule(peer=identities, to=st.sampled_from(["", *NAMES, *SERVICES]))
    def notice(self, peer: bytes, to: str) -> None:
        self.happen(notice_from(peer, "Progress", to=to, incarnation=9))

    # --- requests ---

    @rule(to=TARGETS, timeout=st.sampled_from([0.5, 5.0]))
    def ask(self, to: bytes | str, timeout: float) -> None:
        before = len(self.local)
        event = Ask(to, "Step", timeout, [b"x"])
        accepted = self.core.statistics().accepted
        self.happen(event)
        if self.core.statistics().accepted == accepted:
            assert len(self.local) == before

    @rule(peer=identities, to=st.sampled_from([*NAMES, *SERVICES, "nobody"]), again=st.booleans())
    def forward(self, peer: bytes, to: str, again: bool) -> None:
        if self.core.peer_state(peer) not in (PeerState.READY, PeerState.SUSPECT):
            return
        if not again:
            self.next_id += 1
        event = request_from(peer, self.next_id, to=to, ttl=2.0, incarnation=9)
        # Promised before: the broker may refuse at once, which ends it.
        if (peer, self.next_id) not in self.remote:
            self.remote.add((peer, self.next_id))
        self.happen(event)

    @rule(peer=identities, to=st.sampled_from([*NAMES, *SERVICES]))
    def blocked(self, peer: bytes, to: str) -> None:
        header = Header(1, Kind.REQUEST, 2_000_000, "Blocked", 2.0, 9, to)
        self.happen(Received(peer, header, [b""]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans(), twice=st.booleans())
    def answer(self, data: st.DataObject, fails: bool, twice: bool) -> None:
        entry = data.draw(st.sampled_from(self.held))
        make = failed_by if fails else reply_from
        for _ in range(1 + twice):
            self.happen(make(*entry, incarnation=9))
            if entry in self.held:
                self.held.remove(entry)

    @rule(peer=identities, wire_id=st.integers(-1, 12))
    def stray(self, peer: bytes, wire_id: int) -> None:
        if (peer, wire_id) not in self.held:
            before = self.core.statistics()
            self.happen(reply_from(peer, wire_id, incarnation=9))
            assert self.core.statistics().replies == before.replies

    @precondition(lambda self: self.held)
    @rule(data=st.data(), code=st.sampled_from([FailureCode.PEER_LOST, FailureCode.OVERLOADED]))
    def unsendable(self, data: st.DataObject, code: FailureCode) -> None:
        entry = data.draw(st.sampled_from(self.held))
        self.held.remove(entry)
        self.happen(Unsendable(*entry, code, "cannot"))

    @precondition(lambda self: self.local)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        wire_id = data.draw(st.sampled_from(sorted(self.local)))
        self.local.remove(wire_id)
        self.happen(Cancel(wire_id))

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.happen(Tick())
        wake_at = self.core.wake_at()
        assert wake_at is None or wake_at > self.now
        if seconds == 6.0:
            assert not self.local, "a request outlived its deadline"
            assert not self.remote, "a peer was never told"

    @invariant()
    def what_is_promised_is_pending(self) -> None:
        statistics = self.core.statistics()
        assert statistics.in_flight_now + statistics.backlog_now == len(self.local) + len(
            self.remote
        )


BrokerCoreMachine.TestCase.settings = settings(stateful_step_count=60)
TestBrokerCoreMachine = BrokerCoreMachine.TestCase
