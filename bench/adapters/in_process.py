"""Bounds, not libraries: a plain loop in one process, and independent processes doing just that.

Options: `processes`: 1 runs the loop in the adapter itself; more, or `"num_envs"`, start that many
processes, each stepping its share of the envs without a word to the others.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from envbus.bench.adapters.base import Measurement, Opening, Stepper, Timed
from envbus.bench.adapters.workloads import action_ring, make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("gymnasium", "numpy", "mujoco", "ale-py")


class LoopStepper(Stepper):
    """Steps its envs one after the other and stacks nothing."""

    def __init__(self, workload: str, indices: Sequence[int]) -> None:
        self._envs: list[gym.Env[Any, Any]] = [make_env(workload, index) for index in indices]
        for index, env in zip(indices, self._envs, strict=True):
            env.reset(seed=index)

    def step(self, actions: npt.NDArray[Any]) -> int:
        for env, action in zip(self._envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(self._envs)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class Independent(Timed):
    """Tells each process to step for some time, and adds up what they did."""

    def __init__(self, workload: str, num_envs: int, processes: int) -> None:
        self._pipes: list[Connection] = []
        self._children: list[multiprocessing.Process] = []
        for share in np.array_split(np.arange(num_envs), processes):
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.Process(
                target=_step_alone, args=(theirs, workload, share.tolist()), daemon=True
            )
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, ring: Sequence[npt.NDArray[Any]], seconds: float) -> Measurement:
        del ring  # each process has its own
        for pipe in self._pipes:
            pipe.send(seconds)
        parts: list[Measurement] = [pipe.recv() for pipe in self._pipes]
        rate = sum(part.env_steps / part.seconds for part in parts)
        longest = max(part.seconds for part in parts)
        return Measurement(
            env_steps=round(rate * longest),
            seconds=longest,
            vector_steps=min(part.vector_steps for part in parts),
            latency_p50_us=max(part.latency_p50_us for part in parts),
            latency_p99_us=max(part.latency_p99_us for part in parts),
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
            pipe.close()
        for child in self._children:
            child.join(timeout=5.0)


def _step_alone(pipe: Connection, workload: str, indices: list[int]) -> None:
    stepper = LoopStepper(workload, indices)
    ring = action_ring(workload, len(indices))
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        pipe.send(stepper.run(ring, seconds))
    stepper.close()


def open_stepper(opening: Opening) -> Timed:
    asked = opening.options["processes"]
    processes = opening.num_envs if asked == "num_envs" else int(asked)
    if processes == 1:
        return LoopStepper(opening.workload, range(opening.num_envs))
    return Independent(opening.workload, opening.num_envs, processes)
