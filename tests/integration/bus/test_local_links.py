from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    QueueFullError,
    UnknownPeerError,
)
from envbus.bus.transport.interface import QUEUE_BYTES, RouterTransport
from envbus.bus.transport.local_link import (
    FILE_FOLLOWS,
    INLINE_BYTES,
    LOCAL_LINKS_EXIST,
    LocalLinkEnd,
    LocalLinkPeer,
)
from envbus.bus.transport.local_router import QUEUE_LIMIT, LocalRouter
from envbus.bus.transport.unix_sockets import rights
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.bus.wire.frames import Buffer
from envbus.bus.wire.framing import pack
from tests.descriptors import CrowdedSocket, open_descriptors
from tests.integration.group_children import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")


@pytest.fixture
def router() -> Iterator[LocalRouter]:
    made = LocalRouter()
    yield made
    made.close()


@pytest.fixture
def peer(router: LocalRouter) -> Iterator[LocalLinkPeer]:
    made = join(router, b"p")
    yield made
    made.close()


def join(router: LocalRouter, identity: bytes, *, spin: bool = False) -> LocalLinkPeer:
    ours, theirs = LocalLinkEnd.pair()
    router.add_local_link(identity, ours)
    return LocalLinkPeer(theirs, identity, spin=spin)


def plain(frames: list[object] | None) -> list[bytes] | None:
    return None if frames is None else [bytes(memoryview(frame)) for frame in frames]  # type: ignore[arg-type]


def router_is_full(router: LocalRouter, frame: bytes) -> bool:
    try:
        router.send(b"p", [frame])
    except QueueFullError as exc:
        return str(QUEUE_LIMIT) in str(exc)
    return False


def until_full(router: RouterTransport, peer: bytes, frames: list[bytes]) -> tuple[int, str]:
    """Send the same until it is refused; return how often it was taken, and why no more."""
    for sent in range(10_000):
        try:
            router.send(peer, frames)
        except QueueFullError as error:
            return sent, str(error)
    raise AssertionError("it is never full")


def receive(router: LocalRouter) -> tuple[bytes, list[bytes] | None]:
    """Return the router's next message; a wait may end without one."""
    found: list[tuple[bytes, list[bytes] | None]] = []

    def look() -> bool:
        router.wait(0.05)
        message = router.receive()
        if message is not None:
            found.append((message[0], plain(message[1])))
        return bool(found)

    wait_until(look, "a message")
    return found[0]


def received(receive: Callable[[], list[Buffer] | None]) -> list[bytes]:
    """Return the next message; a look may end without one."""
    while (frames := receive()) is None:
        pass
    return [bytes(frame) for frame in frames]


