from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from envbus.bus.broker.peers import Peer, Peers, PeerState


def joined(
    peers: Peers,
    name: str,
    *,
    lease: float = 4.0,
    now: float = 0.0,
    services: tuple[str, ...] = (),
) -> Peer:
    peer = Peer(name.encode(), name, 0, PeerState.JOINING)
    peers.add(peer)
    peers.on_hello(peer, services=services, capacity=1, lease=lease, now=now)
    return peer


def test_a_peer_is_found_by_identity_and_name_until_it_leaves() -> None:
    peers = Peers()
    peer = joined(peers, "a")
    assert peers.find(b"a") is peer
    assert peers.by_name("a") is peer
    peers.remove(peer)
    assert peers.find(b"a") is None
    assert peers.by_name("a") is None
    assert peer.state is PeerState.GONE
    assert peers.judge(100.0) == ([], [])


def test_half_a_lease_of_silence_makes_suspect_and_a_full_one_ends_it() -> None:
    peers = Peers()
    peer = joined(peers, "a", lease=4.0)
    assert peers.next_check() == 2.0
    assert peers.judge(1.9) == ([], [])
    assert peers.judge(2.0) == ([peer], [])
    assert peer.state is PeerState.SUSPECT
    assert peers.next_check() == 4.0
    assert peers.judge(3.9) == ([], [])
    assert peers.judge(4.0) == ([], [peer])


def test_a_sign_of_life_heals() -> None:
    peers = Peers()
    peer = joined(peers, "a", lease=4.0)
    peers.judge(2.0)
    assert peers.on_heard(peer, 3.0)
    assert peer.state is PeerState.READY
    assert not peers.on_heard(peer, 3.5)
    assert peers.judge(5.0) == ([], [])
    assert peers.next_check() == 5.5


def test_a_peer_without_lease_never_expires() -> None:
    peers = Peers()
    joined(peers, "a", lease=0.0)
    assert peers.next_check() is None
    assert peers.judge(1e12) == ([], [])


def test_a_joining_peer_has_no_lease_yet() -> None:
    peers = Peers()
    peers.add(Peer(b"a", "a", 0, PeerState.JOINING, lease=1.0))
    assert peers.judge(1e12) == ([], [])


def test_an_illegal_hello_changes_nothing() -> None:
    peers = Peers()
    peer = joined(peers, "a")
    with pytest.raises(AssertionError, match="ready"):
        peers.on_hello(peer, services=("env",), capacity=9, lease=1.0, now=0.0)
    assert (peer.services, peer.capacity) == ((), 1)


def test_overdue_requests_count_as_load_and_are_bounded() -> None:
    peer = Peer(b"a", "a", 0, PeerState.READY, in_flight=2)
    for wire_id in range(1000):
        peer.add_overdue(wire_id)
    assert len(peer.overdue) == 64
    assert 999 in peer.overdue
    assert peer.load == 66


class PeersMachine(RuleBasedStateMachine):
    """Leases under random silence."""

    def __init__(self) -> None:
        super().__init__()
        self.peers = Peers()
        self.now = 0.0

    names = st.sampled_from(["a", "b", "c"])

    @rule(name=names, lease=st.sampled_from([0.0, 1.0, 4.0]))
    def join(self, name: str, lease: float) -> None:
        if self.peers.by_name(name) is None:
            joined(self.peers, name, lease=lease, now=self.now)

    @rule(name=names)
    def expect(self, name: str) -> None:
        if self.peers.by_name(name) is None:
            self.peers.add(Peer(name.encode(), name, 0, PeerState.JOINING))

    @rule(name=names)
    def hear(self, name: str) -> None:
        peer = self.peers.by_name(name)
        if peer is not None and peer.state is not PeerState.JOINING:
            self.peers.on_heard(peer, self.now)
            assert peer.state is PeerState.READY

    @rule(name=names)
    def leave(self, name: str) -> None:
        peer = self.peers.by_name(name)
        if peer is not None:
            self.peers.remove(peer)

    @rule(seconds=st.sampled_from([0.0, 0.375, 0.5, 1.0, 3.0]))
    def judge(self, seconds: float) -> None:
        self.now += seconds
        _, expired = self.peers.judge(self.now)
        for peer in expired:
            self.peers.remove(peer)
        for peer in self.peers:
            if peer.lease and peer.state is not PeerState.JOINING:
                silence = self.now - peer.heard
                assert silence < peer.lease
                assert (peer.state is PeerState.SUSPECT) == (silence >= peer.lease / 2)
        check = self.peers.next_check()
        assert check is None or check > self.now

    @invariant()
    def agrees(self) -> None:
        self.peers.check_invariants()


TestPeersMachine = PeersMachine.TestCase
