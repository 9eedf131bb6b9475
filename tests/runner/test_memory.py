from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from envbus.runner.actor import Actor, ActorState
from envbus.runner.memory import MemoryWatch


def actor_of(pid: int | None, state: ActorState) -> Actor:
    actor = Actor(0, [None], 0, remote=pid is None, shared=True)
    child: Any = SimpleNamespace(pid=pid)
    actor.child = None if pid is None else child
    actor.state = state
    return actor


class Machine:
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
    machine = Machine(0.0)
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
    machine = Machine(cost)
    watch = MemoryWatch(machine.measure, machine.clock)
    assert watch.look_at == 100.0
    watch.look([actor_of(11, ActorState.READY)])
    assert watch.look_at == pytest.approx(100.0 + cost + pause)
