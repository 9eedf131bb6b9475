"""What one env costs, found by stepping it in its own process.

Leaves out who asks for it and what follows from it (`runner/cli/tuning.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

__all__ = ["env_cost", "seconds_without_core"]

#: Enough of a quick env.
_MOST_STEPS = 20_000


def env_cost(env: Any, seconds: float, seed: int | None) -> Any:
    """Step `env` with random actions; return the mean times of its `reset` and `step`.

    Args:
        env: Made by whoever hosts it. Is reset here, and is to be reset afterwards.
        seconds: For how long; at least one step is taken.
        seed: Of the first reset and of the actions.

    Returns:
        Seconds: reset's, and the CPU time of it; step's, and the CPU time of it, of all threads
        of the process. Where Linux says so, without what others had the core for. Of a vector env
        the same for each of its envs.
    """
    reset, step = _Clocked(env.reset), _Clocked(env.step)
    env.action_space.seed(seed)
    end = time.perf_counter() + seconds
    reset(seed=seed)
    while not step.calls or (time.perf_counter() < end and step.calls < _MOST_STEPS):
        _, _, terminated, truncated, _ = step(env.action_space.sample())
        if not isinstance(env, VectorEnv) and np.any(terminated or truncated):
            reset()
    times = [*reset.means(), *step.means()]
    return [times] * env.num_envs if isinstance(env, VectorEnv) else times


class _Clocked:
    """Calls a function and adds up its times."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = 0
        self._seconds = self._cpu_seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        delay = seconds_without_core()
        began, cpu_began = time.perf_counter(), time.process_time()
        result = self._function(*args, **kwargs)
        cpu_ended, ended = time.process_time(), time.perf_counter()
        self._cpu_seconds += cpu_ended - cpu_began
        self._seconds += max(ended - began - (seconds_without_core() - delay), 0.0)
        self.calls += 1
        return result

    def means(self) -> tuple[float, float]:
        return self._seconds / self.calls, self._cpu_seconds / self.calls


def seconds_without_core(task: int | str = "thread-self") -> float:
    """Return for how long a thread could have run and had no core; 0 where nobody says so.

    Args:
        task: This thread, or the id of a process, for its first thread.
    """
    try:
        with open(f"/proc/{task}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
