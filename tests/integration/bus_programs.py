"""Requests, workers and brokers of the tests of the bus with real sockets."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import zmq

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, BrokerStatistics, Effect, Event
from envbus.bus.broker.loop import Broker
from envbus.bus.peer.worker import Heartbeats, Worker
from envbus.bus.process.pipe import Pipe
from envbus.bus.transport.curve_keys import BrokerKeys
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.bus.wire.codec import encode, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Header,
    Hello,
    Kind,
    Notice,
    Payload,
    Reply,
    Request,
)
from tests.integration.group_children import PATIENCE

__all__ = [
    "Ask",
    "Name",
    "Named",
    "Note",
    "RawPeer",
    "RunningBroker",
    "Wait",
    "free_port",
    "hello_frames",
    "kept_endpoint",
    "serve_in_process",
    "worker",
]


class Named(Reply, frozen=True, kw_only=True):
    name: str
    number: int = 0
    data: Any = None


class Name(Request[Named], frozen=True, kw_only=True):
    """Asks a worker for its name; may be asked twice."""

    idempotent = True
    number: int = 0


class Ask(Request[Named], frozen=True, kw_only=True):
    """As `Name`, and may not be asked twice. A negative number makes the worker raise."""

    number: int = 0
    data: Any = None


class Wait(Request[Named], frozen=True, kw_only=True):
    """Asks a worker to wait until it is told to go on."""

    number: int = 0


class WaitTwice(Wait, frozen=True, kw_only=True):
    """A `Wait` that may be asked twice."""

    idempotent = True


class Note(Notice, frozen=True, kw_only=True):
    number: int


class _CountingCore(BrokerCore):
    """May be asked for its counts in another thread, while peers come and go."""

    def __init__(self, config: BrokerConfig) -> None:
        super().__init__(config)
        self._lock = threading.Lock()

    def handle(self, event: Event, now: float) -> list[Effect]:
        with self._lock:
            return super().handle(event, now)

    def statistics(self) -> BrokerStatistics:
        with self._lock:
            return super().statistics()


class RunningBroker:
    """A standalone broker in a thread of its own, which alone uses it."""

    def __init__(
        self,
        *endpoints: str,
        max_frame_bytes: int = 1 << 30,
        keys: BrokerKeys | None = None,
        **limits: Any,
    ) -> None:
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._arguments = (endpoints or ("tcp://127.0.0.1:*",), max_frame_bytes, keys, limits)
        self._thread = threading.Thread(target=self._run, name="broker")
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        endpoints, max_frame_bytes, keys, limits = self._arguments
        try:
            router = ZmqRouter(endpoints, max_frame_bytes=max_frame_bytes, keys=keys)
            self.broker = Broker(router, _CountingCore(BrokerConfig(embedded=False, **limits)))
        except BaseException as error:
            self._error = error
            self._ready.set()
            return
        self.endpoint = self.broker.endpoints[0]
        ear, self._bell = socket.socketpair()
        self.broker.watch(ear.fileno())
        self._ready.set()
        try:
            self.broker.run()
        finally:
            self.broker.close()
            ear.close()

    def statistics(self) -> BrokerStatistics:
        return self.broker.statistics()

    def stop(self) -> None:
        self.broker.stop()
        self._bell.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def __enter__(self) -> RunningBroker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class WorkerThread:
    """A worker in a thread; `go` lets its `Wait`s go on."""

    def __init__(self, name: str, endpoint: str, **options: Any) -> None:
        self.name = name
        self.go = threading.Event()
        self.taken: list[int] = []
        self.waiting = threading.Event()
        self._connected = threading.Event()
        self._options = options
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}")
        self._thread.start()
        assert self._connected.wait(PATIENCE)

    def _run(self) -> None:
        options = self._options
        identity = f"{self.name}.1".encode()
        heartbeat = options.pop("heartbeat", 0.0)
        hello = Hello(
            name=self.name,
            services=options.pop("services", ["names"]),
            capacity=options.pop("capacity", 1),
            heartbeat=heartbeat,
        )
        self.worker = Worker(
            ZmqPeer(self._endpoint, identity),
            hello,
            {Name: self._answer, Ask: self._answer, Wait: self._wait, WaitTwice: self._wait},
            **options,
        )
        beats = Heartbeats(
            lambda: ZmqPeer(self._endpoint, identity + b".beat"),
            identity,
            heartbeat or 1.0,
            on_unknown=self.worker.on_unknown,
        )
        try:
            self.worker.join(PATIENCE)
            if heartbeat:
                beats.start()
            self._connected.set()
            self.worker.run()
        finally:
            self._connected.set()
            beats.stop()

    def _answer(self, request: Any) -> Named:
        if request.number < 0:
            raise LookupError(f"no such number: {request.number}")
        self.taken.append(request.number)
        return Named(name=self.name, number=request.number, data=getattr(request, "data", None))

    def _wait(self, request: Any) -> Named:
        self.waiting.set()
        assert self.go.wait(PATIENCE)
        return self._answer(request)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let it end, within a second, and do not wait for it."""
        self.go.set()
        self.worker.stop()


@contextlib.contextmanager
def worker(name: str, endpoint: str, **options: Any) -> Iterator[WorkerThread]:
    thread = WorkerThread(name, endpoint, **options)
    try:
        yield thread
    finally:
        thread.stop()


class RawPeer:
    """A DEALER socket that says whatever a test wants."""

    def __init__(self, endpoint: str, identity: bytes = b"raw", *, read: bool = True) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        if not read:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 1024)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self) -> list[bytes]:
        assert self.socket.poll(PATIENCE * 1000), "nothing came"
        return self.socket.recv_multipart()

    def is_silent(self) -> bool:
        return not self.socket.poll(0)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close(0)
        self.context.term()


def frames_of(kind: Kind, payload: Payload, request_id: int = 1, **header: Any) -> list[bytes]:
    """Return a whole message, without the routing id."""
    version = header.pop("version", PROTOCOL_VERSION)
    head = Header(version, kind, request_id, type(payload).__name__, **header)
    return [encode_header(head), *encode(payload)]


def hello_frames(name: str, *, version: int = PROTOCOL_VERSION, **fields: Any) -> list[bytes]:
    hello = Hello(name=name, **fields)
    return frames_of(Kind.REQUEST, hello, version=version, ttl=10.0)


def free_port() -> int:
    """A TCP port of this host at which nobody listens.

    Systems give no such low port to who asks for any, as other tests do at the same time.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("of 100 ports none is free")


def kept_endpoint() -> str:
    """An endpoint that nobody else gets while the broker there is away."""
    return f"tcp://127.0.0.1:{free_port()}"


def serve_in_process(pipe: Pipe) -> None:
    """Entry of a child: a worker. The first message tells endpoint and name, the next ends it."""
    endpoint, name = pipe.receive_bytes(1, PATIENCE).decode().split()
    identity = name.encode()

    def answer(request: Name) -> Named:
        return Named(name=name, number=request.number)

    def wait(request: Wait) -> Named:
        pipe.send_bytes(1, b"waiting")
        signal.pause()
        raise AssertionError("not reached")

    served = Worker(
        ZmqPeer(endpoint, identity),
        Hello(name=name, services=["names"], heartbeat=0.4, capacity=4),
        {Name: answer, Wait: wait, WaitTwice: wait},
    )
    served.join(PATIENCE)
    beats = Heartbeats(
        lambda: ZmqPeer(endpoint, identity + b".beat"), identity, 0.1, served.on_unknown
    )
    beats.start()
    served.run()
    beats.stop()
