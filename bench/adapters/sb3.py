"""Stable-Baselines3's SubprocVecEnv: one process per env, pickles over pipes.

Options: `start_method`: `"fork"`, or None for the library's own default. Once the processes are
up both step equally fast; start-up differs much, so the start-up benchmark measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from stable_baselines3.common.vec_env import SubprocVecEnv

from envbus.bench.adapters.base import Broken, Opening, Stepper
from envbus.bench.adapters.killing import kill_and_start_again
from envbus.bench.adapters.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("stable-baselines3", "torch", "gymnasium", "numpy", "mujoco", "ale-py")


class Sb3Stepper(Stepper):
    """Resets by itself, in the step that ends an episode."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._open()
        self._num_envs: int = self._envs.num_envs

    def step(self, actions: npt.NDArray[Any]) -> int:
        self._envs.step(actions)
        return self._num_envs

    def close(self) -> None:
        self._envs.close()

    def kill_one(self, ring: Sequence[npt.NDArray[Any]]) -> Broken:
        return kill_and_start_again(
            self._envs.processes,
            step=lambda: self.step(ring[0]),
            close=self.close,
            construct=lambda: self._open_and_step(ring[0]),
        )

    def _open(self) -> None:
        opening = self._opening
        self._envs = SubprocVecEnv(
            env_fns(opening.workload, opening.num_envs),
            start_method=opening.options["start_method"],
        )
        self._envs.seed(0)
        self._envs.reset()

    def _open_and_step(self, actions: npt.NDArray[Any]) -> None:
        self._open()
        self.step(actions)


def open_stepper(opening: Opening) -> Stepper:
    return Sb3Stepper(opening)
