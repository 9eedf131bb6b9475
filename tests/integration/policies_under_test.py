"""Policies that say who computed what, and misbehave as their observations tell them."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from envbus.runner.policies.policy import Policy, PolicyOutput, Weights
from tests.waiting import pass_time

__all__ = ["Picky", "Probe", "hold", "kill", "make_probe", "rows", "spoil"]

#: What may stand in the second column.
_HOLD, _SPOIL, _KILL = 1.0, 2.0, 3.0


def rows(*values: float) -> np.ndarray[Any, Any]:
    """Return observations whose actions are `values`, with what was pushed added."""
    return np.array([[value, 0.0, 0.0] for value in values], np.float32)


def hold(value: float, seconds: float) -> np.ndarray[Any, Any]:
    """Return an observation that takes its time."""
    return np.array([[value, _HOLD, seconds]], np.float32)


def spoil(value: float) -> np.ndarray[Any, Any]:
    """Return an observation that the policy raises for."""
    return np.array([[value, _SPOIL, 0.0]], np.float32)


def kill(value: float) -> np.ndarray[Any, Any]:
    """Return an observation that ends the process."""
    return np.array([[value, _KILL, 0.0]], np.float32)


class Probe(Policy):
    """The action is the observation's first number plus that of the weights.

    Args:
        index: Of the worker.
        deaf: The number of a worker in which `set_weights` raises; -1: none.
        stateful: Rows have a state, which counts.
    """

    def __init__(self, index: int = 0, *, deaf: int = -1, stateful: bool = False) -> None:
        self._index = index
        self._deaf = deaf
        self._stateful = stateful
        self._offset = 0.0

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        count = len(observations)
        what = observations[:, 1]
        if (what == _SPOIL).any():
            raise ArithmeticError(f"spoiled in a batch of {count}")
        if (what == _KILL).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (what == _HOLD).any():
            pass_time(float(observations[what == _HOLD, 2].max()))
        observations[:, 1] = 0.0  # they are the policy's to spoil
        return PolicyOutput(
            observations[:, 0].astype(np.float64) + self._offset,
            states + 1 if self._stateful else None,
            {
                "rows": np.full(count, count),
                "worker": np.full(count, self._index),
                "explored": np.full(count, explore),
            },
        )

    def initial_state(self) -> Any:
        return np.zeros(2, np.int64) if self._stateful else None

    def get_weights(self) -> Weights:
        return {"offset": np.array(self._offset)}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        if self._index == self._deaf:
            raise ValueError("no weights for me")
        self._offset = float(weights["offset"])
        super().set_weights(weights, version)


class Picky(Probe):
    """Refuses negative weights."""

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        if weights["offset"] < 0:
            raise ValueError("negative weights")
        super().set_weights(weights, version)


def make_probe(index: int) -> Probe:
    """Return a policy for a worker."""
    return Probe(index)
