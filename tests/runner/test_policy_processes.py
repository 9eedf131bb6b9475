from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from envbus.bus.errors import TransportError
from envbus.bus.nursery import ExitStatus, Nursery
from envbus.bus.pipe import Pipe
from envbus.bus.restart import Exit
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_door import door_of
from envbus.runner.policy_processes import MAX_UNDER_WAY, Member, Outfit, Pushes
from envbus.runner.policy_worker import BOOTSTRAP_PARCEL, PROBE, PolicyBootstrap, WorkerReport

UP = WorkerReport(up=True)


class NoProcess:
    """Stands for a child; the test is its process."""

    pid = 77

    def __init__(self) -> None:
        self.pipe, self.theirs = Pipe.pair()

    def say(self, report: WorkerReport) -> None:
        """Report, as its process does."""
        self.theirs.send_bytes(self.theirs.next_number(), msgspec.msgpack.encode(report))


class NoNursery:
    """Starts no processes."""

    def __init__(self) -> None:
        self.children: list[NoProcess] = []
        self.killed: list[Any] = []

    def start(self, name: str, entry: str, *, method: str | None) -> NoProcess:
        del name, entry, method
        self.children.append(NoProcess())
        return self.children[-1]

    def stacks(self, children: list[Any]) -> list[str]:
        return ["its stack" for _ in children]

    def kill(self, child: Any) -> None:
        self.killed.append(child)


@pytest.fixture
def nursery() -> Iterator[NoNursery]:
    nursery = NoNursery()
    yield nursery
    for child in nursery.children:
        child.pipe.close()
        child.theirs.close()


@pytest.fixture
def member(nursery: NoNursery, tmp_path: Path) -> Member:
    """Return one that was launched."""
    outfit = Outfit(
        method=None,
        batching=BatchingConfig(),
        factories={"default": b"pickled"},
        spinning=1,
        start_timeout=20.0,
        hang_timeout=10.0,
    )
    member = Member(2, outfit, cast("Nursery", nursery), tmp_path)
    member.launch([b"weights"], 0.0)
    return member


def test_a_life_is_given_all_that_it_must_know(nursery: NoNursery, member: Member) -> None:
    data = nursery.children[0].theirs.receive_bytes(BOOTSTRAP_PARCEL, 1.0)
    given = PolicyBootstrap(*pickle.loads(data))
    assert (given.name, given.worker_index, given.incarnation) == ("policy-worker-2", 2, 0)
    assert not given.spin  # the first one does
    assert given.weights == [b"weights"]
    assert Path(given.door).name == "policy-worker-2.0"
    assert member.entry().state == "starting"


def test_it_is_up_once_it_says_so(nursery: NoNursery, member: Member) -> None:
    assert member.take_reports(0.0) == []
    nursery.children[0].say(UP)
    assert member.take_reports(1.0) == [UP]
    assert member.entry().state == "up"
    assert member.wake_at() is not None


@pytest.mark.parametrize("life", [0, 1])
def test_one_that_does_not_come_up_is_killed(nursery: NoNursery, member: Member, life: int) -> None:
    for _ in range(life):  # also where the former one was up
        nursery.children[0].say(UP)
        member.take_reports(0.0)
        member.on_exit(ExitStatus(signal=9))
        member.launch([], 0.0)
    while not nursery.killed:
        wake_at = member.wake_at()
        assert wake_at is not None
        assert wake_at <= 30.0
        member.probe(wake_at)
    assert wake_at >= 20.0
    assert nursery.killed == [nursery.children[life]]
    assert member.exit is Exit.HANG
    assert "not up within 20 s (start_timeout)" in member.on_exit(ExitStatus(signal=9))


def test_why_it_did_not_come_up_is_how_it_ended(nursery: NoNursery, member: Member) -> None:
    nursery.children[0].say(WorkerReport(problem="ImportError: no torch"))
    nursery.children[0].theirs.close()
    member.take_reports(0.0)
    assert member.hung_up
    assert member.on_exit(ExitStatus(code=1)) == "ImportError: no torch"
    assert member.state == "lost"
    assert member.reason == ("policy-worker-2 (pid 77, incarnation 0) ended: ImportError: no torch")
    assert member.entry().reason == member.reason


def test_weights_that_were_not_taken_over_are_not_why_it_ended(
    nursery: NoNursery, member: Member
) -> None:
    nursery.children[0].say(UP)
    nursery.children[0].say(WorkerReport(problem="ValueError", policy_id="default", push=1))
    member.take_reports(0.0)
    assert member.on_exit(ExitStatus(signal=9)) == "signal SIGKILL"
    assert member.exit is Exit.CRASH


def test_one_that_gives_no_sign_of_life_is_killed_as_hung(
    nursery: NoNursery, member: Member
) -> None:
    (child,) = nursery.children
    child.say(UP)
    member.take_reports(0.0)
    member.probe(5.0)
    child.theirs.receive_bytes(BOOTSTRAP_PARCEL, 1.0)
    assert child.theirs.receive_bytes(BOOTSTRAP_PARCEL + 1, 1.0) == PROBE
    member.probe(10.0)
    assert not nursery.killed
    member.probe(15.0)
    assert nursery.killed == [child]
    assert member.exit is Exit.HANG
    assert "hang_timeout" in member.on_exit(ExitStatus(signal=9))


def test_one_that_answers_is_not_killed(nursery: NoNursery, member: Member) -> None:
    nursery.children[0].say(UP)
    member.take_reports(0.0)
    member.probe(5.0)
    nursery.children[0].say(WorkerReport())
    member.take_reports(14.0)
    member.probe(15.0)
    assert not nursery.killed


def test_a_new_life_knows_nothing_of_the_former_one(nursery: NoNursery, member: Member) -> None:
    nursery.children[0].say(UP)
    member.take_reports(0.0)
    door = door_of(member._directory, member.name, 0)
    door.touch()
    member.on_exit(ExitStatus(code=0))
    assert not door.exists()
    member.incarnation += 1
    member.launch([], 1.0)
    assert member.state == "starting"
    nursery.children[1].say(UP)
    assert member.take_reports(1.0) == [UP]


def test_one_that_has_ended_gets_no_weights_and_that_is_no_error(
    nursery: NoNursery, member: Member
) -> None:
    nursery.children[0].theirs.close()
    member.send(b"weights")
    with pytest.raises(TransportError):
        nursery.children[0].pipe.send_bytes(9, b"weights")


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
