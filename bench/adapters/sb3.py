"""Stable-Baselines3's SubprocVecEnv: one process per env, pickles over pipes.

Options: `start_method`: `"fork"`, or None for the library's own default. Once the processes are
up both step equally fast; start-up differs much, so the start-up benchmark measures both.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from stable_baselines3.common.vec_env import SubprocVecEnv

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("stable-baselines3", "torch", "gymnasium", "numpy", "mujoco", "ale-py")


class Sb3Stepper(Stepper):
    """Resets by itself, in the step that ends an episode."""

    def __init__(self, envs: SubprocVecEnv) -> None:
        self._envs = envs
        self._num_envs: int = envs.num_envs

    def step(self, actions: npt.NDArray[Any]) -> int:
        self._envs.step(actions)
        return self._num_envs

    def close(self) -> None:
        self._envs.close()


def open_stepper(opening: Opening) -> Stepper:
    envs = SubprocVecEnv(
        env_fns(opening.workload, opening.num_envs),
        start_method=opening.options["start_method"],
    )
    envs.seed(0)
    envs.reset()
    return Sb3Stepper(envs)
