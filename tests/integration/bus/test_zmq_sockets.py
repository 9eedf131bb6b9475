from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.transport import zmq_sockets
from envbus.bus.transport.interface import (
    A_MOMENT,
    QUEUE_BYTES,
    PeerTransport,
    RouterTransport,
)
from envbus.bus.transport.zmq_sockets import HIGH_WATER_MARK, ZmqPeer, ZmqRouter
from tests.bus.memory_transport import MemoryNetwork
from tests.descriptors import open_descriptors
from tests.integration.bus.test_local_links import until_full
from tests.integration.group_children import PATIENCE, Driver, wait_until
from tests.integration.relay import Relay


class Network:
    """One router and its peers, over sockets or in memory; all is closed at the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._memory = MemoryNetwork() if kind == "memory" else None
        self.opened: list[RouterTransport | PeerTransport] = []
        if self._memory is not None:
            self.router: RouterTransport = self._memory.router()
        else:
            endpoint = f"ipc://{folder}/bus" if kind == "ipc" else "tcp://127.0.0.1:*"
            self.router = ZmqRouter([endpoint])
        self.opened.append(self.router)

    def peer(self, identity: bytes) -> PeerTransport:
        made: PeerTransport
        if self._memory is not None:
            made = self._memory.peer(identity)
        else:
            made = ZmqPeer(self.router.endpoints[0], identity)
        self.opened.append(made)
        return made

    def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the router's next message."""
        found: list[tuple[bytes, list[bytes]]] = []

        def look() -> bool:
            self.router.wait(0.05)
            message = self.router.receive()
            if message is not None:
                found.append((bytes(message[0]), [bytes(frame) for frame in message[1]]))
            return bool(found)

        wait_until(look, "a message")
        return found[0]


