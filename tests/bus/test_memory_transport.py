from __future__ import annotations

import pytest

from envbus.bus.errors import ClosedError, QueueFullError, TransportError, UnknownPeerError
from envbus.bus.transport import PeerTransport, RouterTransport
from tests.bus.memory_transport import MemoryNetwork
from tests.bus.testing import FakeClock


def test_frames_go_both_ways_in_order() -> None:
    network = MemoryNetwork()
    router: RouterTransport = network.router()
    a: PeerTransport = network.peer(b"a")
    b = network.peer(b"b")
    a.send([b"1"])
    b.send([b"2", b""])
    assert router.wait(0.0)
    assert router.receive() == (b"a", [b"1"])
    assert router.receive() == (b"b", [b"2", b""])
    assert router.receive() is None
    router.send(b"a", [b"3"])
    router.send(b"a", [b"4"])
    assert [a.receive(0.0), a.receive(0.0), a.receive(0.0)] == [[b"3"], [b"4"], None]


def test_a_frame_is_not_changed_by_writing_to_its_buffer_afterwards() -> None:
    network = MemoryNetwork()
    buffer = bytearray(b"before")
    network.peer(b"a").send([memoryview(buffer)])
    buffer[:] = b"behind"
    assert network.router().receive() == (b"a", [b"before"])


def test_an_unknown_or_closed_peer_is_an_error_to_the_sender() -> None:
    network = MemoryNetwork()
    router = network.router()
    with pytest.raises(UnknownPeerError):
        router.send(b"a", [b"x"])
    peer = network.peer(b"a")
    peer.send([b"last words"])
    peer.close()
    peer.close()
    with pytest.raises(UnknownPeerError):
        router.send(b"a", [b"x"])
    with pytest.raises(ClosedError):
        peer.send([b"x"])
    assert router.receive() == (b"a", [b"last words"])


def test_queues_are_bounded_per_peer() -> None:
    network = MemoryNetwork(queue_size=2)
    router = network.router()
    a, b = network.peer(b"a"), network.peer(b"b")
    for _ in range(2):
        a.send([b"x"])
        router.send(b"a", [b"x"])
    with pytest.raises(QueueFullError):
        a.send([b"x"])
    with pytest.raises(QueueFullError):
        router.send(b"a", [b"x"])
    b.send([b"x"])
    router.send(b"b", [b"x"])
    router.receive()
    a.send([b"x"])


def test_waiting_for_nothing_lets_the_clock_run() -> None:
    clock = FakeClock()
    network = MemoryNetwork(idle=clock.advance)
    assert not network.router().wait(2.0)
    assert network.peer(b"a").receive(1.5) is None
    assert clock() == 3.5


def test_what_runs_meanwhile_can_end_the_wait() -> None:
    network = MemoryNetwork(idle=lambda _timeout: network.router().put(b"a", [b"x"]))
    assert network.router().wait(2.0)


@pytest.mark.parametrize("identity", [b"", b"\0a", b"a" * 256])
def test_identities_that_zeromq_would_not_take_are_refused(identity: bytes) -> None:
    with pytest.raises(TransportError):
        MemoryNetwork().peer(identity)


def test_an_identity_is_used_once() -> None:
    network = MemoryNetwork()
    network.peer(b"a").close()
    network.peer(b"a")
    with pytest.raises(TransportError, match="in use"):
        network.peer(b"a")


def test_a_closed_router_refuses_all() -> None:
    router = MemoryNetwork().router()
    router.close()
    router.close()
    with pytest.raises(ClosedError):
        router.receive()
    with pytest.raises(ClosedError):
        router.send(b"a", [b"x"])


def test_a_message_without_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="frame"):
        MemoryNetwork().peer(b"a").send([])


def test_watched_descriptors_are_kept() -> None:
    router = MemoryNetwork().router()
    router.watch(5)
    router.watch(6)
    router.unwatch(5)
    router.unwatch(7)
    assert router.watched == {6}


def test_a_network_has_one_router_with_room_in_its_queues() -> None:
    network = MemoryNetwork()
    assert network.router() is network.router()
    assert network.router().endpoints == ("inproc://memory",)
    network.peer(b"a").send([b"x"])
    assert repr(network.router()) == "<MemoryRouter peers=1 inbox=1>"
    assert repr(network.peers[b"a"]) == "<MemoryPeer b'a' inbox=0>"
    with pytest.raises(ValueError, match="queue_size"):
        MemoryNetwork(queue_size=0)
