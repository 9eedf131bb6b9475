"""`Client` through a standalone broker to workers, all over real sockets."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    EncodeError,
    NoPeerError,
    OverloadedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RequestTimeoutError,
)
from envbus.bus.peer.client import Client
from envbus.bus.peer.worker import PlainCodec
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind, Request
from tests.integration.bus_programs import (
    Ask,
    Name,
    Named,
    Note,
    RawPeer,
    RunningBroker,
    Wait,
    WaitTwice,
    hello_frames,
    kept_endpoint,
    worker,
)
from tests.integration.group_children import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(180)


class Unknown(Request[Named], frozen=True, kw_only=True):
    """Nobody answers it."""


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[Client]:
    with Client(broker.endpoint) as made:
        yield made


def result(future: Future[Any]) -> Any:
    return future.result(PATIENCE)


# --- asking ---------------------------------------------------------------------------------


def test_a_reply_comes_back_to_its_request(broker: RunningBroker, client: Client) -> None:
    with worker("w", broker.endpoint, capacity=100):
        futures = [client.ask("names", Ask(number=i), timeout=PATIENCE) for i in range(50)]
        assert [result(future).number for future in futures] == list(range(50))
        assert {result(future).name for future in futures} == {"w"}
    assert client.statistics().replies == 50
    assert client.statistics().pending_now == 0


def test_a_peer_can_be_asked_by_its_name(broker: RunningBroker, client: Client) -> None:
    with worker("a", broker.endpoint), worker("b", broker.endpoint):
        assert result(client.ask("b", Name(), timeout=PATIENCE)).name == "b"
        assert result(client.ask("a", Name(), timeout=PATIENCE)).name == "a"


def test_arrays_cross_both_ways(broker: RunningBroker, client: Client) -> None:
    array = np.arange(100_000, dtype=np.float32)
    with worker("w", broker.endpoint):
        reply = result(client.ask("names", Ask(data=array), timeout=PATIENCE))
    np.testing.assert_array_equal(reply.data, array)


def test_requests_of_one_thread_are_done_in_their_order(
    broker: RunningBroker, client: Client
) -> None:
    with worker("w", broker.endpoint, capacity=256) as served:

        def ask(first: int) -> None:
            futures = [client.ask("w", Ask(number=first + i), timeout=PATIENCE) for i in range(50)]
            for future in futures:
                result(future)

        threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for i in range(4):
            assert [n for n in served.taken if n // 1000 == i] == [1000 * i + k for k in range(50)]


def test_the_least_loaded_worker_gets_the_request(broker: RunningBroker, client: Client) -> None:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(f"w{i}", broker.endpoint, capacity=4)) for i in range(3)
        ]
        futures = [client.ask("names", Wait(), timeout=PATIENCE) for _ in range(6)]
        wait_until(lambda: broker.statistics().in_flight_now == 6, "all requests")
        for served in workers:
            served.go.set()
        assert Counter(result(future).name for future in futures) == {"w0": 2, "w1": 2, "w2": 2}


def test_what_nobody_offers_fails_at_once(client: Client) -> None:
    with pytest.raises(NoPeerError, match="nobody"):
        result(client.ask("nobody", Name(), timeout=1000.0))


def test_a_handlers_exception_fails_its_request_only(broker: RunningBroker, client: Client) -> None:
    with worker("w", broker.endpoint):
        with pytest.raises(RemoteError, match="no such number: -1") as caught:
            result(client.ask("names", Ask(number=-1), timeout=PATIENCE))
        assert caught.value.remote_type == "builtins.LookupError"
        assert "_answer" in caught.value.remote_traceback
        assert result(client.ask("names", Ask(number=2), timeout=PATIENCE)).number == 2


def test_a_request_that_a_worker_does_not_know_is_named(
    broker: RunningBroker, client: Client
) -> None:
    with worker("w", broker.endpoint):
        future = client.ask("w", Unknown(), timeout=PATIENCE)
        with pytest.raises(ProtocolError, match="w does not answer Unknown; it does: Ask, Name"):
            result(future)


def test_a_deadline_fails_the_request_and_its_late_reply_goes_nowhere(
    broker: RunningBroker, client: Client
) -> None:
    with worker("w", broker.endpoint, capacity=4) as served:
        with pytest.raises(RequestTimeoutError, match=r"Wait timed out after (1|0\.[1-9])"):
            result(client.ask("w", Wait(number=1), timeout=1.0))
        served.go.set()
        assert result(client.ask("w", Ask(number=2), timeout=PATIENCE)).number == 2
    assert broker.statistics().late_replies == 1
    assert client.statistics().timeouts == 1


def test_a_cancelled_future_is_forgotten_and_its_late_reply_dropped(
    broker: RunningBroker, client: Client
) -> None:
    with worker("w", broker.endpoint, capacity=4) as served:
        future = client.ask("w", Wait(number=1), timeout=PATIENCE)
        assert served.waiting.wait(PATIENCE)
        assert future.cancel()
        wait_until(lambda: client.statistics().pending_now == 0, "the place to be free")
        served.go.set()
        assert result(client.ask("w", Ask(number=2), timeout=PATIENCE)).number == 2
        with pytest.raises(CancelledError):
            result(future)
    assert client.statistics().cancelled == 1
    assert client.statistics().late_replies == 1


def test_too_many_requests_are_refused_at_once(broker: RunningBroker) -> None:
    with (
        worker("w", broker.endpoint, capacity=1) as served,
        Client(broker.endpoint, max_pending=3) as client,
    ):
        futures = [client.ask("w", Wait(), timeout=PATIENCE) for _ in range(3)]
        with pytest.raises(OverloadedError, match="max_pending"):
            client.ask("w", Wait(), timeout=PATIENCE)
        served.go.set()
        assert all(result(future) for future in futures)
        assert result(client.ask("w", Name(), timeout=PATIENCE)).name == "w"


def test_a_full_backlog_refuses_at_once() -> None:
    with (
        RunningBroker(max_backlog=2) as broker,
        worker("w", broker.endpoint, capacity=1) as served,
        Client(broker.endpoint) as client,
    ):
        futures = [client.ask("names", Wait(number=i), timeout=PATIENCE) for i in range(5)]
        refused = [future for future in futures[3:] if _is_overloaded(future)]
        assert len(refused) == 2
        served.go.set()
        assert [result(future).number for future in futures[:3]] == [0, 1, 2]


def _is_overloaded(future: Future[Any]) -> bool:
    return isinstance(future.exception(PATIENCE), OverloadedError)


def test_what_cannot_cross_is_refused_before_it_is_sent(client: Client) -> None:
    with pytest.raises(EncodeError, match="data"):
        client.ask("w", Ask(data=object()), timeout=PATIENCE)
    for timeout in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="timeout"):
            client.ask("w", Name(), timeout=timeout)
    with pytest.raises(ConfigError, match="name"):
        client.ask("", Name(), timeout=1.0)
    assert client.statistics().asked == 0


def test_a_message_larger_than_the_broker_takes_is_refused_with_both_sizes() -> None:
    with (
        RunningBroker(max_message_bytes=10_000) as broker,
        Client(broker.endpoint) as client,
        pytest.raises(EncodeError, match=r"Ask has \d+ bytes; the broker takes at most 10000"),
    ):
        client.ask("w", Ask(data=np.zeros(10_000)), timeout=PATIENCE)


def test_a_notice_reaches_its_peer(broker: RunningBroker, client: Client) -> None:
    with RawPeer(broker.endpoint, b"listener") as raw:
        raw.send(*hello_frames("listener"))
        raw.receive()
        client.tell("listener", Note(number=7))
        client.tell("nobody", Note(number=8))
        assert b"Note" in raw.receive()[0]
        wait_until(lambda: broker.statistics().dropped_notices == 1, "the notice to nobody")
    assert client.statistics().told == 2


def test_a_failure_that_cannot_be_read_fails_its_request_only(broker: RunningBroker) -> None:
    with RawPeer(broker.endpoint, b"odd") as odd, Client(broker.endpoint) as client:
        odd.send(*hello_frames("odd", heartbeat=30.0, services=["odd"], capacity=8))
        assert decode_header(odd.receive()[0]).payload_type == "Welcome"
        for junk in ([], [b"junk"], [b"\x81\xa1a" + b"\x91" * 100_000]):
            future = client.ask("odd", Ask(), timeout=PATIENCE)
            number = decode_header(odd.receive()[0]).request_id
            head = Header(PROTOCOL_VERSION, Kind.FAILURE, number, "Failed")
            odd.send(encode_header(head), *junk)
            with pytest.raises(ProtocolError, match="Ask failed; the failure is unreadable"):
                result(future)
        with worker("w", broker.endpoint):
            assert result(client.ask("w", Ask(number=2), timeout=PATIENCE)).number == 2


class Picky(PlainCodec):
    """A caller's own codec, which has a defect that some replies reach."""

    def decode(self, payload_type: Any, frames: Any) -> Any:
        payload = super().decode(payload_type, frames)
        if getattr(payload, "number", 0) == 13:
            raise ZeroDivisionError("a defect of the codec")
        return payload


