from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import PeerReady, Received, Send
from envbus.bus.errors import (
    ClosedError,
    EncodeError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    TransportError,
    VersionMismatchError,
)
from envbus.bus.peer.session import HELLO_ID
from envbus.bus.peer.worker import Heartbeats, PlainCodec, Worker, describe
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Payload,
    Reply,
    Request,
    Shutdown,
    Tree,
    Welcome,
)
from tests.bus.memory_transport import MemoryNetwork, MemoryPeer, MemoryRouter

PATIENCE = 30.0


class Doubled(Reply, frozen=True, kw_only=True):
    value: Any


class Anything(Reply, frozen=True, kw_only=True):
    value: Tree


class Double(Request[Doubled], frozen=True, kw_only=True):
    value: Any


class Unheard(Request[Doubled], frozen=True, kw_only=True):
    """Nobody answers it."""


class Lost(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def double(request: Double) -> Doubled:
    if request.value == "fail":
        raise LookupError("on purpose")
    if request.value == "closed":
        raise ClosedError("what it asks is closed")
    if request.value == "lost":
        raise Lost
    if request.value == "object":
        return Doubled(value=object())
    return Doubled(value=request.value * 2)


class Bus:
    """A worker, and a broker's side that a test plays."""

    def __init__(self, *scripts: Callable[[MemoryRouter], object], **options: Any) -> None:
        self.sent: list[tuple[Header, list[Any]]] = []
        self.waits = 0
        network = MemoryNetwork(idle=self._idle)
        self.router = network.router()
        self._scripts = scripts
        heartbeat = options.pop("heartbeat", 0.0)
        hello = Hello(name="w", services=["double"], heartbeat=heartbeat)
        self.worker = Worker(network.peer(b"w"), hello, {Double: double}, **options)

    def _idle(self, seconds: float) -> None:
        """The worker waits: take what it sent; play the next script, then say `Shutdown`."""
        self.take()
        if not seconds:
            return
        self.waits += 1
        if self.waits <= len(self._scripts):
            self._scripts[self.waits - 1](self.router)
        else:
            self.router.send(b"w", message(Kind.NOTICE, Shutdown()))

    def take(self) -> None:
        while (received := self.router.receive()) is not None:
            frames = received[1]
            self.sent.append((decode_header(frames[0]), frames[1:]))

    def run(self) -> list[tuple[Kind, int, str]]:
        self.worker.run()
        self.take()
        return [(header.kind, header.request_id, header.payload_type) for header, _ in self.sent]

    def payload(self, position: int, payload_type: type[Payload]) -> Any:
        return decode(payload_type, self.sent[position][1])


def message(kind: Kind, payload: Payload, request_id: int = 0, **header: Any) -> list[Any]:
    version = header.pop("version", PROTOCOL_VERSION)
    head = Header(version, kind, request_id, type(payload).__name__, **header)
    return [encode_header(head), *encode(payload)]


def asking(*values: Any) -> Callable[[MemoryRouter], None]:
    def script(router: MemoryRouter) -> None:
        for number, value in enumerate(values, 1):
            router.send(b"w", message(Kind.REQUEST, Double(value=value), number))

    return script


GOODBYE = (Kind.NOTICE, 0, "Goodbye")


HEAD = Header(PROTOCOL_VERSION, Kind.FAILURE, 3, "Failed")


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [encode_header(HEAD)],
        [encode_header(HEAD), b"junk"],
        [encode_header(HEAD), b"\x81\xa1a" + b"\x91" * 100_000],
        [encode_header(HEAD), *encode(Failed(code=FailureCode.REMOTE, message="m")), b"more"],
    ],
)
def test_a_message_that_cannot_be_used_ends_nothing(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    def hostile(router: MemoryRouter) -> None:
        for _ in range(100):
            router.send(b"w", frames)

    bus = Bus(hostile, asking(1))
    assert bus.run() == [(Kind.REPLY, 1, "Doubled"), GOODBYE]
    assert len(caplog.messages) < 5


def test_requests_are_answered_in_their_order_and_a_shutdown_with_a_goodbye() -> None:
    bus = Bus(asking(1, "a", [2]))
    assert bus.run() == [
        (Kind.REPLY, 1, "Doubled"),
        (Kind.REPLY, 2, "Doubled"),
        (Kind.REPLY, 3, "Doubled"),
        GOODBYE,
    ]
    assert [bus.payload(i, Doubled).value for i in range(3)] == [2, "aa", [2, 2]]


def test_a_handlers_exception_fails_its_request_only() -> None:
    bus = Bus(asking("fail", 2))
    assert [kind for kind, *_ in bus.run()] == [Kind.FAILURE, Kind.REPLY, Kind.NOTICE]
    failed = bus.payload(0, Failed)
    assert (failed.code, failed.message) == (FailureCode.REMOTE, "on purpose")
    assert failed.remote_type == "builtins.LookupError"
    assert "double" in failed.remote_traceback


def test_what_is_closed_to_a_handler_is_not_the_workers_own_socket() -> None:
    bus = Bus(asking("closed", 1))
    assert [kind for kind, _, _ in bus.run()] == [Kind.FAILURE, Kind.REPLY, Kind.NOTICE]
    assert bus.payload(0, Failed).message == "what it asks is closed"


def test_an_exception_without_a_text_is_told_too() -> None:
    bus = Bus(asking("lost"))
    bus.run()
    assert "Lost whose str() raises" in bus.payload(0, Failed).message


def test_a_reply_that_cannot_cross_fails_its_request_with_the_place() -> None:
    bus = Bus(asking("object", 1))
    assert [kind for kind, *_ in bus.run()] == [Kind.FAILURE, Kind.REPLY, Kind.NOTICE]
    failed = bus.payload(0, Failed)
    assert failed.code is FailureCode.PROTOCOL
    assert "value" in failed.message


def test_a_request_of_an_unknown_type_is_refused_naming_the_known_ones() -> None:
    bus = Bus(lambda router: router.send(b"w", message(Kind.REQUEST, Unheard(), 7)))
    assert bus.run()[0] == (Kind.FAILURE, 7, "Failed")
    assert bus.payload(0, Failed).message == "w does not answer Unheard; it does: Double"


def test_a_request_that_cannot_be_read_is_refused() -> None:
    header = encode_header(Header(PROTOCOL_VERSION, Kind.REQUEST, 3, "Double"))
    bus = Bus(lambda router: router.send(b"w", [header, b"\xc1"]))
    assert bus.run()[0] == (Kind.FAILURE, 3, "Failed")
    assert bus.payload(0, Failed).code is FailureCode.PROTOCOL


def test_junk_of_the_broker_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus(lambda router: router.send(b"w", [b"junk"]))
    assert bus.run() == [GOODBYE]
    assert "w dropped a message" in caplog.text


def test_a_worker_may_be_stopped_by_a_handler() -> None:
    bus = Bus(asking(1, 2))
    bus.worker._handlers["Double"] = (
        Double,
        lambda request: (bus.worker.stop(), Doubled(value=0))[1],
    )
    assert bus.run() == [(Kind.REPLY, 1, "Doubled"), GOODBYE]


def test_a_queue_that_is_full_loses_the_reply_and_not_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = Bus(asking(1))
    bus.router._queued[b"w"] = 1000
    with caplog.at_level(logging.ERROR), pytest.raises(QueueFullError, match="wait for the broker"):
        bus.worker.run()
    assert "the reply to request 1 is lost" in caplog.text


def test_a_queue_that_is_full_for_a_handler_fails_its_request() -> None:
    def handle(request: Double) -> Doubled:
        raise QueueFullError("a queue of the handler's own is full")

    bus = Bus(asking(1))
    bus.worker._handlers["Double"] = (Double, handle)
    assert bus.run() == [(Kind.FAILURE, 1, "Failed"), GOODBYE]
    assert "of the handler's own" in bus.payload(0, Failed).message


# --- joining --------------------------------------------------------------------------------


def answering(payload: Payload, kind: Kind, **header: Any) -> Callable[[MemoryRouter], None]:
    return lambda router: router.send(b"w", message(kind, payload, HELLO_ID, **header))


def test_joining_returns_the_welcome() -> None:
    welcome = Welcome(lease=3.0, max_message_bytes=10)
    bus = Bus(answering(welcome, Kind.REPLY), heartbeat=1.0)
    assert bus.worker.join(1.0) == welcome
    (header, frames), *_ = bus.sent
    assert (header.kind, header.request_id, header.payload_type) == (
        Kind.REQUEST,
        HELLO_ID,
        "Hello",
    )
    assert decode(Hello, frames).services == ["double"]


def test_a_refusal_is_raised() -> None:
    failed = Failed(code=FailureCode.PROTOCOL, message="the name is taken")
    with pytest.raises(ProtocolError, match="refuses w: the name is taken"):
        Bus(answering(failed, Kind.FAILURE)).worker.join(1.0)
    failed = Failed(code=FailureCode.VERSION, message="7 and 1")
    with pytest.raises(VersionMismatchError, match="7 and 1"):
        Bus(answering(failed, Kind.FAILURE)).worker.join(1.0)


def test_a_broker_of_another_version_is_named() -> None:
    failed = Failed(code=FailureCode.VERSION, message="")
    with pytest.raises(VersionMismatchError, match=r"protocol version 9.*version 1"):
        Bus(answering(failed, Kind.FAILURE, version=9)).worker.join(1.0)


def test_no_answer_is_a_time_out() -> None:
    with pytest.raises(RequestTimeoutError, match="no broker answered"):
        Bus(lambda router: None).worker.join(0.01)


# --- being forgotten ------------------------------------------------------------------------

COMPLAINT = Failed(code=FailureCode.NOT_JOINED, message="say hello first")


def test_a_worker_that_was_forgotten_leaves() -> None:
    bus = Bus(lambda router: router.send(b"w", message(Kind.FAILURE, COMPLAINT)), heartbeat=1.0)
    assert bus.run() == [GOODBYE]
    assert bus.waits <= 2


def test_the_heartbeats_thread_may_tell_it_and_what_is_old_is_dropped() -> None:
    def script(router: MemoryRouter) -> None:
        bus.worker.on_unknown()
        router.send(b"w", message(Kind.REQUEST, Double(value=1), 1))

    bus = Bus(script, heartbeat=1.0)
    assert bus.run() == [GOODBYE]


def test_the_heartbeats_thread_may_stop_itself() -> None:
    network = MemoryNetwork()
    stopped: list[bool] = []

    def connect() -> MemoryPeer:
        peer = network.peer(b"w.heartbeat")
        network.router().send(b"w.heartbeat", message(Kind.FAILURE, COMPLAINT))
        return peer

    def stop() -> None:
        beats.stop()
        stopped.append(True)

    beats = Heartbeats(connect, b"w", 0.001, on_unknown=stop)
    beats.start()
    beats._thread.join(10.0)
    assert not beats._thread.is_alive()
    assert stopped == [True]
    assert not network.peers


def test_a_garbage_collection_may_stop_heartbeats_at_any_line_of_their_thread() -> None:
    network = MemoryNetwork()
    network.router()
    errors: list[Exception] = []

    def stop(*_: object) -> Any:
        try:
            beats.stop()
        except Exception as error:  # it would leave a lock of `threading` as it is
            errors.append(error)
        return stop

    def connect() -> MemoryPeer:
        peer = network.peer(b"w.heartbeat")
        sys.settrace(stop)  # of this thread: as where a client that nobody has is collected
        return peer

    beats = Heartbeats(connect, b"w", 0.001)
    beats.start()
    beats._thread.join(10.0)
    assert not beats._thread.is_alive()
    assert not network.peers
    assert errors == []


def test_heartbeats_begin_as_soon_as_there_is_room_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    tries: list[int] = []

    def connect() -> MemoryPeer:
        tries.append(len(tries))
        if len(tries) < 3:
            raise TransportError("too few descriptors")
        peer = network.peer(b"w.heartbeat")
        network.router().send(b"w.heartbeat", message(Kind.FAILURE, COMPLAINT))
        return peer

    beats = Heartbeats(connect, b"w", 0.001, on_unknown=lambda: beats.stop())
    beats.start()
    beats._thread.join(10.0)
    assert not beats._thread.is_alive()
    assert tries == [0, 1, 2]
    assert caplog.text.count("no heartbeats, which is tried again: too few descriptors") == 1


def test_heartbeats_that_find_no_room_can_be_stopped() -> None:
    tried = threading.Event()

    def connect() -> MemoryPeer:
        tried.set()
        raise TransportError("too few descriptors")

    beats = Heartbeats(connect, b"w", PATIENCE)
    beats.start()
    assert tried.wait(PATIENCE)
    beats.stop()
    assert not beats._thread.is_alive()


def test_a_worker_without_heartbeats_only_logs_a_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(router: MemoryRouter) -> None:
        router.send(b"w", message(Kind.FAILURE, COMPLAINT))
        asking(4)(router)

    bus = Bus(script)
    assert bus.run() == [(Kind.REPLY, 1, "Doubled"), GOODBYE]
    assert "say hello first" in caplog.text


def test_worker_and_core_agree_about_a_hello() -> None:
    core = BrokerCore()
    hello = Header(PROTOCOL_VERSION, Kind.REQUEST, HELLO_ID, "Hello", 1.0)
    frames = encode(Hello(name="w", services=["double"]))
    send, ready = core.handle(Received(b"w", decode_header(encode_header(hello)), frames), 0.0)
    assert isinstance(send, Send)
    assert (send.header.request_id, send.header.payload_type) == (HELLO_ID, "Welcome")
    assert isinstance(ready, PeerReady)


# --- small things ---------------------------------------------------------------------------


def test_what_may_cross_of_an_exception() -> None:
    assert describe(EncodeError("x")).code is FailureCode.PROTOCOL
    assert describe(ValueError("x")).code is FailureCode.REMOTE
    assert describe(ValueError("x")).remote_type == "builtins.ValueError"


def test_the_plain_codec_names_what_cannot_cross_or_puts_a_placeholder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(EncodeError, match="value"):
        PlainCodec().encode(Doubled(value=object()))
    lenient = PlainCodec(placeholders=("value",))
    for _ in range(2):
        frames = lenient.encode(Anything(value=Tree({"x": object()})))
        assert "object" in repr(lenient.decode(Anything, frames).value.value["x"])
    assert caplog.text.count("placeholder") == 1


def test_with_closes_a_worker_that_never_ran() -> None:
    peer = MemoryNetwork().peer(b"w")
    with Worker(peer, Hello(name="w", services=["double"]), {Double: double}):
        assert not peer.closed
    assert peer.closed