def test_frames_arrive_whole_and_in_order_both_ways(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    for number in range(20):
        peer.send([b"%d" % number, b"", memoryview(b"view"), bytearray(b"array")])
        router.send(b"p", [b"%d" % number, b"back"])
    for number in range(20):
        assert receive(router) == (b"p", [b"%d" % number, b"", b"view", b"array"])
        assert plain(peer.receive(PATIENCE)) == [b"%d" % number, b"back"]


def test_a_message_of_any_size_passes_without_the_other_side_reading(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    large = os.urandom(8 * 1024 * 1024)
    for _ in range(3):
        peer.send([b"header", large])
        router.send(b"p", [large, b"x" * (INLINE_BYTES + 1)])
    for _ in range(3):
        assert receive(router) == (b"p", [b"header", large])
        assert plain(peer.receive(PATIENCE)) == [large, b"x" * (INLINE_BYTES + 1)]


def test_a_message_of_many_frames_keeps_them_apart(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    frames = [b"%d" % number for number in range(500)]
    peer.send(frames)
    assert receive(router) == (b"p", frames)


def test_the_router_never_blocks_and_refuses_when_its_queue_is_full(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    sent = 0
    while not router_is_full(router, b"%d" % sent):
        sent += 1
    assert QUEUE_LIMIT < sent < 100 * QUEUE_LIMIT
    for number in range(sent):  # nothing of what was taken is lost, nor out of order
        router.wait(0.0)
        assert plain(peer.receive(PATIENCE)) == [b"%d" % number]


def test_large_messages_that_are_not_read_wait_like_small_ones_until_the_queue_is_full(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    large = [bytes([number]) * INLINE_BYTES for number in range(251)]
    sent = 0
    while not router_is_full(router, large[sent % 251]):
        sent += 1
    assert QUEUE_LIMIT < sent < 2 * QUEUE_LIMIT
    for number in range(sent):  # nothing of what was taken is lost, nor out of order
        router.wait(0.0)
        assert plain(peer.receive(PATIENCE)) == [large[number % 251]]
    router.send(b"p", [b"small"])
    assert plain(peer.receive(PATIENCE)) == [b"small"]


@pytest.mark.slow
def test_large_messages_queue_by_their_bytes(router: LocalRouter, peer: LocalLinkPeer) -> None:
    sent, why = until_full(router, b"p", [bytes(QUEUE_BYTES // 8)])
    assert sent < QUEUE_LIMIT
    assert "which does not read" in why


def test_a_child_that_sends_large_messages_waits_while_nobody_reads(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    large = [bytes([number]) * INLINE_BYTES for number in range(251)]

    def send() -> None:
        for number in range(1000):
            peer.send([large[number % 251]])

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(1000):
        assert receive(router) == (b"p", [large[number % 251]])
    thread.join()


def test_a_child_waits_while_too_many_large_messages_are_under_way(router: LocalRouter) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    router.add_local_link(b"p", LocalLinkEnd(ours))
    crowded = LocalLinkPeer(LocalLinkEnd(CrowdedSocket(fileno=theirs.detach())), b"p")
    large = bytes(INLINE_BYTES + 1)
    crowded.send([large])
    assert receive(router) == (b"p", [large])
    crowded.close()


def test_rings_and_messages_of_all_sizes_pass_each_other(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    sizes = [1, INLINE_BYTES + 1, 1, 2, 3 * INLINE_BYTES, INLINE_BYTES + 1, 1]
    for size in sizes:
        peer.send([bytes(size)])
        peer.ring()
        router.send(b"p", [bytes(size)])
        router.ring(b"p")
    for size in sizes:
        assert receive(router) == (b"p", [bytes(size)])
        assert received(lambda: peer.receive(PATIENCE)) == [bytes(size)]


def test_a_file_that_was_announced_and_found_no_room_comes_later(router: LocalRouter) -> None:
    ours, theirs = LocalLinkEnd.pair()
    theirs.set_timeout(None)
    ours.write(FILE_FOLLOWS)
    assert theirs.receive() is None
    assert not theirs.take_ring()
    ours.ring()
    assert theirs.receive() is None
    for frames in ([bytes(2 * INLINE_BYTES)], [b"small"]):
        ours.write(FILE_FOLLOWS)
        ours.write(FILE_FOLLOWS)
        ours.write(ours.pack(frames))
        assert received(theirs.receive) == frames
    ours.close()
    theirs.close()


def test_what_comes_with_a_packet_and_is_no_file_of_ours_is_let_go_of(
    router: LocalRouter, tmp_path: Path
) -> None:
    before = open_descriptors()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = LocalLinkEnd(other)
    with (tmp_path / "f").open("wb") as file:
        for data in (b"x", FILE_FOLLOWS):
            one.send(FILE_FOLLOWS)
            one.sendmsg([data], rights([file.fileno(), file.fileno()]))
            with pytest.raises(DecodeError):
                end.receive()
    one.close()
    with pytest.raises(ClosedError):
        end.receive()
    end.close()
    assert open_descriptors() <= before


def test_looking_does_not_wait_and_waiting_ends(router: LocalRouter, peer: LocalLinkPeer) -> None:
    assert router.receive() is None
    assert router.wait(0.01) is False
    assert peer.receive(0.01) is None


def test_all_that_came_before_the_wait_is_received_after_it(router: LocalRouter) -> None:
    peers = [join(router, name) for name in (b"a", b"b", b"c")]
    for one in peers:
        one.send([b"hello"])
    assert router.wait(PATIENCE)
    senders = set()
    while (message := router.receive()) is not None:
        senders.add(message[0])
    assert senders == {b"a", b"b", b"c"}
    for one in peers:
        one.close()


def test_a_child_notices_at_once_that_its_broker_is_gone(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    router.drop_local_link(b"p")
    with pytest.raises(ClosedError, match="gone"):
        peer.receive(PATIENCE)
    with pytest.raises(ClosedError, match="gone"):
        peer.send([b"to nobody"])


def test_what_a_child_sent_before_it_ended_is_received(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    peer.send([b"last words"])
    peer.close()
    assert receive(router) == (b"p", [b"last words"])
    wait_until(lambda: router.wait(0.0) is False or router.receive() is None, "the end")
    router.send(b"p", [b"lost: that it ended, and how, is told by who watches over it"])
    router.drop_local_link(b"p")
    with pytest.raises(UnknownPeerError):
        router.send(b"p", [b"too late"])


def test_an_unknown_peer_is_refused(router: LocalRouter) -> None:
    with pytest.raises(UnknownPeerError, match="not connected"):
        router.send(b"nobody", [b"x"])


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x01",
        struct.pack("<I", 0),
        struct.pack("<I", 2**32 - 1),
        pack([b"short"])[:-1],
        pack([b"too long"]) + b"x",
    ],
)
def test_a_packet_that_is_none_of_ours_is_a_decode_error(packet: bytes) -> None:
    ours, theirs = LocalLinkEnd.pair()
    try:
        with pytest.raises(DecodeError, match="message"):
            ours.unpack(packet)
    finally:
        ours.close()
        theirs.close()


def test_junk_is_logged_within_a_rate(
    router: LocalRouter, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = LocalLinkEnd.pair()
    router.add_local_link(b"p", ours)
    theirs.set_timeout(1.0)
    for _ in range(50):
        theirs.write(b"\xff" * 40)
        assert receive(router) == (b"p", [])
    theirs.close()
    name = "envbus.bus.transport.local_router"
    assert len([record for record in caplog.records if record.name == name]) == 1


def test_a_junk_packet_is_counted_and_the_broker_lives(router: LocalRouter) -> None:
    broker = Broker(router, BrokerCore(BrokerConfig()))
    ours, theirs = LocalLinkEnd.pair()
    router.add_local_link(b"p", ours)
    theirs.set_timeout(1.0)
    theirs.write(b"\xff" * 40)
    wait_until(lambda: bool(broker.poll(0.05)) or broker.statistics().malformed > 0, "the count")
    theirs.close()


def test_a_watched_descriptor_ends_the_wait(router: LocalRouter) -> None:
    reader, writer = os.pipe()
    router.watch(reader)
    assert router.wait(0.01) is False
    os.write(writer, b"x")
    assert router.wait(PATIENCE) is True
    assert router.receive() is None
    router.unwatch(reader)
    router.unwatch(reader)
    assert router.wait(0.01) is False
    os.close(reader)
    os.close(writer)


def test_peers_with_and_without_a_local_link_meet_at_one_router(tmp_path: Path) -> None:
    router = LocalRouter(ZmqRouter([f"ipc://{tmp_path}/bus"]))
    local, other = join(router, b"local"), ZmqPeer(router.endpoints[0], b"other")
    for number in range(50):
        local.send([b"l%d" % number])
        other.send([b"o%d" % number])
        found = dict(receive(router) for _ in range(2))
        assert found == {b"local": [b"l%d" % number], b"other": [b"o%d" % number]}
        router.send(b"local", [b"to local"])
        router.send(b"other", [b"to other"])
        assert plain(local.receive(PATIENCE)) == [b"to local"]
        assert plain(other.receive(PATIENCE)) == [b"to other"]
    local.close()
    other.close()
    router.close()


class BrokenOff(ZmqRouter):
    """Somebody's handler of a signal raises where it has looked for a message."""

    breaks = False

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        if self.breaks:
            assert self.hides_messages
            self.breaks = False
            raise InterruptedError
        return super().receive()


def test_what_came_by_zeromq_before_taking_it_was_broken_off_is_not_slept_over() -> None:
    far = BrokenOff(["tcp://127.0.0.1:*"])
    with (
        closing(LocalRouter(far)) as router,
        closing(ZmqPeer(router.endpoints[0], b"peer")) as peer,
    ):
        peer.send([b"first"])
        receive(router)
        assert router.receive() is None
        peer.send([b"second"])
        wait_until(lambda: far.hides_messages, "the second one is there")
        far.breaks = True
        with pytest.raises(InterruptedError):
            router.receive()
        assert router.wait(PATIENCE)
        assert receive(router) == (b"peer", [b"second"])


def test_a_flood_over_zeromq_does_not_keep_local_links_waiting(tmp_path: Path) -> None:
    router = LocalRouter(ZmqRouter([f"ipc://{tmp_path}/bus"]))
    local, other = join(router, b"local"), ZmqPeer(router.endpoints[0], b"other")
    for _ in range(500):
        other.send([b"flood"])
    assert receive(router)[0] == b"other"
    local.send([b"here"])
    senders: list[bytes] = []
    while b"local" not in senders:  # without a wait, which would look at the local links
        message = router.receive()
        if message is not None:
            senders.append(message[0])
    assert len(senders) < 100
    local.close()
    other.close()
    router.close()


def test_both_ends_may_spin_and_still_sleep(router: LocalRouter) -> None:
    peer = join(router, b"spinner", spin=True)
    for number in range(200):
        router.send(b"spinner", [b"%d" % number])
        assert plain(peer.receive(PATIENCE)) == [b"%d" % number]
    assert peer.receive(0.01) is None
    peer.close()


def test_one_that_cannot_be_watched_takes_nothing_from_the_next(router: LocalRouter) -> None:
    ours, theirs = LocalLinkEnd.pair()
    number = ours.fileno()
    router.watch(number)  # twice is refused, as one that there is no room for
    with pytest.raises(FileExistsError):
        router.add_local_link(b"p", ours)
    router.unwatch(number)
    ours.close()
    theirs.close()
    next_one = join(router, b"q")
    router.drop_local_link(b"p")
    next_one.send([b"heard"])
    assert receive(router) == (b"q", [b"heard"])
    next_one.close()


def test_a_new_life_gets_a_local_link_of_its_own(router: LocalRouter, peer: LocalLinkPeer) -> None:
    router.drop_local_link(b"p")
    again = join(router, b"p2")
    again.send([b"hello"])
    assert receive(router) == (b"p2", [b"hello"])
    again.close()


def test_closing_twice_is_fine() -> None:
    router = LocalRouter()
    peer = join(router, b"p")
    for _ in range(2):
        router.close()
        peer.close()
    with pytest.raises(ClosedError):
        router.wait(0.1)


def test_who_has_hung_up_is_told_once_all_that_it_sent_was_received(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    peer.send([b"last words"])
    peer.close()
    assert router.hung_up() == []
    assert receive(router) == (b"p", [b"last words"])
    wait_until(lambda: router.wait(0.05) and router.receive() is None, "the hang-up")
    assert router.hung_up() == [b"p"]
    router.drop_local_link(b"p")
    assert router.hung_up() == []


def test_a_watched_file_is_told_apart_from_messages(
    router: LocalRouter, peer: LocalLinkPeer
) -> None:
    readable, writable = os.pipe()
    router.watch(readable)
    peer.send([b"message"])
    assert receive(router) == (b"p", [b"message"])
    assert not router.take_beside()
    os.write(writable, b".")
    assert router.wait(1.0)
    assert router.take_beside()
    assert not router.take_beside()
    router.unwatch(readable)
    os.close(readable)
    os.close(writable)
