"""envbus's ActorPool: send to the envs that are ready, take back whoever comes first.

Options: `num_actors`, as in `envbus_vector.py`.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.envbus_vector import DISTRIBUTIONS, actors_of
from envbus.bench.workloads import env_fns
from envbus.runner import ActorPool

__all__ = ["DISTRIBUTIONS", "open_stepper"]


class PoolStepper(Stepper):
    """Resets by itself, as the vector env does."""

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self._ready = pool.recv(min_envs=1).env_ids

    def step(self, actions: npt.NDArray[Any]) -> int:
        self._pool.send(actions[self._ready], self._ready)
        self._ready = self._pool.recv(min_envs=1).env_ids
        return len(self._ready)

    def close(self) -> None:
        self._pool.close()


def open_stepper(opening: Opening) -> Stepper:
    pool = ActorPool(env_fns(opening.workload, opening.num_envs), num_actors=actors_of(opening))
    pool.reset(seed=0)
    return PoolStepper(pool)