def test_what_a_callers_codec_raises_fails_its_request_only(broker: RunningBroker) -> None:
    with worker("w", broker.endpoint), Client(broker.endpoint, codec=Picky()) as client:
        with pytest.raises(ZeroDivisionError, match="of the codec"):
            result(client.ask("w", Ask(number=13), timeout=PATIENCE))
        assert result(client.ask("w", Ask(number=2), timeout=PATIENCE)).number == 2


def test_a_client_answers_no_requests(broker: RunningBroker, client: Client) -> None:
    with (
        Client(broker.endpoint) as other,
        pytest.raises(ProtocolError, match="answers no requests"),
    ):
        result(other.ask(client.name, Name(), timeout=PATIENCE))


def test_a_callback_that_exits_ends_no_other_request(client: Client) -> None:
    asked = [client.ask("nobody", Name(), timeout=PATIENCE) for _ in range(3)]
    for future in asked:
        with suppress(SystemExit):  # where it is answered already, which calls it here
            future.add_done_callback(lambda _: sys.exit(3))
    done, _ = wait(asked, PATIENCE)
    assert done == set(asked)
    assert isinstance(
        client.ask("nobody", Name(), timeout=PATIENCE).exception(PATIENCE), NoPeerError
    )


def test_a_callback_may_ask_again(broker: RunningBroker, client: Client) -> None:
    done: Future[str] = Future()
    with worker("w", broker.endpoint):

        def again(_: Future[Any]) -> None:
            client.ask("w", Name(), timeout=PATIENCE).add_done_callback(
                lambda future: done.set_result(future.result().name)
            )

        client.ask("w", Name(), timeout=PATIENCE).add_done_callback(again)
        assert result(done) == "w"