@pytest.fixture(params=["memory", "ipc", "tcp"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    made = Network(request.param, tmp_path)
    yield made
    for transport in reversed(made.opened):
        transport.close()


def test_bytes_that_a_peer_does_not_read_are_bounded(tmp_path: Path) -> None:
    router = ZmqRouter([f"ipc://{tmp_path}/bus"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lazy = context.socket(zmq.DEALER)
    try:
        lazy.setsockopt(zmq.IDENTITY, b"lazy")
        lazy.setsockopt(zmq.RCVHWM, 1)  # it is not its memory that is tested
        lazy.connect(router.endpoints[0])
        lazy.send(b"hello")
        wait_until(lambda: router.wait(0.05) and router.receive(), "it is there")
        model = bytes(8 * 2**20)
        sent, why = until_full(router, b"lazy", [b"header", model])
        assert "bytes wait for this peer, which does not read" in why
        assert sent * len(model) < 4 * QUEUE_BYTES
        assert router.queued_bytes >= QUEUE_BYTES // 2  # it may have taken some meanwhile
        router.send(b"lazy", [b"small"])  # what is small is counted by libzmq
    finally:
        context.destroy(linger=0)
        # What is there is taken first; then the router learns of the end.
        wait_until(lambda: router.receive() or router.queued_bytes == 0, "it is let go of")
        router.close()


def test_nothing_is_kept_of_peers_that_were_sent_large_messages_and_have_left(
    tmp_path: Path,
) -> None:
    router, model = ZmqRouter([f"ipc://{tmp_path}/bus"]), bytes(2**17)
    try:
        for number in range(60):
            peer = ZmqPeer(router.endpoints[0], b"%d" % number)
            try:
                peer.send([b"hello"])
                wait_until(lambda: router.wait(0.05) and router.receive(), "it is there")
                router.send(b"%d" % number, [model])
                assert peer.receive(PATIENCE) is not None
            finally:
                peer.close()
        assert len(router._large) < 40
    finally:
        router.close()


# --- what all transports have in common -----------------------------------------------------


def test_frames_arrive_whole_and_in_order(network: Network) -> None:
    peer = network.peer(b"p")
    for number in range(100):
        peer.send([b"%d" % number, b"", memoryview(bytes(range(256)) * 40), bytearray(b"x")])
    for number in range(100):
        sender, frames = network.receive()
        assert sender == b"p"
        assert frames == [b"%d" % number, b"", bytes(range(256)) * 40, b"x"]
        network.router.send(sender, [b"%d" % number, b"back"])
    for number in range(100):
        answer = peer.receive(PATIENCE)
        assert answer is not None
        assert [bytes(frame) for frame in answer] == [b"%d" % number, b"back"]


def test_peers_are_told_apart(network: Network) -> None:
    peers = {identity: network.peer(identity) for identity in (b"a", b"b", b"c")}
    for identity, peer in peers.items():
        peer.send([identity])
    for _ in peers:
        sender, frames = network.receive()
        assert frames == [sender]
        network.router.send(sender, [b"to", sender])
    for identity, peer in peers.items():
        answer = peer.receive(PATIENCE)
        assert answer is not None
        assert bytes(answer[1]) == identity
        assert peer.identity == identity


def test_what_was_held_arrives_in_order_after_the_release(network: Network) -> None:
    peers = {identity: network.peer(identity) for identity in (b"a", b"b")}
    for peer in peers.values():
        peer.send([b"hello"])
    for _ in peers:
        network.receive()
    network.router.send(b"a", [b"0"])
    network.router.hold()
    for number in (1, 2):
        for identity in peers:
            network.router.send(identity, [b"%d" % number])
    network.router.release()
    network.router.send(b"b", [b"3"])
    came = {
        identity: [bytes((peer.receive(PATIENCE) or [b""])[0]) for _ in range(3)]
        for identity, peer in peers.items()
    }
    assert came == {b"a": [b"0", b"1", b"2"], b"b": [b"1", b"2", b"3"]}


def test_nothing_is_none(network: Network) -> None:
    assert network.router.receive() is None
    assert network.router.wait(0.0) is False
    assert network.peer(b"p").receive(0.0) is None


def test_an_unknown_peer_is_an_error_to_the_sender(network: Network) -> None:
    with pytest.raises(UnknownPeerError, match="not connected"):
        network.router.send(b"nobody", [b"x"])
    peer = network.peer(b"p")
    peer.send([b"x"])
    network.receive()
    network.router.send(b"p", [b"x"])
    peer.close()

    def is_unknown() -> bool:
        try:
            network.router.send(b"p", [b"x"])
        except UnknownPeerError:
            return True
        return False

    wait_until(is_unknown, "the peer's leave")


def test_a_full_queue_is_an_error_to_the_sender(network: Network) -> None:
    peer = network.peer(b"p")
    peer.send([b"x"])
    network.receive()

    def fill_router() -> None:
        for _ in range(100 * HIGH_WATER_MARK):
            network.router.send(b"p", [bytes(1000)])

    with pytest.raises(QueueFullError):
        fill_router()

    def fill_peer() -> None:
        for _ in range(100 * HIGH_WATER_MARK):
            peer.send([bytes(1000)])

    with pytest.raises(QueueFullError):
        fill_peer()
    assert network.receive()[1] == [bytes(1000)]


def test_what_a_peer_has_queued_stays_what_it_was(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/slow"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as slow:
        slow.setsockopt(zmq.RCVHWM, 1)  # and the rest waits at the other side
        slow.bind(endpoint)
        peer = ZmqPeer(endpoint, b"p")
        with contextlib.closing(peer):
            buffer = bytearray(1_000_000)
            for _ in range(30):
                peer.send([b"header", buffer])
            buffer[:] = bytes([1]) * len(buffer)  # by who was told that the time is over
            received = []
            while len(received) < 30 and slow.poll(PATIENCE * 1000):
                received.append(max(slow.recv_multipart()[2]))
    assert received == 30 * [0]


def test_a_closed_transport_says_so(network: Network) -> None:
    peer = network.peer(b"p")
    for closed in (peer, network.router):
        closed.close()
        closed.close()
    with pytest.raises(ClosedError):
        peer.send([b"x"])
    with pytest.raises(ClosedError):
        peer.receive(0.0)
    with pytest.raises(ClosedError):
        network.router.send(b"p", [b"x"])
    with pytest.raises(ClosedError):
        network.router.receive()


# --- sockets --------------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[ZmqRouter]:
    made = ZmqRouter(["tcp://127.0.0.1:*"])
    yield made
    made.close()


def test_one_router_is_bound_to_several_endpoints(tmp_path: Path) -> None:
    router = ZmqRouter([f"ipc://{tmp_path}/bus", "tcp://127.0.0.1:*"])
    peers = [ZmqPeer(endpoint, b"p%d" % i) for i, endpoint in enumerate(router.endpoints)]
    for peer in peers:
        peer.send([b"x"])
    senders = set()
    for _ in peers:
        assert router.wait(PATIENCE)
        message = router.receive()
        assert message is not None
        senders.add(bytes(message[0]))
    assert senders == {b"p0", b"p1"}
    for peer in peers:
        peer.close()
    router.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:*",
        "tcp://*:5555",
        "tcp://192.0.2.1:5555",
        "tcp://example.org:1",
        "tcp://[::]:1",
    ],
)
def test_only_this_host_may_connect_unless_it_is_asked_for(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="insecure=True"):
        ZmqRouter([endpoint])


@pytest.mark.parametrize(
    ("bind", "host"),
    [
        (["tcp://127.0.0.1:*"], "127.0.0.1"),
        (["ipc://{}/bus", "tcp://127.0.0.1:*"], "127.0.0.1"),
        (["tcp://0.0.0.0:*"], "127.0.0.1"),
        (["tcp://0.0.0.0:*", "tcp://127.0.0.2:*"], "127.0.0.2"),
    ],
)
def test_the_owners_own_processes_come_in_by_tcp_where_it_is_bound(
    bind: list[str], host: str, tmp_path: Path
) -> None:
    endpoints = [endpoint.format(tmp_path) for endpoint in bind]
    with contextlib.closing(ZmqRouter(endpoints, insecure=True)) as router:
        own = router.own_tcp
        assert own is not None
        assert own.keys is None
        assert own.endpoint.startswith(f"tcp://{host}:")
        with contextlib.closing(ZmqPeer(own.endpoint, b"own")) as peer:
            peer.send([b"x"])
            assert router.wait(PATIENCE)
    with contextlib.closing(ZmqRouter([f"ipc://{tmp_path}/bus"])) as router:
        assert router.own_tcp is None


def test_nobody_who_reaches_tcp_ends_who_has_no_descriptor_left(tmp_path: Path) -> None:
    program = """
    import json, os, resource, signal
    from envbus.bus.transport.zmq_sockets import ZmqRouter

    router = ZmqRouter(["tcp://127.0.0.1:*"])
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, allowed[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print(json.dumps(router.own_tcp.endpoint), flush=True)
    signal.sigwait([signal.SIGUSR1])
    assert router.receive() is None
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert router.wait(60.0)
    print(json.dumps(router.receive()[0].decode()), flush=True)
    """
    with Driver(textwrap.dedent(program), tmp_path) as driver:
        endpoint = driver.read()
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with contextlib.closing(ZmqPeer(endpoint, b"own")) as peer:
            peer.send([b"x"])
            with socket.create_connection((host, int(port)), PATIENCE) as stranger:
                stranger.settimeout(0.3)
                with pytest.raises(TimeoutError):  # libzmq greets whom it accepts
                    stranger.recv(1)
            driver.process.send_signal(signal.SIGUSR1)
            assert driver.read() == "own"


@pytest.mark.parametrize("wide", ["tcp://0.0.0.0:*", "tcp://*:5555"])
def test_ipc_beside_what_others_can_reach_is_refused(wide: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be bound together.*tcp://127\.0\.0\.1"):
        ZmqRouter([f"ipc://{tmp_path}/bus", wide], insecure=True)
    assert os.listdir(tmp_path) == []


def test_ipc_that_is_bound_later_beside_what_others_can_reach_is_refused(tmp_path: Path) -> None:
    with (
        contextlib.closing(ZmqRouter(["tcp://0.0.0.0:*"], insecure=True)) as router,
        pytest.raises(ConfigError, match="cannot be bound together"),
    ):
        router.bind_private(f"ipc://{tmp_path}/bus")
    assert os.listdir(tmp_path) == []


def test_a_wide_bind_that_is_asked_for_is_made() -> None:
    router = ZmqRouter(["tcp://0.0.0.0:*"], insecure=True)
    assert router.endpoints[0].startswith("tcp://0.0.0.0:")
    router.close()


@pytest.mark.parametrize("endpoint", ["", "bus", "udp://127.0.0.1:1", "tcp://127.0.0.1", "ipc://"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        ZmqRouter([endpoint])


def test_no_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="no endpoint"):
        ZmqRouter([])


def test_a_path_that_is_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/{'x' * 108}"
    for make in (lambda: ZmqRouter([endpoint]), lambda: ZmqPeer(endpoint, b"p")):
        with pytest.raises(ConfigError, match="107 bytes"):
            make()


def test_a_path_in_use_is_not_taken_away_and_one_left_behind_is(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    router = ZmqRouter([endpoint])
    with pytest.raises(TransportError, match="somebody listens"):
        ZmqRouter([endpoint])
    router.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(f"{tmp_path}/bus")
    with contextlib.closing(ZmqRouter([endpoint])):
        assert os.listdir(tmp_path) == ["bus"]
    assert os.listdir(tmp_path) == []


def test_an_endpoint_in_use_is_named(router: ZmqRouter) -> None:
    with pytest.raises(TransportError, match=f"cannot bind {router.endpoints[0]}"):
        ZmqRouter(router.endpoints)


@pytest.mark.parametrize("identity", [b"", b"x" * 256])
def test_an_identity_that_zeromq_does_not_take_is_refused(
    router: ZmqRouter, identity: bytes
) -> None:
    with pytest.raises(TransportError, match="identity"):
        ZmqPeer(router.endpoints[0], identity)


def test_a_watched_descriptor_ends_the_wait(router: ZmqRouter) -> None:
    ear, mouth = socket.socketpair()
    with ear, mouth:
        router.watch(ear.fileno())
        router.watch(ear.fileno())
        assert router.wait(0.0) is False
        mouth.send(b".")
        assert router.wait(PATIENCE) is True
        assert router.receive() is None
        router.unwatch(ear.fileno())
        router.unwatch(ear.fileno())
        assert router.wait(0.0) is False
        router.watch(ear.fileno())
    router.unwatch(ear.fileno())


def test_a_peer_waits_for_a_message_or_a_watched_descriptor(router: ZmqRouter) -> None:
    ear, mouth = socket.socketpair()
    peer = ZmqPeer(router.endpoints[0], b"p")
    with ear, mouth, contextlib.closing(peer):
        peer.watch(ear.fileno())
        assert peer.wait(0.0) is False
        mouth.send(b".")
        assert peer.wait(PATIENCE) is True
        assert peer.receive(0.0) is None


def test_a_hang_up_of_a_watched_descriptor_ends_the_wait(router: ZmqRouter) -> None:
    ear, mouth = socket.socketpair()
    with ear:
        router.watch(ear.fileno())
        mouth.close()
        assert router.wait(PATIENCE) is True


def test_closing_with_unsent_messages_is_bounded() -> None:
    peer = ZmqPeer("tcp://127.0.0.1:9", b"p")  # nobody is there
    for _ in range(100):
        peer.send([b"x" * 1000])
    closer = threading.Thread(target=peer.close)
    closer.start()
    closer.join(PATIENCE)
    assert not closer.is_alive()


def test_a_peer_knows_whether_its_broker_is_in_reach(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    router = ZmqRouter([endpoint])
    with contextlib.closing(ZmqPeer(endpoint, b"p")) as peer:
        peer.send([b"x"])
        assert router.wait(PATIENCE)
        assert peer.lost_for() == 0.0
        router.close()
        wait_until(lambda: peer.lost_for() > 0.0, "the loss")
        router = ZmqRouter([endpoint])
        wait_until(lambda: peer.lost_for() == 0.0, "the return")
        router.close()


def test_a_loss_that_is_made_good_before_anybody_looks_is_told_once(router: ZmqRouter) -> None:
    with (
        Relay(router.endpoints[0]) as relay,
        contextlib.closing(ZmqPeer(relay.endpoint, b"p")) as peer,
    ):

        def sends(word: bytes) -> bool:
            """Earlier words may still be under way: they tell nothing of the next connection."""
            peer.send([word])
            while router.wait(0.05) and (message := router.receive()) is not None:
                if bytes(message[1][0]) == word:
                    return True
            return False

        wait_until(lambda: sends(b"first"), "the first message")
        assert peer.lost_for() == 0.0
        relay.cut()
        wait_until(lambda: sends(b"second"), "a message over the next connection")
        assert relay.accepted > 1
        assert [peer.lost_for(), peer.lost_for()] == [A_MOMENT, 0.0]


def test_a_large_message_arrives_over_a_slow_line(
    router: ZmqRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life wait behind it for far longer than there may be none otherwise."""
    monkeypatch.setattr(zmq_sockets, "KEEPALIVE_MS", 900)
    large = bytes(24 << 20)
    with (
        Relay(router.endpoints[0], pause=0.0075) as relay,
        contextlib.closing(ZmqPeer(relay.endpoint, b"p")) as peer,
    ):
        peer.send([large])
        assert router.wait(PATIENCE)
        message = router.receive()
        assert message is not None
        assert bytes(message[1][0]) == large
        assert relay.accepted == 1


def test_the_newest_connection_of_an_identity_takes_over(router: ZmqRouter) -> None:
    """As when a peer comes back whose former connection is dead, which nobody here knows yet."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    former = context.socket(zmq.DEALER)
    former.setsockopt(zmq.IDENTITY, b"p")
    former.setsockopt(zmq.RECONNECT_IVL, -1)
    former.connect(router.endpoints[0])
    former.send(b"former")
    assert router.wait(PATIENCE)
    router.receive()
    with contextlib.closing(ZmqPeer(router.endpoints[0], b"p")) as newest:
        newest.send([b"newest"])
        assert router.wait(PATIENCE)
        message = router.receive()
        assert message is not None
        assert bytes(message[1][0]) == b"newest"
        router.send(b"p", [b"x"])
        assert newest.receive(PATIENCE) is not None
    former.close(0)
    context.term()


def test_too_few_descriptors_are_an_error_and_not_the_end_of_the_program(tmp_path: Path) -> None:
    program = f"""
import os, resource
from envbus.bus.errors import TransportError
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter

def make(kind):
    if kind is ZmqRouter:
        return ZmqRouter(["ipc://{tmp_path}/bus"])
    return ZmqPeer("ipc://{tmp_path}/bus", b"peer")

allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for kind in (ZmqRouter, ZmqPeer):
    make(kind).close()
    lowest = os.dup(0)
    os.close(lowest)
    for free in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, most))
        try:
            make(kind).close()
            print("made")
        except TransportError as exc:
            print(exc)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    told = done.stdout.splitlines()
    for few, enough in (told[:10], told[10:12]), (told[12:22], told[22:]):
        assert all("takes 10 descriptors: [Errno 24]" in line for line in few)
        assert enough == ["made", "made"]


def test_the_first_large_message_needs_no_descriptor() -> None:
    """Strangers at a TCP endpoint can have all of them by then."""
    program = """
import os, resource
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter

router = ZmqRouter(["tcp://127.0.0.1:*"])
peer = ZmqPeer(router.endpoints[0], b"peer")
peer.send([b"x"])
assert router.wait(30.0)
while router.receive() is not None:
    pass
lowest = os.dup(0)
os.close(lowest)
allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
router.send(b"peer", [b"head", bytes(100_000)])
resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
print([len(frame) for frame in peer.receive(30.0)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout == "[4, 100000]\n"


@pytest.mark.parametrize("more", [[], [bytes(100_000)]])
def test_what_follows_a_message_that_broke_off_is_not_taken_for_its_rest(
    router: ZmqRouter, more: list[bytes]
) -> None:
    unsendable = memoryview(b"abcd")[::2]
    with (
        contextlib.closing(ZmqPeer(router.endpoints[0], b"a")) as a,
        contextlib.closing(ZmqPeer(router.endpoints[0], b"b")) as b,
    ):
        for peer in (a, b):
            with pytest.raises(BufferError):
                peer.send([b"broken", *more, unsendable])
            peer.send([b"whole"])
            for expected in [b"broken", *more, b""], [b"whole"]:
                assert router.wait(PATIENCE)
                message = router.receive()
                assert message is not None
                assert [bytes(frame) for frame in message[1]] == expected
        with pytest.raises(BufferError):
            router.send(b"a", [b"broken", *more, unsendable])
        router.send(b"b", [b"for b"])
        assert [bytes(frame) for frame in b.receive(PATIENCE) or ()] == [b"for b"]
        assert [bytes(frame) for frame in a.receive(PATIENCE) or ()] == [b"broken", *more, b""]


class _Raises(Exception):
    """What a signal's handler raised."""


@contextlib.contextmanager
def raising_at(function: str, event: int) -> Iterator[None]:
    """Have a function of `zmq_sockets` raise at one of its lines, as they are run."""
    code, seen = getattr(zmq_sockets, function).__code__, 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code is not code:
            return None
        seen += what == "line"
        if seen == event:
            raise _Raises
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("size", [1, 100_000])
def test_no_message_is_taken_for_the_rest_of_one_that_a_signals_handler_broke_off(
    router: ZmqRouter, size: int
) -> None:
    function = "_send_frames" if size == 1 else "_send_tracked"
    with (
        contextlib.closing(ZmqPeer(router.endpoints[0], b"a")) as a,
        contextlib.closing(ZmqPeer(router.endpoints[0], b"b")) as b,
    ):
        for peer in (a, b):
            peer.send([b"here"])
            assert router.wait(PATIENCE)
            assert router.receive() is not None
        for line in itertools.count(1):
            try:
                with raising_at(function, line):
                    router.send(b"a", [b"head", bytes(size)])
            except _Raises:
                router.send(b"b", [b"for b"])
                assert [bytes(frame) for frame in b.receive(PATIENCE) or ()] == [b"for b"]
            else:
                break
        assert line > 10


def test_too_few_descriptors_for_a_router_with_keys_are_an_error_and_no_hang(
    tmp_path: Path,
) -> None:
    program = f"""
import os, resource
from envbus.bus.errors import TransportError
from envbus.bus.transport.curve_keys import BrokerKeys, new_keys
from envbus.bus.transport.zmq_sockets import ZmqRouter

keys = BrokerKeys.load(new_keys("{tmp_path}", "broker")[1], lambda key: True)
allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
ZmqRouter(["tcp://127.0.0.1:*"]).close()
for free in range(24):
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, most))
    try:
        ZmqRouter(["tcp://127.0.0.1:*"], keys=keys).close()
        print("made")
    except TransportError as exc:
        print(exc)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert all("takes 20 descriptors: [Errno 24]" in line for line in told[:20])
    assert told[20:] == ["made"] * 4


def test_who_is_dropped_in_a_cycle_is_closed_and_keeps_no_garbage_collection(
    tmp_path: Path,
) -> None:
    ZmqRouter([f"ipc://{tmp_path}/bus"]).close()  # the first one of a process has pyzmq open some
    before = open_descriptors()
    router = ZmqRouter([f"ipc://{tmp_path}/bus"])
    peer = ZmqPeer(router.endpoints[0], b"p")
    peer.send([b"x"])
    assert router.wait(PATIENCE)
    cycle: list[object] = [router, peer]
    cycle.append(cycle)
    del router, peer, cycle
    gc.collect()  # would wait for ever for a context whose sockets nobody has closed
    wait_until(lambda: open_descriptors() <= before, "ZeroMQ's own thread closes them")
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def use() -> None:
        router = ZmqRouter([f"ipc://{tmp_path}/bus"])
        peer = ZmqPeer(router.endpoints[0], b"p")
        peer.send([b"x"])
        assert router.wait(PATIENCE)
        peer.close()
        router.close()

    use()
    before = open_descriptors()
    use()
    use()
    wait_until(lambda: open_descriptors() <= before, "ZeroMQ's own thread closes them")
