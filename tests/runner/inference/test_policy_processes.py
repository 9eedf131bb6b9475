from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from envbus.bus.errors import TransportError
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.process_group import ProcessGroup
from envbus.bus.supervision.liveness_probe import PROBE
from envbus.bus.supervision.restart import Exit
from envbus.runner.inference.policy_batching import BatchingConfig
from envbus.runner.inference.policy_processes import (
    MAX_UNDER_WAY,
    PolicyWorkerHandle,
    Pushes,
    WorkerSpec,
)
from envbus.runner.inference.policy_worker import (
    PolicyBootstrap,
    WorkerReport,
)
from envbus.runner.inference.worker_discovery import handover_path
from tests.descriptors import no_more_files

UP = WorkerReport(up=True)


class NoProcess:
    """Stands for a child; the test is its process."""

    pid = 77

    def __init__(self) -> None:
        self.pipe, self.theirs = Pipe.pair()

    def say(self, report: WorkerReport) -> None:
        """Report, as its process does."""
        self.theirs.send(msgspec.msgpack.encode(report))


class NoProcessGroup:
    """Starts no processes."""

    def __init__(self) -> None:
        self.children: list[NoProcess] = []
        self.killed: list[Any] = []

    def start(self, name: str, entry: str, *, method: str | None, timeout: float) -> NoProcess:
        del name, entry, method, timeout
        self.children.append(NoProcess())
        return self.children[-1]

    def stacks(self, children: list[Any]) -> list[str]:
        return ["its stack" for _ in children]

    def kill(self, child: Any) -> None:
        self.killed.append(child)


@pytest.fixture
def process_group() -> Iterator[NoProcessGroup]:
    process_group = NoProcessGroup()
    yield process_group
    for child in process_group.children:
        child.pipe.close()
        child.theirs.close()


@pytest.fixture
def worker(process_group: NoProcessGroup, tmp_path: Path) -> PolicyWorkerHandle:
    """Return one that was launched."""
    spec = WorkerSpec(
        method=None,
        batching=BatchingConfig(max_batch=256, max_wait=0.0, max_rows_waiting=65536),
        factories={"default_policy": b"pickled"},
        spinning=1,
        start_timeout=20.0,
        hang_timeout=10.0,
    )
    worker = PolicyWorkerHandle(2, spec, cast("ProcessGroup", process_group), tmp_path)
    worker.launch([b"weights"], 0.0)
    return worker