# --- deaths ---------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[ProcessGroup]:
    with ProcessGroup() as made:
        yield made
        made.close(0.0)


def start_worker(process_group: ProcessGroup, broker: RunningBroker, name: str) -> Child:
    child = process_group.start(name, "tests.integration.bus_programs:serve_in_process")
    child.pipe.send_bytes(1, f"{broker.endpoint} {name}".encode())
    return child


def test_a_worker_that_dies_fails_what_it_held(
    broker: RunningBroker, client: Client, process_group: ProcessGroup
) -> None:
    child = start_worker(process_group, broker, "w")
    wait_until(lambda: broker.statistics().ready_peers_now == 2, "the worker's hello")
    future = client.ask("names", Wait(), timeout=PATIENCE)
    assert child.pipe.receive_bytes(1, PATIENCE) == b"waiting"
    process_group.kill(child)
    with pytest.raises(PeerLostError, match=r"w.*lease"):
        result(future)
    assert client.statistics().resent == 0


def test_an_idempotent_request_is_asked_once_more(
    broker: RunningBroker, client: Client, process_group: ProcessGroup
) -> None:
    children = {name: start_worker(process_group, broker, name) for name in ("w1", "w2")}
    wait_until(lambda: broker.statistics().ready_peers_now == 3, "the workers' hellos")
    future = client.ask("names", WaitTwice(), timeout=PATIENCE)
    assert children["w1"].pipe.receive_bytes(1, PATIENCE) == b"waiting"
    process_group.kill(children["w1"])
    assert children["w2"].pipe.receive_bytes(1, PATIENCE) == b"waiting"
    assert client.statistics().resent == 1
    process_group.kill(children["w2"])
    with pytest.raises(PeerLostError, match="w2"):
        result(future)


def test_a_worker_leaves_when_it_was_given_up() -> None:
    first = RunningBroker(kept_endpoint())
    with (
        Client(first.endpoint) as client,
        worker("w", first.endpoint, heartbeat=0.4) as served,
    ):
        assert result(client.ask("w", Name(), timeout=PATIENCE)).name == "w"
        first.stop()
        with RunningBroker(first.endpoint):
            wait_until(lambda: not served.is_running, "its end")


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_when_the_broker_is_started_again_a_client_joins_it(scheme: str, tmp_path: Path) -> None:
    first = RunningBroker(kept_endpoint() if scheme == "tcp" else f"ipc://{tmp_path}/bus")
    with (
        Client(first.endpoint, heartbeat=0.5) as client,
        worker("w", first.endpoint, heartbeat=0.4, capacity=4) as served,
    ):
        lost = client.ask("w", Wait(number=1), timeout=PATIENCE)
        assert served.waiting.wait(PATIENCE)
        first.stop()
        with RunningBroker(first.endpoint) as second:
            with pytest.raises(PeerLostError, match="started again"):
                result(lost)
            served.go.set()
            with worker("v", first.endpoint, capacity=8):
                wait_until(lambda: second.statistics().ready_peers_now == 2, "both hellos")
                replies = [client.ask("v", Ask(number=i), timeout=PATIENCE) for i in range(5)]
                assert [result(future).number for future in replies] == list(range(5))
    assert client.statistics().rejoined >= 1


