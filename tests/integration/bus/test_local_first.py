"""Peers of one host that reach their broker without ZeroMQ, and those that have to do with it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbus.bus.errors import QueueFullError
from envbus.bus.transport import local_listener as local_listener
from envbus.bus.transport.interface import QUEUE_BYTES
from envbus.bus.transport.local_first import LocalFirstPeer
from envbus.bus.transport.local_listener import ADDRESSES_EXIST, INTRODUCTION, address_of
from envbus.bus.transport.local_router import LocalRouter, with_local_links
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.bus.wire.framing import pack_for_stream as pack
from tests.integration.bus.test_local_links import until_full
from tests.integration.bus_programs import kept_endpoint
from tests.integration.group_children import PATIENCE, wait_until
from tests.sources import ROOT

pytestmark = [
    pytest.mark.skipif(not ADDRESSES_EXIST, reason="no sockets without a file here"),
    pytest.mark.timeout(60),
]


@pytest.fixture
def router() -> Iterator[LocalRouter]:
    made = with_local_links(ZmqRouter(["tcp://127.0.0.1:*"]))
    assert isinstance(made, LocalRouter)
    yield made
    made.close()


@pytest.fixture
def peer(router: LocalRouter) -> Iterator[LocalFirstPeer]:
    made = LocalFirstPeer(router.endpoints[0], b"near")
    yield made
    made.close()


def heard(router: LocalRouter, timeout: float = 0.05) -> tuple[bytes, list[bytes]] | None:
    router.wait(timeout)
    message = router.receive()
    return None if message is None else (message[0], [bytes(frame) for frame in message[1]])


def hears(router: LocalRouter) -> tuple[bytes, list[bytes]]:
    """Return the router's next message."""
    found: list[tuple[bytes, list[bytes]]] = []

    def look() -> bool:
        message = heard(router)
        if message is not None:
            found.append(message)
        return bool(found)

    wait_until(look, "a message")
    return found[0]


def gets(peer: LocalFirstPeer) -> list[bytes]:
    """Return the peer's next message."""
    frames = peer.receive(PATIENCE)
    assert frames is not None
    return [bytes(frame) for frame in frames]