def test_a_life_is_given_all_that_it_must_know(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    data = process_group.children[0].theirs.receive(1.0)
    given = PolicyBootstrap(*pickle.loads(data))
    assert (given.name, given.worker_index, given.incarnation) == ("policy-worker-2", 2, 0)
    assert not given.spin  # the first one does
    assert given.weights == [b"weights"]
    assert Path(given.handover_socket).name == "policy-worker-2.0"
    assert worker.entry().state == "starting"


def test_it_is_up_once_it_says_so(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    assert worker.take_reports(0.0) == []
    process_group.children[0].say(UP)
    assert worker.take_reports(1.0) == [UP]
    assert worker.entry().state == "up"
    assert worker.wake_at() is not None


@pytest.mark.parametrize("life", [0, 1])
def test_one_that_does_not_come_up_is_killed(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle, life: int
) -> None:
    for _ in range(life):  # also where the former one was up
        process_group.children[0].say(UP)
        worker.take_reports(0.0)
        worker.on_exit(ExitStatus(signal=9))
        worker.launch([], 0.0)
    while not process_group.killed:
        wake_at = worker.wake_at()
        assert wake_at is not None
        assert wake_at <= 30.0
        worker.probe(wake_at)
    assert wake_at >= 20.0
    assert process_group.killed == [process_group.children[life]]
    assert worker.exit is Exit.HANG
    assert "not up within 20 s (start_timeout)" in worker.on_exit(ExitStatus(signal=9))


def test_why_it_did_not_come_up_is_how_it_ended(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    process_group.children[0].say(WorkerReport(problem="ImportError: no torch"))
    process_group.children[0].theirs.close()
    worker.take_reports(0.0)
    assert worker.hung_up
    assert worker.on_exit(ExitStatus(code=1)) == "ImportError: no torch"
    worker.drop()
    assert worker.state == "lost"
    assert worker.reason == ("policy-worker-2 (pid 77, incarnation 0) ended: ImportError: no torch")
    assert worker.entry().reason == worker.reason


def test_weights_that_were_not_taken_over_are_not_why_it_ended(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    process_group.children[0].say(UP)
    process_group.children[0].say(
        WorkerReport(problem="ValueError", policy_id="default_policy", push=1)
    )
    worker.take_reports(0.0)
    assert worker.on_exit(ExitStatus(signal=9)) == "signal SIGKILL"
    assert worker.exit is Exit.CRASH


def test_one_that_gives_no_sign_of_life_is_killed_as_hung(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    (child,) = process_group.children
    child.say(UP)
    worker.take_reports(0.0)
    worker.probe(5.0)
    child.theirs.receive(1.0)
    assert child.theirs.receive(1.0) == PROBE
    worker.probe(10.0)
    assert not process_group.killed
    worker.probe(15.0)
    assert process_group.killed == [child]
    assert worker.exit is Exit.HANG
    assert "hang_timeout" in worker.on_exit(ExitStatus(signal=9))


def test_one_that_answers_is_not_killed(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    process_group.children[0].say(UP)
    worker.take_reports(0.0)
    worker.probe(5.0)
    process_group.children[0].say(WorkerReport())
    worker.take_reports(14.0)
    worker.probe(15.0)
    assert not process_group.killed


def test_one_that_is_up_is_asked_for_a_socket_that_is_gone_and_again_once_it_has_answered(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    child = process_group.children[0]
    child.theirs.receive(1.0)
    worker.keep_socket()  # it is not up yet
    child.say(UP)
    worker.take_reports(0.0)
    for _ in range(2):
        for _ in range(3):
            worker.keep_socket()
        assert child.theirs.receive(1.0) == PROBE
        assert not child.theirs.has(child.theirs.next_expected)
        child.say(WorkerReport())
        worker.take_reports(0.0)
    handover_path(worker._directory, worker.name, 0).touch()
    worker.keep_socket()
    assert not child.theirs.has(child.theirs.next_expected)


def test_a_new_life_knows_nothing_of_the_former_one(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    process_group.children[0].say(UP)
    worker.take_reports(0.0)
    handover_socket = handover_path(worker._directory, worker.name, 0)
    handover_socket.touch()
    worker.on_exit(ExitStatus(code=0))
    assert not handover_socket.exists()
    worker.incarnation += 1
    worker.launch([], 1.0)
    assert worker.state == "starting"
    process_group.children[1].say(UP)
    assert worker.take_reports(1.0) == [UP]


def test_one_that_has_ended_gets_no_weights_and_that_is_no_error(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    process_group.children[0].theirs.close()
    worker.send(b"weights")
    with pytest.raises(TransportError):
        process_group.children[0].pipe.send_bytes(9, b"weights")


def test_one_that_weights_are_lost_on_their_way_to_is_killed(
    process_group: NoProcessGroup, worker: PolicyWorkerHandle
) -> None:
    """Behind a passed descriptor that never comes it would take no other one, for good."""
    with no_more_files():
        worker.send(b"weights" * 1000)
    assert process_group.killed == process_group.children
    assert "too many open files" in worker.on_exit(ExitStatus(signal=9)).lower()
    assert worker.exit is Exit.CRASH


def test_a_worker_that_does_not_look_gets_the_latest_weights_once_it_does() -> None:
    pushes = Pushes()
    assert all(pushes.offer("a") for _ in range(MAX_UNDER_WAY))
    assert not pushes.offer("a")
    assert not pushes.offer("b")
    assert not pushes.offer("a")
    assert pushes.taken() == ["a"]
    assert pushes.taken() == ["b"]
    assert pushes.taken() == []
    assert pushes.offer("a")
