"""Tianshou's ShmemVectorEnv: one process per env, observations in shared memory.

It does not reset by itself; its collector resets the envs whose episode ended, and so does this.
Options: `wait_num`: hand back as soon as that many envs are ready (its first-come mode).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tianshou.env import ShmemVectorEnv

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("tianshou", "torch", "gymnasium", "numpy", "mujoco", "ale-py")


class LockstepStepper(Stepper):
    """Steps all envs, then resets the finished ones."""

    def __init__(self, envs: ShmemVectorEnv, num_envs: int) -> None:
        self._envs = envs
        self._num_envs = num_envs

    def step(self, actions: npt.NDArray[Any]) -> int:
        _, _, terminated, truncated, _ = self._envs.step(actions)
        done = np.logical_or(terminated, truncated)
        if done.any():
            self._envs.reset(np.flatnonzero(done))
        return self._num_envs

    def close(self) -> None:
        self._envs.close()


class FirstComeStepper(LockstepStepper):
    """Sends to the envs that are ready, and takes back whoever comes first."""

    def __init__(self, envs: ShmemVectorEnv, num_envs: int) -> None:
        super().__init__(envs, num_envs)
        self._ready: npt.NDArray[Any] = np.arange(num_envs)

    def step(self, actions: npt.NDArray[Any]) -> int:
        *_, infos = self._envs.step(actions[self._ready], self._ready)
        self._ready = np.asarray([info["env_id"] for info in infos])
        return len(self._ready)


def open_stepper(opening: Opening) -> Stepper:
    wait_num = opening.options.get("wait_num")
    envs = ShmemVectorEnv(env_fns(opening.workload, opening.num_envs), wait_num=wait_num)
    envs.reset(seed=0)
    kind = LockstepStepper if wait_num is None else FirstComeStepper
    return kind(envs, opening.num_envs)
