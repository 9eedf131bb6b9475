"""A bound, not a library: what two processes, shared memory and a flag each take.

There are no errors, infos, restarts, seeds or deadlines, and one array of observations. Whoever
waits for a flag looks at it for some time, then sleeps on an eventfd; who sets it rings if the
other sleeps. Options: `processes` (fewer if there are fewer envs), `spin`: seconds of looking.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.workloads import make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("gymnasium", "numpy", "mujoco", "ale-py")

#: Looks at a flag between two at the clock; after these, others get the core.
_LOOKS = 16
_PR_SET_PDEATHSIG = 1


class Flag:
    """A number that one process sets and another waits for."""

    def __init__(self) -> None:
        # The number, and a cache line further whether the other sleeps.
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._bell = os.eventfd(0)
        self._fence = threading.Lock()

    def set(self, number: int) -> None:
        self._words[0] = number
        with self._fence:  # the number is seen before the other is looked at
            pass
        if self._words[8]:
            os.eventfd_write(self._bell, 1)

    def wait(self, last: int, spin: float) -> int:
        """Return the number as soon as it is another than `last`."""
        words, clock = self._words, time.perf_counter
        until = clock() + spin
        while True:
            for _ in range(_LOOKS):
                if (number := words[0]) != last:
                    return number
            if clock() < until:
                os.sched_yield()
                continue
            words[8] = 1
            with self._fence:
                pass
            if words[0] == last:
                os.eventfd_read(self._bell)
            words[8] = 0


class FloorRows:
    """What all envs have, in memory that children made by fork share."""

    def __init__(self, env: gym.Env[Any, Any], num_envs: int) -> None:
        space, actions = env.observation_space, env.action_space
        if not isinstance(space, gym.spaces.Box) or actions.shape is None:
            raise TypeError(f"one array of observations and one of actions, not {space}, {actions}")
        self.observations = _shared((num_envs, *space.shape), space.dtype)
        self.actions = _shared((num_envs, *actions.shape), np.dtype(actions.dtype))
        self.rewards = _shared((num_envs,), np.dtype(np.float64))
        self.terminated = _shared((num_envs,), np.dtype(np.bool_))
        self.truncated = _shared((num_envs,), np.dtype(np.bool_))


class FloorStepper(Stepper):
    """Steps all envs, and copies what comes: envs that ended begin anew in the next step."""

    def __init__(self, workload: str, num_envs: int, processes: int, spin: float) -> None:
        env = make_env(workload)
        self._rows, self._spin, self._number = FloorRows(env, num_envs), spin, 0
        env.close()
        fork = multiprocessing.get_context("fork")
        self._flags = [(Flag(), Flag()) for _ in range(processes)]
        shares = np.array_split(np.arange(num_envs), processes)
        self._children = [
            fork.Process(
                target=_work, args=(workload, share.tolist(), self._rows, *flags, spin), daemon=True
            )
            for share, flags in zip(shares, self._flags, strict=True)
        ]
        for child in self._children:
            child.start()
        self._exchange()

    def step(self, actions: npt.NDArray[Any]) -> int:
        rows = self._rows
        rows.actions[:] = actions
        self._exchange()
        for column in (rows.observations, rows.rewards, rows.terminated, rows.truncated):
            column.copy()
        return len(actions)

    def close(self) -> None:
        for asked, _ in self._flags:
            asked.set(-1)
        for child in self._children:
            child.join(timeout=5.0)

    def _exchange(self) -> None:
        last, self._number = self._number, self._number + 1
        for asked, _ in self._flags:
            asked.set(self._number)
        for _, done in self._flags:
            done.wait(last, self._spin)


def _work(
    workload: str, indices: Sequence[int], rows: FloorRows, asked: Flag, done: Flag, spin: float
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would ring any more
    envs = [make_env(workload, index) for index in indices]
    number = asked.wait(0, spin)
    for index, env in zip(indices, envs, strict=True):
        rows.observations[index], _ = env.reset(seed=index)
    ended = dict.fromkeys(indices, False)
    done.set(number)
    while (number := asked.wait(number, spin)) > 0:
        for index, env in zip(indices, envs, strict=True):
            if ended[index]:
                observation, _ = env.reset()
                reward, terminated, truncated = 0.0, False, False
            else:
                observation, reward, terminated, truncated, _ = env.step(rows.actions[index])
            rows.observations[index], rows.rewards[index] = observation, reward
            rows.terminated[index], rows.truncated[index] = terminated, truncated
            ended[index] = terminated or truncated
        done.set(number)
    for env in envs:
        env.close()


def _shared(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def open_stepper(opening: Opening) -> Stepper:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError("its flags need a processor whose writes are seen in their order")
    processes = min(int(opening.options["processes"]), opening.num_envs)
    return FloorStepper(
        opening.workload, opening.num_envs, processes, float(opening.options["spin"])
    )
