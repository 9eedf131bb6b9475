from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from envbus.bus.errors import StartError
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.wire.messages import Failed, FailureCode
from envbus.runner.errors import FaultCause
from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.lifecycle import Lifecycle, MemoryWatch
from envbus.runner.workers.recycling import RecycleAfter
from envbus.runner.workers.worker import (
    Actor,
    ActorState,
    Gone,
    Lost,
    Ready,
    WorkerEvent,
    share_out,
)

KILLED = ExitStatus(signal=9)
ONCE = RestartPolicy(max_restarts=1, window=60.0, jitter=0.0)


class Process:
    """A child that has ended, or runs."""

    def __init__(self, exit_status: ExitStatus | None) -> None:
        self.pid = 7
        self.exit_status = exit_status


class Machine:
    """Connections, process group, broker and startup in one: notes what it is told to do."""

    def __init__(self) -> None:
        self.process_group = self.broker = self
        self.children: Sequence[Any] = ()
        self.did: list[tuple[str, object]] = []
        self.is_full = False
        self.broken_off: BaseException | None = None

    def exits(self) -> None:
        if self.is_full:
            raise StartError("no descriptor")

    def wake_at(self) -> float | None:
        return None

    def kill(self, whom: object, *_why: object) -> None:
        self.did.append(("kill", whom))

    def shut_down(self, identity: bytes) -> None:
        self.did.append(("shut down", identity))

    def peer_gone(self, identity: bytes, reason: str) -> None:
        self.did.append(("gone", reason))

    def start(self, actor: Actor) -> None:
        if self.is_full:
            raise StartError("no memory")
        if self.broken_off is not None:
            actor.child = self.children[0]
            error, self.broken_off = self.broken_off, None
            raise error
        self.did.append(("start", actor.incarnation))
        actor.state = ActorState.STARTING


class Scene:
    def __init__(self, **config: Any) -> None:
        self.machine: Any = Machine()
        self.events: list[WorkerEvent] = []
        self.actors = share_out(["a", "b"], 2, remote=0, shared=True)
        self.lifecycle = Lifecycle(
            self.actors, self.machine, self.machine.start, FleetConfig(**config), self.events
        )
        self.actor = self.actors[0]
        for actor in self.actors:
            actor.state = ActorState.READY
            self.lifecycle.on_ready(actor)

    def end(self, reason: str) -> None:
        self.lifecycle.on_exit(self.actor, reason, KILLED, 0.0)


def test_without_restart_an_actor_that_ends_is_lost_and_told_once() -> None:
    scene = Scene()
    scene.end("it died")
    assert scene.actor.state is ActorState.LOST
    assert scene.events == [Gone(scene.actor, "it died", FaultCause.CRASH, 0)]
    assert not scene.machine.did


def test_with_restart_it_starts_again_and_is_told_when_it_runs() -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    assert scene.machine.did == [("start", 1)]
    assert scene.events == [Gone(scene.actor, "it died", FaultCause.CRASH, 0)]
    scene.actor.state = ActorState.READY
    scene.lifecycle.on_ready(scene.actor)
    assert scene.events[1:] == [Ready(scene.actor)]
    assert scene.lifecycle.restarts == 1


def test_an_end_that_comes_again_as_a_log_handler_has_raised_is_told_once() -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ZeroDivisionError

    scene, handler = Scene(restart=ONCE), Failing()
    logger = logging.getLogger("envbus.runner.workers.fleet")
    logger.addHandler(handler)
    try:
        with pytest.raises(ZeroDivisionError):
            scene.end("it died")
    finally:
        logger.removeHandler(handler)
    scene.end("it died")
    assert scene.machine.did == [("start", 1)]
    assert scene.events == [Gone(scene.actor, "it died", FaultCause.CRASH, 0)]


def test_its_ends_are_logged_with_its_name_and_their_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    scene.end("it died")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    for record in caplog.records:
        assert vars(record).items() >= {"actor": "actor-0", "cause": "crash"}.items()


def test_its_last_end_is_told_once_with_the_number_of_restarts() -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    scene.events.clear()
    scene.end("it died")
    assert scene.actor.state is ActorState.LOST
    [gone] = scene.events
    assert isinstance(gone, Gone)
    assert "failed again after 1 restarts" in gone.reason


