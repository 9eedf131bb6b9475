"""Ray actors, one per env, used as RLlib's RemoteVectorEnv does: step all, wait, get each.

The waiting time is finite as there (`remote_env_batch_wait_ms`), long enough not to spin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import ray

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.workloads import env_fns

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("ray", "gymnasium", "numpy", "mujoco", "ale-py")

#: Seconds of one wait for all replies; RLlib's documentation suggests tens of milliseconds.
POLL_SECONDS = 0.05


#: Observation, reward, whether the episode ended, info.
Transition: TypeAlias = tuple[Any, float, bool, dict[str, Any]]


class _EnvActor:
    """What runs in the remote process: one env."""

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self._env = env_fn()

    def reset(self, seed: int | None = None) -> Transition:
        observation, _ = self._env.reset(seed=seed)
        return observation, 0.0, False, {}

    def step(self, action: object) -> Transition:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), terminated or truncated, info


class RayStepper(Stepper):
    """Resets an env by a request of its own when its episode has ended, like RLlib's sampler."""

    def __init__(self, opening: Opening) -> None:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        remote = ray.remote(num_cpus=0)(_EnvActor)
        self._actors = [
            remote.remote(env_fn) for env_fn in env_fns(opening.workload, opening.num_envs)
        ]
        self._pending = {
            actor.reset.remote(env_id): env_id for env_id, actor in enumerate(self._actors)
        }
        self._gather()

    def step(self, actions: npt.NDArray[Any]) -> int:
        for env_id, (actor, action) in enumerate(zip(self._actors, actions, strict=True)):
            self._pending[actor.step.remote(action)] = env_id
        ended = self._gather()
        if ended:
            for env_id in ended:
                self._pending[self._actors[env_id].reset.remote()] = env_id
            self._gather()
        return len(self._actors)

    def _gather(self) -> list[int]:
        """Wait for everything pending, stack the observations; return whose episode ended."""
        observations: list[Any] = [None] * len(self._actors)
        ended = []
        while self._pending:
            ready, _ = ray.wait(
                list(self._pending), num_returns=len(self._pending), timeout=POLL_SECONDS
            )
            for reference in ready:
                env_id = self._pending.pop(reference)
                observation, _, done, _ = ray.get(reference)
                observations[env_id] = observation
                if done:
                    ended.append(env_id)
        present = [observation for observation in observations if observation is not None]
        if isinstance(present[0], np.ndarray):
            np.stack(present)  # what a policy needs; RLlib's sampler does it later
        return ended

    def close(self) -> None:
        ray.shutdown()


def open_stepper(opening: Opening) -> Stepper:
    return RayStepper(opening)
