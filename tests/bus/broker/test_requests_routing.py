from __future__ import annotations

from envbus.bus.broker.peers import Peer, PeerState
from envbus.bus.broker.requests import Router


def ready(name: str, *services: str, capacity: int = 1, in_flight: int = 0) -> Peer:
    return Peer(
        name.encode(),
        name,
        0,
        PeerState.READY,
        services=services or ("env",),
        capacity=capacity,
        in_flight=in_flight,
    )


def router_of(*peers: Peer, max_backlog: int = 2) -> Router:
    router = Router(max_backlog)
    for peer in peers:
        router.join(peer)
    return router


def test_the_least_loaded_ready_peer_is_picked_and_ties_go_by_name() -> None:
    a, b, c = (ready(name, capacity=3) for name in "abc")
    router = router_of(c, b, a)
    assert router.pick("env") is a
    a.in_flight = 1
    assert router.pick("env") is b
    b.add_overdue(7)  # it may still be working on that one
    assert router.pick("env") is c
    c.state = PeerState.SUSPECT
    assert router.pick("env") is a
    router.check_invariants()


def test_a_full_or_suspect_peer_gets_nothing() -> None:
    full, silent = ready("a", in_flight=1), ready("b")
    silent.state = PeerState.SUSPECT
    router = router_of(full, silent)
    assert router.pick("env") is None
    assert router.has_ready("env")
    full.state = PeerState.SUSPECT
    assert not router.has_ready("env")
    assert router.pick("nothing") is None
    assert not router.has_ready("nothing")


def test_the_backlog_is_bounded_and_first_come_first_served() -> None:
    peer = ready("a", in_flight=1)
    router = router_of(peer)
    assert [router.enqueue("env", wire_id) for wire_id in (1, 2, 3)] == [True, True, False]
    assert router.num_queued == 2
    assert [router.dequeue(peer) for _ in range(3)] == [1, 2, None]
    assert router.num_queued == 0


def test_the_oldest_request_over_all_services_of_a_peer_comes_first() -> None:
    peer = ready("a", "x", "y", in_flight=1)
    router = router_of(peer, max_backlog=9)
    for service, wire_id in (("y", 1), ("x", 2), ("y", 3)):
        router.enqueue(service, wire_id)
    assert [router.dequeue(peer) for _ in range(3)] == [1, 2, 3]


def test_a_withdrawn_request_is_not_sent() -> None:
    peer = ready("a", in_flight=1)
    router = router_of(peer)
    router.enqueue("env", 1)
    router.enqueue("env", 2)
    router.withdraw("env", 1)
    router.check_invariants()
    assert router.dequeue(peer) == 2


def test_the_last_peer_to_leave_orphans_the_backlog() -> None:
    a, b = ready("a", in_flight=1), ready("b", in_flight=1)
    router = router_of(a, b)
    router.enqueue("env", 1)
    assert router.leave(a) == []
    assert [peer.name for peer in router.members("env")] == ["b"]
    assert router.leave(b) == [1]
    assert "env" not in router
    assert router.num_queued == 0
    assert router.members("env") == []
    router.check_invariants()