def test_its_last_end_says_why_it_was_killed_in_one_line() -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    scene.events.clear()
    scene.actor.kill_reason = (FaultCause.MEMORY, "it used 300 MiB\nStack of it")
    scene.end("it was killed")
    [gone] = scene.events
    assert isinstance(gone, Gone)
    assert gone.reason.endswith(": it used 300 MiB")


def test_one_that_is_started_again_and_says_nothing_is_killed_once() -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    assert 0.0 < scene.lifecycle.until_due(3600.0) <= 300.0
    scene.lifecycle.tick(0.0)
    scene.lifecycle.tick(1e12)  # the driver may have been away
    assert ("kill", scene.actor) not in scene.machine.did
    scene.lifecycle.tick(1e12 + 1.0)
    scene.lifecycle.tick(1e12 + 2.0)
    assert scene.machine.did.count(("kill", scene.actor)) == 1


def test_one_that_says_hello_after_its_start_is_not_killed() -> None:
    scene = Scene(restart=ONCE)
    scene.end("it died")
    scene.lifecycle.tick(1e12)
    scene.actor.state = ActorState.BUILDING
    scene.lifecycle.tick(1e12 + 1.0)
    assert scene.machine.did == [("start", 1)]
    assert scene.lifecycle.until_due(3600.0) == 3600.0


def test_a_start_that_fails_counts_as_an_end() -> None:
    scene = Scene(restart=ONCE)
    scene.machine.is_full = True
    scene.end("it died")
    assert scene.actor.state is ActorState.LOST
    assert scene.actor.child is None
    [gone] = scene.events
    assert isinstance(gone, Gone)
    assert "no memory" in gone.reason


def test_a_start_that_ctrl_c_breaks_off_is_a_failed_one_and_others_are_started_first() -> None:
    scene = Scene(restart=RestartPolicy(backoff=0.0, max_backoff=0.0))
    child: Any = Process(None)
    scene.machine.children = [child]
    scene.machine.broken_off = KeyboardInterrupt()
    scene.end("it died")
    scene.lifecycle.on_exit(scene.actors[1], "it died, too", KILLED, 0.0)
    assert scene.actors[1].state is ActorState.STARTING
    assert ("kill", child) in scene.machine.did
    assert scene.actor.child is None
    with pytest.raises(KeyboardInterrupt):
        scene.lifecycle.tick(1e12)
    assert scene.actor.state is ActorState.STARTING  # once more
    scene.lifecycle.tick(1e12)
    assert [gone.reason for gone in scene.events if isinstance(gone, Gone)] == [
        "it died",
        "actor-0 was not started again: KeyboardInterrupt",
        "it died, too",
    ]


def test_starts_that_fail_for_ever_without_a_pause_leave_the_caller_to_go_on() -> None:
    scene = Scene(restart=RestartPolicy.always(backoff=0.0, max_backoff=0.0))
    scene.machine.is_full = True
    scene.end("it died")
    assert scene.actor.state is ActorState.DOWN
    for _ in range(3):
        scene.lifecycle.tick(1e12)
    assert len(scene.events) == 5
    scene.machine.is_full = False
    scene.lifecycle.tick(1e12)
    assert scene.machine.did[-1] == ("start", 5)


def test_a_recycled_actor_is_no_event_until_the_fresh_one_runs() -> None:
    scene = Scene(recycle_after=RecycleAfter(episodes=1))
    assert scene.lifecycle.recycling is not None
    scene.lifecycle.recycling.count(0, 1, 1)
    assert scene.lifecycle.recycling.turn(math.inf) == 0
    scene.lifecycle.recycle(scene.actor)
    assert scene.machine.did == [("shut down", b"")]
    assert scene.actor.state is ActorState.LEAVING
    scene.end("it left")
    assert scene.events == []
    assert scene.machine.did[1:] == [("start", 1)]
    assert (scene.lifecycle.recycled, scene.lifecycle.restarts) == (1, 0)
    scene.lifecycle.on_ready(scene.actor)
    assert scene.events == [Ready(scene.actor)]


