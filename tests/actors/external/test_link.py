"""A client's connection that its threads share, over a bridge in a thread."""

from __future__ import annotations

import gc
import linecache
import logging
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from envbus.actors import ClientTimeouts, ExternalEnvClient
from envbus.actors.external import link
from envbus.actors.external.protocol import LogAction, Logged, LogReturns
from envbus.bus.complaints import PROGRESS_AFTER
from envbus.bus.errors import ClosedError, ConfigError, QueueFullError, RequestTimeoutError
from envbus.bus.wire.codec import decode_header, encode
from envbus.runner import ExternalEnvBridge
from tests.integration.bus_programs import free_port
from tests.integration.group_children import refused_in_a_fork
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def address() -> Iterator[str]:
    """Of a bridge that is served."""
    over = threading.Event()
    told: list[str] = []
    up = threading.Event()

    def serve() -> None:
        with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
            told.append(bridge.address)
            up.set()
            Runner(bridge).serve(over.is_set)

    with in_thread(serve):
        assert up.wait(60.0)
        yield told[0]
        over.set()


def _is_with(frame: FrameType) -> bool:
    """A trace comes between a block and its lock's release there; a signal's handler never does."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with ")


class Interrupt:
    """Raises KeyboardInterrupt at one line of a call: the next one each time."""

    def __init__(self) -> None:
        self.at = 0
        self._left = 0

    def __call__(self, function: Any, *arguments: Any) -> bool:
        """Return whether the call was interrupted."""
        self.at += 1
        self._left = self.at
        sys.settrace(self._trace)
        try:
            function(*arguments)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return self._left <= 0

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != link.__file__:
            return self._trace if self._left > 0 else None
        if event == "line" and not _is_with(frame):
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "beside another thread"])
def test_ctrl_c_at_any_line_of_a_call_stalls_no_later_one(address: str, with_others: bool) -> None:
    over = threading.Event()
    with ExternalEnvClient(address, timeouts=ClientTimeouts(other=30.0)) as client:

        def beside() -> None:
            client.start_episode("beside")
            while with_others and not over.is_set():
                client.log_returns("beside", 1.0)

        with in_thread(beside):
            client.start_episode("e")
            interrupt = Interrupt()
            while interrupt(client.log_returns, "e", 1.0):
                client.log_returns("e", 1.0, timeout=20.0)
                assert interrupt.at < 1000
            over.set()
        assert interrupt.at > 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_client_to_nobody_says_so_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(RequestTimeoutError, match=r"no bridge was joined .* sampled, served"):
        ExternalEnvClient(nobody, timeouts=ClientTimeouts(connect=PROGRESS_AFTER + 1.3))
    (text,) = [text for text in caplog.messages if "is waited for" in text]
    assert nobody in text


class Expired:
    """A lock whose first wait is over at once, as after a stop for longer than it may take."""

    def __init__(self, lock: threading.Lock) -> None:
        self.release = lock.release
        self._lock = lock
        self.was_stopped = False

    def acquire(self, *, timeout: float = -1.0) -> bool:
        if timeout >= 0.0 and not self.was_stopped:
            self.was_stopped = True
            return False
        return self._lock.acquire(timeout=timeout)


class StoppedWaiter(link.Waiter):
    """Waits for others by such locks."""

    own: Any = None

    @property
    def bell(self) -> Any:
        return self.own

    @bell.setter
    def bell(self, lock: threading.Lock | None) -> None:
        self.own = None if lock is None else Expired(lock)


def test_a_program_that_was_stopped_for_long_looks_at_the_clock_before_it_gives_up(
    address: str,
) -> None:
    over = threading.Event()
    with ExternalEnvClient(address) as client:

        def beside() -> None:
            client.start_episode("beside")
            while not over.is_set():
                client.log_returns("beside", 1.0)

        def was_stopped() -> bool:
            payload, waiter = LogReturns(episode_id="e", reward=1.0), StoppedWaiter()
            outcome, _ = client._link.request(payload, encode(payload), 30.0, waiter)
            assert outcome == Logged()
            return waiter.own is not None and waiter.own.was_stopped

        with in_thread(beside):
            client.start_episode("e")
            try:
                while not was_stopped():
                    pass
            finally:
                over.set()


class Crowded:
    """A connection that has no room for messages while it is told so, and remembers the others."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.is_full = True
        self.sent: list[str] = []

    def send(self, frames: Any) -> None:
        if self.is_full:
            raise QueueFullError("no room")
        self._transport.send(frames)
        self.sent.append(decode_header(frames[0]).payload_type)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BrokenOff(threading.Event):
    """A lock for which nobody waits to the end: Ctrl-C comes when it is told so."""

    def acquire(self, *, timeout: float = -1.0) -> bool:
        if timeout >= 0.0:
            assert self.wait(60.0)
            raise KeyboardInterrupt
        return True

    def release(self) -> None:
        pass


