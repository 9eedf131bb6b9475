"""Gymnasium's SyncVectorEnv and AsyncVectorEnv, as their documentation uses them.

Options: `kind`: `"sync"` or `"async"`; `shared_memory` for the latter.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy.typing as npt

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "VectorStepper", "open_stepper"]

DISTRIBUTIONS = ("gymnasium", "numpy", "mujoco", "ale-py")


class VectorStepper(Stepper):
    """Anything with the interface of `gymnasium.vector.VectorEnv`, which resets by itself."""

    def __init__(self, envs: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        self._envs = envs
        self._step = envs.step
        self._num_envs = envs.num_envs

    def step(self, actions: npt.NDArray[Any]) -> int:
        """Make one vector step."""
        self._step(actions)
        return self._num_envs

    def close(self) -> None:
        """Close the vector env."""
        self._envs.close()


def open_stepper(opening: Opening) -> Stepper:
    fns = env_fns(opening.workload, opening.num_envs)
    envs: gym.vector.VectorEnv[Any, Any, Any]
    if opening.options["kind"] == "sync":
        envs = gym.vector.SyncVectorEnv(fns)
    else:
        envs = gym.vector.AsyncVectorEnv(fns, shared_memory=bool(opening.options["shared_memory"]))
    envs.reset(seed=0)
    return VectorStepper(envs)
