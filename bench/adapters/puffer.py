"""PufferLib's Multiprocessing backend: workers with many envs each, spinning on shared flags.

Options: `num_workers`. Both sides poll a byte in shared memory, so each worker and the caller
want a core of their own. Observations are views into shared memory, valid until the next step.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy.typing as npt
from pufferlib import vector
from pufferlib.emulation import GymnasiumPufferEnv

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.workloads import make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("pufferlib", "torch", "gymnasium", "numpy", "mujoco", "ale-py")


class PufferStepper(Stepper):
    """Resets by itself, in PufferLib's emulation layer."""

    def __init__(self, envs: vector.Multiprocessing, num_envs: int) -> None:
        self._envs = envs
        self._num_envs = num_envs
        self._shape = envs.action_space.shape
        self._dtype = envs.action_space.dtype

    def step(self, actions: npt.NDArray[Any]) -> int:
        self._envs.step(actions.reshape(self._shape).astype(self._dtype, copy=False))
        return self._num_envs

    def close(self) -> None:
        self._envs.close()


def _puffer_env(workload: str, index: int, **kwargs: Any) -> GymnasiumPufferEnv:
    return GymnasiumPufferEnv(env_creator=functools.partial(make_env, workload, index), **kwargs)


def open_stepper(opening: Opening) -> Stepper:
    num_envs = opening.num_envs
    envs = vector.make(
        [functools.partial(_puffer_env, opening.workload, index) for index in range(num_envs)],
        [[]] * num_envs,
        [{}] * num_envs,
        backend=vector.Multiprocessing,
        num_envs=num_envs,
        num_workers=int(opening.options["num_workers"]),
        batch_size=num_envs,
    )
    envs.reset(seed=0)
    return PufferStepper(envs, num_envs)
