"""The broker's shell with real sockets, and peers that do not keep to the protocol."""

from __future__ import annotations

import logging
import math
import random
import select
from collections.abc import Iterator

import msgspec
import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, Effect, Event, PeerReady, Received
from envbus.bus.broker.loop import Broker, Outcome
from envbus.bus.errors import PeerLostError
from envbus.bus.peer.client import Client
from envbus.bus.transport.local_router import with_local_links
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.bus.wire.codec import decode, decode_header, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Kind,
    Welcome,
)
from tests.bus.memory_transport import MemoryNetwork
from tests.descriptors import no_more_files
from tests.integration.bus_programs import (
    Ask,
    Name,
    Named,
    RawPeer,
    RunningBroker,
    Wait,
    frames_of,
    hello_frames,
    worker,
)
from tests.integration.group_children import PATIENCE, wait_until
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(180)


def failure_of(frames: list[bytes]) -> tuple[Header, Failed]:
    header = decode_header(frames[0])
    assert header.kind is Kind.FAILURE
    return header, decode(Failed, frames[1:])


def test_another_version_is_refused_naming_both() -> None:
    with RunningBroker() as broker, RawPeer(broker.endpoint) as raw:
        raw.send(*hello_frames("old", version=99))
        header, failed = failure_of(raw.receive())
        assert (failed.code, header.request_id) == (FailureCode.VERSION, 1)
        assert "99" in failed.message
        assert f"version {PROTOCOL_VERSION}" in failed.message


JUNK: list[list[bytes]] = [
    [b""],
    [b"x"],
    [b"", b"", b""],
    [b"\xff" * 5000],
    [b"\x93\x01\x02\x03"],
    [b"\x97\x01\x00\x01\xa3Ask\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00\x00\xa1w", b"\xc0"],
    frames_of(Kind.REQUEST, Name(), to="w", ttl=1.0),  # without a hello
    frames_of(Kind.REPLY, Named(name="spy"), request_id=1),
    frames_of(Kind.NOTICE, Heartbeat(identity=b"nobody")),
    frames_of(Kind.NOTICE, Goodbye()),
    [*hello_frames("x")[:1], b"\xc1"],
    hello_frames("x")[:1],
    [*hello_frames("x"), b"one more frame"],
    hello_frames(""),
    hello_frames("x", capacity=0),
    hello_frames("x", heartbeat=-1.0),
    hello_frames("x" * 300),
    hello_frames("x\n" * 20),
    [hello_frames("x")[0], b"\x82\xa4name\xa1x\xa5extra" + b"\x91" * 100_000],
]


