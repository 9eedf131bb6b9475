"""Gymnasium's SyncVectorEnv and AsyncVectorEnv, as their documentation uses them.

Options: `kind`: `"sync"` or `"async"`; `shared_memory` for the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy.typing as npt

from envbus.bench.adapters.base import Broken, Opening, Stepper
from envbus.bench.adapters.killing import kill_and_start_again
from envbus.bench.adapters.workloads import autoreset_mode, env_fns

__all__ = ["DISTRIBUTIONS", "VectorStepper", "open_stepper"]

DISTRIBUTIONS = ("gymnasium", "numpy", "mujoco", "ale-py")


class VectorStepper(Stepper):
    """Anything with the interface of `gymnasium.vector.VectorEnv`, which resets by itself."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._step = envs.step
        self._num_envs: int = envs.num_envs

    def step(self, actions: npt.NDArray[Any]) -> int:
        """Make one vector step."""
        self._step(actions)
        return self._num_envs

    def close(self) -> None:
        """Close the vector env."""
        self._envs.close()


class AsyncStepper(VectorStepper):
    """An AsyncVectorEnv; a killed worker is its end."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._open()

    def kill_one(self, ring: Sequence[npt.NDArray[Any]]) -> Broken:
        return kill_and_start_again(
            self._envs.processes,
            step=lambda: self.step(ring[0]),
            close=self.close,
            construct=lambda: self._open_and_step(ring[0]),
        )

    def _open(self) -> None:
        opening = self._opening
        envs = gym.vector.AsyncVectorEnv(
            env_fns(opening.workload, opening.num_envs),
            shared_memory=bool(opening.options["shared_memory"]),
            autoreset_mode=autoreset_mode(opening.workload),
        )
        envs.reset(seed=0)
        super().__init__(envs)

    def _open_and_step(self, actions: npt.NDArray[Any]) -> None:
        self._open()
        self.step(actions)


def open_stepper(opening: Opening) -> Stepper:
    if opening.options["kind"] == "async":
        return AsyncStepper(opening)
    envs = gym.vector.SyncVectorEnv(
        env_fns(opening.workload, opening.num_envs),
        autoreset_mode=autoreset_mode(opening.workload),
    )
    envs.reset(seed=0)
    return VectorStepper(envs)
