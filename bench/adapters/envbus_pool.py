"""envbus's ActorPool: send to the envs that are ready, take back whoever comes first.

Options: `num_actors` and `restart`, as in `envbus_vector.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envbus.bench.adapters.base import Opening, Recovered, Stepper
from envbus.bench.adapters.envbus_vector import DISTRIBUTIONS, POLICY, QUIET_SECONDS, actors_of
from envbus.bench.adapters.workloads import env_fns
from envbus.runner import ActorPool

__all__ = ["DISTRIBUTIONS", "open_stepper"]

#: A process that keeps a core busy while it is asked to: "1" begins, "0" ends.
_BURNER = """
import os, select
while (command := os.read(0, 1)):
    while command == b"1" and not select.select([0], [], [], 0)[0]:
        pass
"""


class PoolStepper(Stepper):
    """Resets by itself, as the vector env does."""

    def __init__(self, pool: ActorPool, num_actors: int) -> None:
        self._pool = pool
        self._ready = pool.recv(min_envs=1).env_ids
        self._burner: subprocess.Popen[bytes] | None = None
        #: Which envs a kill hits: those of the last actor.
        self._hit = np.arange(pool.num_envs) >= pool.num_envs * (num_actors - 1) // num_actors

    def step(self, actions: npt.NDArray[Any]) -> int:
        self._pool.send(actions[self._ready], self._ready)
        self._ready = self._pool.recv(min_envs=1).env_ids
        return len(self._ready)

    def kill_one(self, ring: Sequence[npt.NDArray[Any]]) -> Recovered:
        before = self._watch(ring[0], QUIET_SECONDS)
        os.kill(self._pool.actor_pids()[-1], signal.SIGKILL)
        seconds, during = self._until_back(ring[0])
        self._watch(ring[0], QUIET_SECONDS)
        not_asked = self._leave_out(ring[0], seconds)
        self._watch(ring[0], QUIET_SECONDS)
        self._burn(b"1")
        core_lost = self._leave_out(ring[0], seconds)
        self._burn(b"0")
        others = {"before": before, "during": during}
        return Recovered(seconds, {**others, "not_asked": not_asked, "core_lost": core_lost})

    def close(self) -> None:
        self._pool.close()
        if self._burner is not None:
            self._burner.kill()
            self._burner.wait()

    def _burn(self, command: bytes) -> None:
        """Have a core kept busy, or no more."""
        if self._burner is None:
            self._burner = subprocess.Popen(  # noqa: S603 - a constant
                [sys.executable, "-c", _BURNER], stdin=subprocess.PIPE, bufsize=0
            )
        assert self._burner.stdin is not None
        self._burner.stdin.write(command)

    def _watch(self, actions: npt.NDArray[Any], seconds: float) -> tuple[int, float]:
        """Step all for a while; return the steps of those who are not hit, and how long."""
        steps, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            self.step(actions)
            steps += int(np.count_nonzero(~self._hit[self._ready]))
        return steps, now - start

    def _until_back(self, actions: npt.NDArray[Any]) -> tuple[float, tuple[int, float]]:
        """Step until all who are hit have made a step again; return when, and as `_watch`."""
        lives = np.full(self._pool.num_envs, -1)
        rows = np.zeros(self._pool.num_envs, np.int64)
        steps, start = 0, time.perf_counter()
        while np.min(rows[self._hit]) < 2:  # a life's first row is its reset
            self._pool.send(actions[self._ready], self._ready)
            batch = self._pool.recv(min_envs=1)
            ids = self._ready = batch.env_ids
            steps += int(np.count_nonzero(~self._hit[ids]))
            for fault in batch.faults:
                lives[fault.env_id] = fault.restarts + 1
            rows[ids] += batch.incarnations == lives[ids]
        seconds = time.perf_counter() - start
        return seconds, (steps, seconds)

    def _leave_out(self, actions: npt.NDArray[Any], seconds: float) -> tuple[int, float]:
        """As `_watch`, but those whom a kill hits are not asked."""
        waiting: list[npt.NDArray[np.int64]] = []
        steps, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            hit = self._hit[self._ready]
            waiting.append(self._ready[hit])
            others = self._ready[~hit]
            self._pool.send(actions[others], others)
            self._ready = self._pool.recv(min_envs=1).env_ids
            steps += int(np.count_nonzero(~self._hit[self._ready]))
        self._ready = np.concatenate([self._ready, *waiting])
        return steps, now - start


def open_stepper(opening: Opening) -> Stepper:
    num_actors = actors_of(opening)
    pool = ActorPool(
        env_fns(opening.workload, opening.num_envs),
        num_actors=num_actors,
        restart=POLICY if opening.options.get("restart", False) else False,
    )
    pool.reset(seed=0)
    return PoolStepper(pool, len(pool.actor_pids()))