class BrokenOffWaiter(link.Waiter):
    """Is broken off where it waits for who leads, once that thread has what is to be sent."""

    own: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.lock = BrokenOff()

    @property
    def bell(self) -> Any:
        return self.own

    @bell.setter
    def bell(self, lock: threading.Lock | None) -> None:
        self.own = None if lock is None else self.lock


def test_what_ctrl_c_broke_off_is_not_sent_later_by_another_thread(address: str) -> None:
    with ExternalEnvClient(address) as client:
        client.start_episode("e")
        client.start_episode("beside")
        own = client._link
        transport: Any = Crowded(own._transport)
        own._transport = transport
        waiter, observation = BrokenOffWaiter(), np.ones(1000)
        payload = LogAction(episode_id="e", observation=observation, action=1)
        before = [bytes(frame) for frame in encode(payload)]

        def is_taken() -> bool:
            return waiter.call is not None and waiter.call.sent

        def break_off() -> None:
            wait_until(is_taken, "who leads has taken it")
            waiter.lock.set()

        def is_forgotten() -> bool:
            assert waiter.call is not None
            return waiter.call.request_id not in own._conversation.calls

        with in_thread(lambda: client.get_action("beside", seen(2.0))):
            wait_until(lambda: own._leader is not None, "another thread leads")
            with in_thread(break_off), pytest.raises(KeyboardInterrupt):
                own.request(payload, encode(payload), 60.0, waiter)
            observation[:] = 7.0  # which is used again
            assert waiter.call is not None
            assert [bytes(frame) for frame in waiter.call.frames] == before
            wait_until(is_forgotten, "it is given up")
            transport.is_full = False
        client.log_returns("e", 1.0)
    assert transport.sent[:2] == ["GetAction", "LogReturns"]


def test_a_call_that_is_refused_leaves_nothing_with_the_client(address: str) -> None:
    with ExternalEnvClient(address) as client:
        client.start_episode("e")
        own = client._link
        refused_in_a_fork(ClosedError, lambda: client.log_returns("e", 1.0))
        assert select.select([own._bell.fileno()], [], [], 0.0)[0] == []
    with pytest.raises(ClosedError, match="was closed"):
        client.log_returns("e", 1.0)
    assert not own._broken_off


class WatchedWaiter(link.Waiter):
    """Weak references to it can be made."""


def test_what_was_sent_is_let_go_of_with_its_answer(address: str) -> None:
    gc.disable()  # as programs do that have to be quick
    try:
        with ExternalEnvClient(address) as client:
            client.start_episode("e")
            payload, waiter = LogReturns(episode_id="e", reward=1.0), WatchedWaiter()
            kept = weakref.ref(waiter)
            client._link.request(payload, encode(payload), 30.0, waiter)
            assert waiter.outcome == Logged()
            del waiter  # which has the call with all its frames
            assert kept() is None
    finally:
        gc.enable()


class Raced:
    """A lock that another thread releases between a look at it and what follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def locked(self) -> bool:
        is_locked = self._lock.locked()
        if is_locked:
            self._lock.release()
        return is_locked

    def release(self) -> None:
        self._lock.release()


def test_who_is_woken_by_two_threads_at_once_is_awake() -> None:
    waiter, bell = link.Waiter(), Raced()
    waiter.bell = cast("threading.Lock", bell)
    waiter.wake()
    waiter.wake()
    assert not bell.locked()


def test_what_takes_its_time_says_so_once() -> None:
    told, texts = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            told.set()

    listener = Listener()
    link.logger.addHandler(listener)
    try:
        with link.told_if_slow("it"):
            assert told.wait(60.0)
        with link.told_if_slow("it"):
            pass
    finally:
        link.logger.removeHandler(listener)
    assert [text[:2] for text in texts] == ["it"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_without_a_scheme_is_one_of_tcp(address: str, host: str) -> None:
    port = address.rpartition(":")[2]
    with ExternalEnvClient(f"{host}:{port}") as client:
        assert client.address == f"tcp://{host}:{port}"
        client.start_episode("e")
        assert client.get_action("e", seen(3)) == 3
    with pytest.raises(ClosedError):
        client.start_episode()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("", "tcp://127.0.0.1:5556"),
        ("nonsense", "tcp://127.0.0.1:5556"),
        ("127.0.0.1:port", "tcp://127.0.0.1:5556"),
        ("stream://127.0.0.1:5557", "a gateway's address, for clients in other languages"),
        ("wss://host:1", "a gateway's address, for clients in other languages"),
        ("http://host:1", "tcp://127.0.0.1:5556"),
    ],
)
def test_another_address_is_refused_with_what_to_write(address: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExternalEnvClient(address)
    assert told in str(caught.value)


def test_a_garbage_collection_may_close_a_client_at_any_line(address: str) -> None:
    client = ExternalEnvClient(address)
    finalizer = client._finalizer.peek()
    assert finalizer is not None
    shared: link.Link = finalizer[2][0]

    def collect() -> None:
        with shared._mutex:  # as where a client that nobody has any more is collected
            client._finalizer()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(30.0)
    assert not collecting.is_alive()
    with pytest.raises(ClosedError, match="was closed"):
        client.start_episode()