def stranger(router: LocalRouter) -> socket.socket:
    """Somebody at the door."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE)
    address = address_of(router.endpoints[0])
    assert address is not None
    sock.connect(address)
    return sock


def is_cut_off(sock: socket.socket, router: LocalRouter) -> bool:
    """Whether the router closes this connection."""

    def look() -> bool:
        heard(router, 0.01)
        return bool(select.select([sock], [], [], 0)[0])

    wait_until(look, "the end")
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_that_a_peer_does_not_read_are_bounded(router: LocalRouter) -> None:
    lazy, honest = stranger(router), LocalFirstPeer(router.endpoints[0], b"honest")
    with lazy:
        lazy.sendall(pack([INTRODUCTION, b"lazy"]) + pack([b"hello"]))
        assert hears(router) == (b"lazy", [b"hello"])
        model = bytes(8 * 2**20)
        sent, why = until_full(router, b"lazy", [model])
        assert "wait for this peer, which does not read" in why
        assert QUEUE_BYTES <= sent * len(model) <= QUEUE_BYTES + 3 * len(model)
        assert QUEUE_BYTES <= router.queued_bytes <= QUEUE_BYTES + len(model) + 100
        honest.send([b"still"])
        assert hears(router) == (b"honest", [b"still"])
        router.send(b"honest", [b"here"])
        assert gets(honest) == [b"here"]
    wait_until(lambda: heard(router) or router.queued_bytes == 0, "it is forgotten")
    honest.close()


def test_messages_go_both_ways_without_zmq(router: LocalRouter, peer: LocalFirstPeer) -> None:
    assert peer.is_local
    for number in range(3):
        peer.send([b"%d" % number, b"", memoryview(b"view")])
    for number in range(3):
        assert hears(router) == (b"near", [b"%d" % number, b"", b"view"])
    router.send(b"near", [b"a", b"b"])
    router.send(b"near", [b"c"])
    assert gets(peer) == [b"a", b"b"]
    assert peer.wait(0.0)
    assert gets(peer) == [b"c"]
    assert not peer.wait(0.01)
    assert peer.receive(0.0) is None
    assert peer.lost_for() == 0.0


def test_a_broker_at_a_file_has_a_local_link_too(tmp_path: Path) -> None:
    router = with_local_links(ZmqRouter([f"ipc://{tmp_path}/bus"]))
    assert isinstance(router, LocalRouter)
    peer = LocalFirstPeer(router.endpoints[0], b"near")
    assert peer.is_local
    peer.send([b"x"])
    assert hears(router) == (b"near", [b"x"])
    peer.close()
    router.close()


def test_large_messages_arrive_whole_in_pieces(router: LocalRouter, peer: LocalFirstPeer) -> None:
    large = bytes(3_000_000)
    peer.send([b"up", large])
    with pytest.raises(QueueFullError):
        peer.send([b"behind it"])
    came: list[tuple[bytes, list[bytes]]] = []

    def look() -> bool:
        peer.wait(0.0)  # sends on
        message = heard(router, 0.0)
        if message is not None:
            came.append(message)
        return bool(came)

    wait_until(look, "the message")
    assert came == [(b"near", [b"up", large])]
    for _ in range(3):
        router.send(b"near", [b"down", large])

    def look_down() -> bool:
        heard(router, 0.0)
        frames = peer.receive(0.0)
        if frames is not None:
            got.append([bytes(frame) for frame in frames])
        return len(got) == 3

    got: list[list[bytes]] = []
    wait_until(look_down, "three messages")
    assert got == [[b"down", large]] * 3


def test_both_kinds_of_peers_get_their_turn(router: LocalRouter, peer: LocalFirstPeer) -> None:
    far = ZmqPeer(router.endpoints[0], b"far")
    far.send([b"far"])
    wait_until(lambda: router._router is not None and router._router.wait(0.05), "the far one")
    for _ in range(100):
        peer.send([b"near"])
    came = [hears(router)[0] for _ in range(20)]
    assert {b"near", b"far"} == set(came), "neither kept the other waiting"
    router.send(b"far", [b"back"])
    assert far.receive(PATIENCE) is not None
    far.close()


def test_ten_thousand_messages_of_one_stream_do_not_keep_others_waiting(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    peer.send([b"h", b"hello"])
    assert hears(router) == (b"near", [b"h", b"hello"])
    with stranger(router) as flood:
        flood.sendall(pack([INTRODUCTION, b"flood"]) + pack([b"f"]) * 10_000)
        for _ in range(100):
            assert hears(router) == (b"flood", [b"f"])
        for _ in range(3):  # who came while the rest was in hand
            peer.send([b"h", b"now"])
            between = 0
            while hears(router)[0] == b"flood":
                between += 1
            assert between < 100
        for _ in range(100):  # and nothing of it is lost
            assert hears(router) == (b"flood", [b"f"])


def test_without_a_listener_it_is_zmq() -> None:
    router = LocalRouter(ZmqRouter(["tcp://127.0.0.1:*"]))
    peer = LocalFirstPeer(router.endpoints[0], b"p")
    assert not peer.is_local
    peer.send([b"x"])
    assert hears(router) == (b"p", [b"x"])
    router.send(b"p", [b"y"])
    assert gets(peer) == [b"y"]
    peer.close()
    router.close()


def test_it_may_be_switched_off(router: LocalRouter) -> None:
    peer = LocalFirstPeer(router.endpoints[0], b"p", local_links=False)
    assert not peer.is_local
    assert peer.lost_for() == 0.0
    assert not peer.is_local
    peer.close()


def test_a_router_that_goes_is_noticed_at_once_and_found_again() -> None:
    first = with_local_links(ZmqRouter([kept_endpoint()]))
    assert isinstance(first, LocalRouter)
    (endpoint,) = first.endpoints
    peer = LocalFirstPeer(endpoint, b"p")
    assert peer.is_local
    peer.send([b"x"])
    hears(first)
    first.send(b"p", [b"y"])
    gets(peer)
    first.close()
    assert not peer.wait(0.0) or peer.receive(0.0) is None
    assert not peer.wait(PATIENCE), "it does not wait for what cannot come"
    wait_until(lambda: peer.lost_for() > 0.1, "the loss")
    second = with_local_links(ZmqRouter([endpoint]))
    assert isinstance(second, LocalRouter)
    wait_until(lambda: peer.lost_for() == 0.0 and peer.is_local, "the next one")
    peer.send([b"again"])
    while hears(second) != (b"p", [b"again"]):
        pass
    peer.close()
    second.close()


def test_a_lost_local_link_is_told_once_and_the_router_forgets_it(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    peer.send([b"x"])
    hears(router)
    router.send(b"near", [b"y"])
    gets(peer)
    router.drop_local_link(b"near")
    assert not peer.wait(0.5) or peer.receive(0.0) is None
    assert peer.lost_for() > 0.0
    wait_until(lambda: peer.lost_for() == 0.0 and peer.is_local, "another local link")
    peer.send([b"z"])
    assert hears(router) == (b"near", [b"z"])
    assert router.hung_up() == []


def test_the_newest_connection_of_a_name_counts(router: LocalRouter, peer: LocalFirstPeer) -> None:
    peer.send([b"old"])
    hears(router)
    newer = LocalFirstPeer(router.endpoints[0], b"near")
    newer.send([b"new"])
    assert hears(router) == (b"near", [b"new"])
    router.send(b"near", [b"for the newer"])
    assert gets(newer) == [b"for the newer"]
    newer.close()


def test_the_name_of_a_child_is_not_to_be_had(router: LocalRouter) -> None:
    from envbus.bus.transport.local_link import LocalLinkEnd, LocalLinkPeer

    ours, theirs = LocalLinkEnd.pair()
    router.add_local_link(b"child", ours)
    child = LocalLinkPeer(theirs, b"child")
    with stranger(router) as sock:
        sock.sendall(pack([INTRODUCTION, b"child"]))
        assert is_cut_off(sock, router)
    child.send([b"x"])
    assert hears(router) == (b"child", [b"x"])
    child.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\0" * 64,
        pack([b"envbus link 0", b"p"]),
        pack([INTRODUCTION]),
        pack([INTRODUCTION, b""]),
        pack([INTRODUCTION, b"p" * 256]),
        pack([INTRODUCTION, b"\0p"]),
    ],
    ids=lambda nonsense: repr(nonsense[:24]),
)
def test_who_does_not_say_who_they_are_is_cut_off(router: LocalRouter, nonsense: bytes) -> None:
    with stranger(router) as sock:
        sock.sendall(nonsense)
        assert is_cut_off(sock, router)
    assert not router._links


def test_nonsense_behind_a_good_introduction_is_counted_and_cut_off(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    with stranger(router) as sock:
        sock.sendall(pack([INTRODUCTION, b"bad"]) + pack([b"good"]))
        assert hears(router) == (b"bad", [b"good"])
        sock.sendall(b"\xff" * 64)
        assert hears(router) == (b"bad", []), "malformed"
        assert is_cut_off(sock, router)
    peer.send([b"x"])
    assert hears(router) == (b"near", [b"x"])


def test_strangers_who_say_nothing_are_few(
    router: LocalRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener, "_MAX_STRANGERS", 2)
    socks = [stranger(router) for _ in range(4)]
    assert is_cut_off(socks[0], router)
    assert is_cut_off(socks[1], router)
    socks[3].sendall(pack([INTRODUCTION, b"p"])[:7])
    heard(router)
    socks[3].sendall(pack([INTRODUCTION, b"p"])[7:] + pack([b"x"]))
    assert hears(router) == (b"p", [b"x"])
    for sock in socks:
        sock.close()


def test_another_users_processes_are_kept_out_on_either_side(
    router: LocalRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener.StreamEnd, "is_of_this_user", lambda self: False)
    with stranger(router) as sock:
        assert is_cut_off(sock, router)
    peer = LocalFirstPeer(router.endpoints[0], b"p")
    assert not peer.is_local, "a broker of somebody else is none"
    peer.close()


def test_one_local_link_too_many_goes_by_zmq(
    router: LocalRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbus.bus.transport.local_router._MAX_LOCAL", 0)
    peer = LocalFirstPeer(router.endpoints[0], b"p")

    def cut_off() -> bool:
        heard(router, 0.01)
        return peer.receive(0.01) is None and peer.lost_for() > 0.0

    wait_until(cut_off, "the end")
    assert not peer.is_local, "nor does it come again at once"
    peer.send([b"x"])
    assert hears(router) == (b"p", [b"x"])
    peer.close()


def test_what_is_held_goes_at_once(router: LocalRouter, peer: LocalFirstPeer) -> None:
    other = LocalFirstPeer(router.endpoints[0], b"other")
    for each in (peer, other):
        each.send([b"x"])
        hears(router)
    router.hold()
    for number in range(3):
        router.send(b"near", [b"%d" % number])
    router.hold()  # again: nothing is lost by it
    router.send(b"other", [b"to nobody"])
    assert peer.receive(0.01) is None
    router.drop_local_link(b"other")
    router.release()
    assert [gets(peer) for _ in range(3)] == [[b"0"], [b"1"], [b"2"]]
    other.close()


def test_what_is_held_stays_behind_what_waits_for_room(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    peer.send([b"x"])
    hears(router)
    frame = bytes(10_000)
    for number in range(100):
        router.hold()
        for place in range(2):
            router.send(b"near", [b"%d" % (2 * number + place), frame])
        router.release()
    came: list[bytes] = []
    while len(came) < 200:
        heard(router, 0.0)
        frames = peer.receive(0.01)
        came += [] if frames is None else [bytes(frames[0])]
    assert came == [b"%d" % number for number in range(200)]


def test_a_slow_reader_does_not_hold_the_broker_up(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    peer.send([b"x"])
    hears(router)
    frame = bytes(10_000)
    assert any(is_full(router, frame) for _ in range(2000))
    count = 0
    while count < 1000:
        heard(router, 0.0)
        count += peer.receive(0.01) is not None


def test_room_for_whole_messages_wakes_the_peer_up(
    router: LocalRouter, peer: LocalFirstPeer
) -> None:
    def fill() -> int:
        """Small ones, so that none is cut: the stream is full between two of them."""
        for count in range(100_000):
            try:
                peer.send([b"x"])
            except QueueFullError:
                return count
        raise AssertionError("it never became full")

    def read(count: int) -> None:
        for _ in range(count):
            assert hears(router) == (b"near", [b"x"])

    read(fill())
    assert peer.wait(PATIENCE)
    count = fill()
    assert peer.receive(0.0) is None  # as an event loop looks, which waits for the descriptor
    assert not select.select([peer.fileno()], [], [], 0)[0]
    read(count)
    assert select.select([peer.fileno()], [], [], PATIENCE)[0]
    assert peer.receive(0.0) is None
    assert not select.select([peer.fileno()], [], [], 0)[0]


def is_full(router: LocalRouter, frame: bytes) -> bool:
    try:
        router.send(b"near", [frame])
    except QueueFullError as exc:
        return "does not read" in str(exc)
    return False


CHILD = """
import sys, time
from envbus.bus.transport.local_first import LocalFirstPeer
peer = LocalFirstPeer(sys.argv[1], b"child")
for number in range(10**9):
    peer.send([b"%d" % number])
    assert peer.receive(30.0) is not None
"""


def test_a_peer_that_is_killed_is_forgotten(router: LocalRouter) -> None:
    command = [sys.executable, "-c", CHILD, router.endpoints[0]]
    with subprocess.Popen(command, cwd=ROOT) as process:
        for number in range(50):
            assert hears(router) == (b"child", [b"%d" % number])
            router.send(b"child", [b"go on"])
        os.kill(process.pid, signal.SIGKILL)

    def gone() -> bool:
        heard(router, 0.01)
        return b"child" not in router._links

    wait_until(gone, "the end")
    assert router.hung_up() == []


def test_a_forked_copy_leaves_local_links_alone(router: LocalRouter, peer: LocalFirstPeer) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    peer.send([b"x"])
    assert hears(router) == (b"near", [b"x"])
