"""Runs as an observer sees them, made by hand, and one that hangs, for tests of what shows them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from gymnasium.error import NoAsyncCallError

import envbus
from envbus.runner.monitoring.figures import PartFigures, ProcessFigures, RunFigures
from envbus.runner.monitoring.observer import ObservedRun
from tests.envs import HangingEnv

PART = "ActorPool-1"


@contextlib.contextmanager
def hanging_envs() -> Iterator[envbus.BusVectorEnv]:
    """Yield two actors of an env each, in their fourth step, in which the second one hangs."""

    def fine() -> HangingEnv:
        return HangingEnv(after=10_000, length=10_000)

    def hangs() -> HangingEnv:
        return HangingEnv(after=3, length=10_000)

    nothing = np.zeros(2, int)
    with envbus.BusVectorEnv([fine, hangs], num_actors=2, restart=True) as envs:
        envs.reset()
        for _ in range(3):
            envs.step(nothing)
        envs.step_async(nothing)
        yield envs
        with contextlib.suppress(NoAsyncCallError):  # the test has waited for it
            os.kill(envs.actor_pids()[1], signal.SIGKILL)
            envs.step_wait()


def actor(index: int, **fields: Any) -> ProcessFigures:
    """Return an actor with two envs."""
    usual = ProcessFigures(
        name=f"actor-{index}",
        pid=1000 + index,
        state="ready",
        envs=(2 * index, 2 * index + 2),
    )
    return msgspec.structs.replace(usual, **fields)


def figures(*processes: ProcessFigures, pid: int = 7, **fields: Any) -> RunFigures:
    """Return the figures of a run whose only part has these processes."""
    part = PartFigures(
        name=PART,
        kind="ActorPool",
        levels={"envs": 2.0 * len(processes)},
        processes=list(processes),
        restarts=True,
        **fields,
    )
    return RunFigures(
        pid=pid, at=100.0, began=90.0, command="python train.py", version="0.1.0", parts=[part]
    )


def observed(
    *processes: ProcessFigures,
    pid: int = 7,
    owner: int = 7,
    rates: dict[int, float] | None = None,
    stalled: dict[int, float] | None = None,
    **fields: Any,
) -> ObservedRun:
    """Return a look at a run.

    Args:
        processes: Of its only part.
        pid: Its process id.
        owner: Of the run that has started it.
        rates: By number of an actor, its env steps per second.
        stalled: By number of an actor, seconds without a step.
        fields: Of the part.
    """
    return ObservedRun(
        figures(*processes, pid=pid, **fields),
        owner,
        process_rates={(PART, f"actor-{i}"): rate for i, rate in (rates or {}).items()},
        stalled={(PART, f"actor-{i}"): seconds for i, seconds in (stalled or {}).items()},
    )