def test_what_is_asked_while_the_broker_is_away_is_sent_when_it_is_back() -> None:
    first = RunningBroker(kept_endpoint())
    with Client(first.endpoint, heartbeat=0.2) as client:
        first.stop()
        wait_until(lambda: not client._loop.session.ready, "the client to notice")
        future = client.ask("w", Name(), timeout=PATIENCE)
        short = client.ask("w", Name(), timeout=0.05)
        with pytest.raises(RequestTimeoutError):
            result(short)
        with RunningBroker(first.endpoint), pytest.raises(NoPeerError):
            result(future)


# --- joining and leaving --------------------------------------------------------------------


def test_what_ended_while_the_broker_is_away_is_kept_no_more() -> None:
    kept: list[weakref.ref[Any]] = []

    def ask() -> Future[Named]:
        array = np.zeros(10_000)  # sent without a copy, and kept as long as its message
        kept.append(weakref.ref(array))
        return client.ask("names", Ask(data=array), timeout=PATIENCE)

    first = RunningBroker()
    with Client(first.endpoint, max_pending=10) as client:
        first.stop()
        wait_until(lambda: not client._loop.session.ready, "the client to notice")
        for _ in range(20):
            assert all([future.cancel() for future in [ask() for _ in range(10)]])
            wait_until(lambda: client.statistics().pending_now == 0, "they are forgotten")
        assert client.statistics().cancelled == 200
        assert sum(ref() is not None for ref in kept) <= 10


def test_what_was_answered_is_kept_no_more(broker: RunningBroker, client: Client) -> None:
    def ask() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        array = np.zeros(10_000)  # sent without a copy
        future = client.ask("w", Ask(data=array), timeout=PATIENCE)
        result(future)
        return weakref.ref(array), weakref.ref(future)

    with worker("w", broker.endpoint):
        request, reply = ask()
        wait_until(lambda: request() is None and reply() is None, "they are let go of")


def test_no_broker_is_said_within_the_time_out() -> None:
    with pytest.raises(RequestTimeoutError, match="is it running"):
        Client("tcp://127.0.0.1:9", timeout=0.3)


def test_a_malformed_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="not understood"):
        Client("nonsense://x", timeout=PATIENCE)
    with pytest.raises(ConfigError, match="heartbeat"):
        Client("tcp://127.0.0.1:9", heartbeat=0)
    with pytest.raises(ConfigError, match="max_pending"):
        Client("tcp://127.0.0.1:9", max_pending=0)


def test_a_taken_name_is_refused(broker: RunningBroker) -> None:
    with (
        Client(broker.endpoint, name="me"),
        pytest.raises(ProtocolError, match="name 'me' is taken"),
    ):
        Client(broker.endpoint, name="me")


def test_a_client_that_goes_silent_is_forgotten(broker: RunningBroker) -> None:
    client = Client(broker.endpoint, heartbeat=0.5)
    assert broker.statistics().ready_peers_now == 1
    client.close()
    wait_until(lambda: broker.statistics().ready_peers_now == 0, "the end of its lease")


def test_close_fails_what_is_unsettled_and_refuses_the_rest(broker: RunningBroker) -> None:
    with worker("w", broker.endpoint):
        client = Client(broker.endpoint)
        future = client.ask("w", Wait(), timeout=PATIENCE)
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            result(future)
        with pytest.raises(ClosedError):
            client.ask("w", Name(), timeout=1.0)
        with pytest.raises(ClosedError):
            client.tell("w", Note(number=1))
        assert "closed" in repr(client)


def test_close_while_others_ask_leaves_nobody_waiting(broker: RunningBroker) -> None:
    client = Client(broker.endpoint)
    futures: list[Future[Any]] = []

    def ask() -> None:
        while True:
            try:
                futures.append(client.ask("w", Name(), timeout=PATIENCE))
            except (ClosedError, OverloadedError) as error:
                if isinstance(error, ClosedError):
                    return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(futures) > 100, "some requests")
    client.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wait(futures, PATIENCE).not_done


def test_a_dropped_client_ends_its_thread(broker: RunningBroker) -> None:
    client = Client(broker.endpoint)
    thread = client._loop._thread
    del client
    gc.collect()
    wait_until(lambda: not thread.is_alive(), "the end of its thread")


def test_a_forked_copy_refuses_and_harms_nobody(broker: RunningBroker, client: Client) -> None:
    if not (child := os.fork()):
        status = 1
        try:
            client.ask("w", Name(), timeout=1.0)
        except ClosedError:
            client.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(NoPeerError):
        result(client.ask("w", Name(), timeout=PATIENCE))


def test_a_program_that_closes_nothing_ends_quietly(broker: RunningBroker) -> None:
    program = f"from envbus.bus.peer.client import Client; kept = Client({broker.endpoint!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_memory_stays_flat_over_many_requests(broker: RunningBroker, client: Client) -> None:
    with worker("w", broker.endpoint, capacity=256):
        for _ in range(20):
            for future in [client.ask("w", Name(), timeout=PATIENCE) for _ in range(200)]:
                result(future)
    assert not client._loop.session.calls