class FragileCore(BrokerCore):
    """Has a defect that some requests reach."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Received) and event.header.payload_type == "Boom":
            raise RecursionError("a defect\nof the core")
        return super().handle(event, now)


def test_what_a_message_makes_the_broker_raise_is_its_senders_trouble_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    broker = Broker(network.router(), FragileCore(BrokerConfig(embedded=False)))
    evil, honest = network.peer(b"evil\n"), network.peer(b"honest")
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "Boom", 1.0)
    for _ in range(1000):
        evil.send([encode_header(header), b""])
    honest.send(hello_frames("honest"))
    broker.poll(0.0)
    frames = evil.receive(0.0)
    assert frames is not None
    answered, failed = failure_of([bytes(frame) for frame in frames])
    assert (answered.request_id, failed.code) == (7, FailureCode.PROTOCOL)
    assert "a defect" in failed.message
    welcome = honest.receive(0.0)
    assert welcome is not None
    assert decode_header(welcome[0]).payload_type == "Welcome"
    assert broker.complaints.counts["message"] == 1000
    assert len(caplog.messages) < 5
    assert not any("\n" in message for message in caplog.messages)


@pytest.mark.parametrize(("kind", "ttl"), [(7, 1.0), (0, math.nan), (0, math.inf)])
def test_a_request_whose_header_is_wrong_is_answered_by_its_id(kind: int, ttl: float) -> None:
    network = MemoryNetwork()
    broker = Broker(network.router(), BrokerCore(BrokerConfig()))
    peer = network.peer(b"peer")
    peer.send([msgspec.msgpack.encode([PROTOCOL_VERSION, kind, 26, "Ask", ttl]), b"\x80"])
    broker.poll(0.0)
    frames = peer.receive(0.0)
    assert frames is not None
    answered, failed = failure_of([bytes(frame) for frame in frames])
    assert (answered.request_id, failed.code) == (26, FailureCode.PROTOCOL)


def test_answers_to_who_does_not_read_are_logged_within_a_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork(queue_size=1)
    broker = Broker(network.router(), BrokerCore(BrokerConfig()))
    network.peer(b"deaf")
    failed = Failed(code=FailureCode.PROTOCOL, message="no")
    with caplog.at_level(logging.INFO):
        sent = [broker.answer(b"deaf", number, failed) for number in range(500)]
    assert sent == [True] + [False] * 499
    assert broker.statistics().unread == 499
    told = [record for record in caplog.records if record.name == "envbus.bus.broker.loop"]
    assert len(told) == 100


def test_junk_is_counted_and_answered_and_disturbs_nobody() -> None:
    chance = random.Random(1)
    junk = [*JUNK, *([chance.randbytes(chance.randrange(200))] for _ in range(200))]
    with (
        RunningBroker() as broker,
        worker("w", broker.endpoint, capacity=8),
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint) as raw,
    ):
        for number, frames in enumerate(junk):
            raw.send(*frames)
            if number % 10 == 0:
                reply = client.ask("w", Ask(number=number), timeout=PATIENCE).result(PATIENCE)
                assert reply.number == number
        silent = 2  # a goodbye, and frames that make a notice or failure of a stranger
        wait_until(
            lambda: (
                broker.statistics().malformed + broker.statistics().stranger_frames
                >= len(junk) - silent
            ),
            "all junk to be counted",
        )
        _, failed = failure_of(raw.receive())
        assert failed.code is FailureCode.PROTOCOL
        assert broker.statistics().ready_peers_now == 2


def test_random_headers_of_a_known_peer_disturb_nobody() -> None:
    chance = random.Random(2)
    with (
        RunningBroker() as broker,
        worker("w", broker.endpoint, capacity=8) as served,
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint) as raw,
    ):
        raw.send(*hello_frames("raw"))
        raw.receive()
        waiting = client.ask("w", Wait(number=5), timeout=PATIENCE)
        assert served.waiting.wait(PATIENCE)
        for _ in range(300):
            kind = chance.choice(list(Kind))
            payload = chance.choice([Named(name="spy"), Name(), Heartbeat(identity=b"w.1")])
            raw.send(
                *frames_of(
                    kind,
                    payload,
                    request_id=chance.randrange(5),
                    to=chance.choice(["", "nobody", "raw"]),
                    ttl=chance.choice([0.0, -1.0, 0.5]),
                    incarnation=chance.randrange(3),
                )
            )
        wait_until(lambda: broker.statistics().foreign_replies > 0, "a theft to be counted")
        served.go.set()
        assert waiting.result(PATIENCE).name == "w"
        assert client.ask("w", Name(), timeout=PATIENCE).result(PATIENCE).name == "w"


def test_a_flood_that_is_never_read_disturbs_nobody() -> None:
    with (
        RunningBroker() as broker,
        worker("w", broker.endpoint, capacity=8),
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint, read=False) as raw,
    ):
        for _ in range(20):
            for _ in range(500):
                raw.send(b"junk" * 50)
            assert client.ask("w", Name(), timeout=PATIENCE).result(PATIENCE).name == "w"


def test_a_frame_over_the_limit_costs_its_sender_the_connection_only() -> None:
    with (
        RunningBroker(max_frame_bytes=100_000) as broker,
        worker("w", broker.endpoint),
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint) as raw,
    ):
        raw.send(b"x" * 200_000)
        assert client.ask("w", Name(), timeout=PATIENCE).result(PATIENCE).name == "w"

        def is_welcome() -> bool:
            # libzmq connects it again, and loses what is sent before it has seen why.
            raw.send(*hello_frames("raw"))
            return raw.socket.poll(200) > 0

        wait_until(is_welcome, "an answer")
        assert decode_header(raw.receive()[0]).payload_type == "Welcome"


def test_peers_that_come_and_go_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with RunningBroker() as running:
        for number in range(150):
            with RawPeer(running.endpoint, b"many-%d" % number) as raw:
                raw.send(*hello_frames(f"peer-{number}", heartbeat=60.0))
                raw.receive()
                raw.send(b"junk" * 1000)
                raw.receive()
    assert running.statistics().malformed == 150
    assert len(caplog.messages) <= 100


def test_nobody_learns_the_identity_of_another_peer() -> None:
    """Who knows it could connect under it, and take and answer the messages of that peer."""
    with RunningBroker() as running, RawPeer(running.endpoint, b"asker") as asker:
        asker.send(*hello_frames("asker"))
        asker.receive()
        with RawPeer(running.endpoint, b"secret") as peer:
            peer.send(*hello_frames("peer"))
            peer.receive()
        for request_id in range(2, 102):  # until the broker has noticed that it is gone
            asker.send(*frames_of(Kind.REQUEST, Ask(), request_id, to="peer", ttl=0.1))
            head, body = asker.receive()
            failed = decode(Failed, [body])
            if failed.code is FailureCode.PEER_LOST:
                break
        assert failed.code is FailureCode.PEER_LOST
        assert failed.message == "Ask was not sent to peer: this peer is not connected"
        assert b"secret" not in head + body


def test_a_peer_that_says_nothing_costs_nothing() -> None:
    with RunningBroker() as broker, Client(broker.endpoint) as client:
        before = broker.statistics().joining_peers_now
        silent = [RawPeer(broker.endpoint, b"silent-%d" % i) for i in range(20)]
        with worker("w", broker.endpoint):
            assert client.ask("w", Name(), timeout=PATIENCE).result(PATIENCE).name == "w"
        assert broker.statistics().joining_peers_now == before
        for raw in silent:
            raw.__exit__()


def test_a_hello_may_be_said_twice() -> None:
    with RunningBroker() as broker, RawPeer(broker.endpoint) as raw:
        for _ in range(2):
            raw.send(*hello_frames("raw", heartbeat=100.0))
            frames = raw.receive()
            assert decode(Welcome, frames[1:]).lease == 400.0
        assert broker.statistics().ready_peers_now == 1


def test_a_busy_worker_lives_by_its_heartbeats_and_a_silent_one_is_dropped() -> None:
    with (
        RunningBroker() as broker,
        worker("busy", broker.endpoint, heartbeat=0.4, services=["a"]) as busy,
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint, b"silent") as silent,
    ):
        held = client.ask("busy", Wait(number=1), timeout=PATIENCE)
        assert busy.waiting.wait(PATIENCE)
        silent.send(*hello_frames("silent", services=["b"], heartbeat=0.4))
        silent.receive()
        lost = client.ask("silent", Wait(), timeout=PATIENCE)
        with pytest.raises(PeerLostError, match=r"silent.*lease of 1\.6 s ran out"):
            lost.result(PATIENCE)
        # The busy one has been silent on its own socket for longer than its lease by now.
        assert not held.done()
        busy.go.set()
        assert held.result(PATIENCE).number == 1


def test_a_worker_cannot_answer_anothers_request() -> None:
    with (
        RunningBroker() as broker,
        worker("w", broker.endpoint) as served,
        Client(broker.endpoint) as client,
        RawPeer(broker.endpoint, b"thief") as thief,
    ):
        thief.send(*hello_frames("thief", services=["names"]))
        thief.receive()
        future = client.ask("w", Wait(number=3), timeout=PATIENCE)
        assert served.waiting.wait(PATIENCE)
        for number in range(5):
            thief.send(*frames_of(Kind.REPLY, Named(name="thief"), request_id=number))
        wait_until(lambda: broker.statistics().foreign_replies == 1, "the theft to be counted")
        served.go.set()
        assert future.result(PATIENCE).name == "w"


@pytest.fixture(params=[with_local_links, lambda router: router], ids=["with local links", "alone"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    transport = request.param(ZmqRouter(["tcp://127.0.0.1:*"]))
    with Broker(transport, BrokerCore(BrokerConfig())) as made:
        yield made


def is_readable(broker: Broker, seconds: float = 0.0) -> bool:
    return bool(select.select([broker], [], [], seconds)[0])


def next_of(broker: Broker) -> list[Outcome]:
    """Return what is told next, as an event loop learns of it. It may be woken in vain, too."""
    found: list[Outcome] = []
    while not found:
        assert is_readable(broker, PATIENCE), "nothing tells of what is there"
        found = broker.poll(0.0)
    return found


def test_its_descriptor_is_readable_as_long_as_messages_are_left(broker: Broker) -> None:
    with RawPeer(broker.endpoints[0]) as raw:
        raw.send(*hello_frames("raw"))
        for number in range(2, 12):
            raw.send(*frames_of(Kind.REQUEST, Name(), number, ttl=60.0))
        pass_time(0.5)  # for all to be there
        taken = 0
        while taken < 11:
            assert is_readable(broker, PATIENCE), "nothing tells of what is left"
            taken += len(broker.poll(0.0, most=1))
    assert taken == 11


def test_its_descriptor_tells_of_what_came_before_something_was_sent(broker: Broker) -> None:
    """ZeroMQ uses up what its own descriptor has to tell where it sends."""
    with RawPeer(broker.endpoints[0]) as raw:
        raw.send(*hello_frames("raw"))
        (ready,) = next_of(broker)
        assert isinstance(ready, PeerReady)
        for number in range(2, 22):
            raw.send(*frames_of(Kind.REQUEST, Name(), number, ttl=60.0))
            pass_time(0.01)
            failed = Failed(code=FailureCode.NO_PEER, message="sent meanwhile")
            broker.answer(ready.peer, 1000 + number, failed)
            assert len(next_of(broker)) == 1


def test_without_a_descriptor_it_is_the_transports(broker: Broker) -> None:
    """Strangers may hold all of them; what tells of changes only is better than an error."""
    with RawPeer(broker.endpoints[0]) as raw:
        with no_more_files():
            simple = broker.fileno()
        raw.send(*hello_frames("raw"))
        assert select.select([simple], [], [], PATIENCE)[0]
        assert is_readable(broker, PATIENCE)
        assert broker.fileno() != simple