def test_one_that_does_not_leave_is_killed_once() -> None:
    scene = Scene(recycle_after=RecycleAfter(episodes=1))
    child: Any = Process(None)
    scene.actor.child = child
    assert scene.lifecycle.recycling is not None
    scene.lifecycle.recycling.count(0, 1, 1)
    scene.lifecycle.recycling.turn(math.inf)
    scene.lifecycle.recycle(scene.actor)
    assert 0.0 < scene.lifecycle.until_due(3600.0) <= FleetConfig().timeouts.close
    scene.lifecycle.tick(0.0)
    assert ("kill", child) not in scene.machine.did
    scene.lifecycle.tick(1e12)
    scene.lifecycle.tick(1e12)
    assert scene.machine.did.count(("kill", child)) == 1


@pytest.mark.parametrize("timeout", [0.0, 1.5, 3600.0])
def test_nothing_is_due_where_nothing_is_watched(timeout: float) -> None:
    assert Scene().lifecycle.until_due(timeout) == timeout


def test_who_ended_while_the_driver_was_away_was_not_late() -> None:
    scene = Scene()
    child: Any = Process(KILLED)
    scene.actor.child = child
    late = Failed(code=FailureCode.TIMEOUT, message="late")
    told = scene.lifecycle.explain(
        [Lost(scene.actors[1], "slow", late, 0), Lost(scene.actor, "dead", late, 0)], {}
    )
    assert [lost.tag for lost in told] == ["dead", "slow"]
    assert [lost.failed.code for lost in told] == [FailureCode.PEER_LOST, FailureCode.TIMEOUT]
    assert "signal SIGKILL" in told[0].failed.message
    assert told[1].failed.message.startswith("late\nNo stack of actor-1")


def test_who_was_late_is_told_though_the_fork_server_is_gone_and_cannot_be_replaced() -> None:
    scene = Scene()
    scene.machine.is_full = True
    late = Failed(code=FailureCode.TIMEOUT, message="late")
    (told,) = scene.lifecycle.explain([Lost(scene.actor, "slow", late, 0)], {})
    assert told.tag == "slow"


def test_a_remote_actor_that_has_left_was_not_late_either() -> None:
    scene = Scene()
    scene.actor.remote, scene.actor.identity = True, b"peer"
    late = Failed(code=FailureCode.TIMEOUT, message="late")
    (told,) = scene.lifecycle.explain([Lost(scene.actor, "gone", late, 0)], {b"peer": "its lease"})
    assert told.failed.code is FailureCode.PEER_LOST
    assert "left: its lease" in told.failed.message


def actor_of(pid: int | None, state: ActorState) -> Actor:
    actor = Actor(0, [None], 0, remote=pid is None, shared=True)
    child: Any = SimpleNamespace(pid=pid)
    actor.child = None if pid is None else child
    actor.state = state
    return actor


class Scales:
    """A clock, and processes of 3 MiB that take a while to look at."""

    def __init__(self, cost: float) -> None:
        self.now = 100.0
        self.cost = cost

    def clock(self) -> float:
        return self.now

    def measure(self, pids: Iterable[int]) -> dict[int, int]:
        self.now += self.cost
        return dict.fromkeys(pids, 3 * 2**20)


def test_those_that_run_here_are_looked_at() -> None:
    machine = Scales(0.0)
    watch = MemoryWatch(machine.measure, machine.clock)
    actors = [
        actor_of(11, ActorState.READY),
        actor_of(12, ActorState.DOWN),
        actor_of(13, ActorState.LOST),
        actor_of(14, ActorState.STARTING),
        actor_of(None, ActorState.READY),
    ]
    seen = watch.look(actors)
    assert [(actor.child and actor.child.pid, size) for actor, size in seen] == [
        (11, 3.0),
        (14, 3.0),
    ]


@pytest.mark.parametrize(("cost", "pause"), [(0.001, 1.0), (0.01, 1.0), (0.2, 20.0)])
def test_looking_takes_a_hundredth_of_the_time_at_most(cost: float, pause: float) -> None:
    machine = Scales(cost)
    watch = MemoryWatch(machine.measure, machine.clock)
    assert watch.look_at == 100.0
    watch.look([actor_of(11, ActorState.READY)])
    assert watch.look_at == pytest.approx(100.0 + cost + pause)
