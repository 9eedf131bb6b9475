"""What each row of an env may be, whatever dies: a model, and the env whose rows it reads."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

_instances = itertools.count()
#: Action that makes the env raise.
RAISE = 99.0


class LifeEnv(gymnasium.Env[Any, Any]):
    """Its observation is `[life, episode, step, action]`; no other env has its life's number."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Box(0.0, 100.0, (), np.float64)

    def __init__(self, length: int) -> None:
        self.length = length
        self.life = os.getpid() * 1000 + next(_instances)
        self.episode = self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode += 1
        self.count = 0
        return np.array([self.life, self.episode, 0, 0], np.float64), {}

    def step(self, action: Any) -> Any:
        if action == RAISE:
            raise ValueError("raised on purpose")
        self.count += 1
        over = self.count >= self.length
        observation = np.array([self.life, self.episode, self.count, action], np.float64)
        return observation, reward_of(observation), over, False, {}


def reward_of(observation: Any) -> float:
    """Return what a step into this observation is worth."""
    return float(observation[1] * 100.0 + observation[2])


@dataclass
class Row:
    """What one call of `step` or `reset` says of one env."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    fault: str | None = None
    final_obs: Any = None


class EnvModel:
    """The rows of one env, each checked against the rows before.

    Args:
        mode: Of the vector env.
        length: Of the env's episodes.
    """

    def __init__(self, mode: AutoresetMode, length: int) -> None:
        self.mode = mode
        self.length = length
        self.last: Any = None
        self.over = False
        #: Faults since the present life began; told with this row or before.
        self.faults = 0
        self.lives: set[float] = set()
        self.transitions = 0

    def on_reset(self, row: Row, *, asked: bool = True) -> None:
        """A reset has returned; `asked`: it was to reset this env."""
        self.faults += row.fault is not None
        if not asked and row.fault is None:
            assert np.array_equal(row.observation, self.last), "it was not to be reset"
            return
        self._begins(row)

    def on_step(self, row: Row, action: float) -> None:
        """A step has returned."""
        self.faults += row.fault is not None
        if row.fault is None and not row.truncated:
            assert not self.faults or self.over, "it goes on in the life of a fault"
        assert not (row.terminated and row.truncated)
        if self.over:
            assert self.mode is AutoresetMode.NEXT_STEP
            assert row.reward == 0.0
            assert not row.terminated
            assert row.truncated == (row.fault is not None)
            if row.truncated:  # its episode begins later
                assert row.observation[2] == 0 or np.array_equal(row.observation, self.last)
            else:
                self._begins(row)
            return
        if row.truncated:
            assert self.faults
            assert row.reward == 0.0
            self._ends(row, [0, 1])
            return
        self._acts(row, action)

    def _acts(self, row: Row, action: float) -> None:
        """A step of the same episode."""
        ends = self.last[2] + 1 >= self.length
        seen = row.observation
        if ends and self.mode is AutoresetMode.SAME_STEP:
            assert row.terminated
            seen = row.final_obs
        else:
            assert row.final_obs is None
            assert row.fault is None
            assert row.terminated == ends
        assert seen is not None, "no final_obs"
        assert seen.tolist() == [*self.last[:2], self.last[2] + 1, action]
        assert row.reward == reward_of(seen)
        self.transitions += 1
        self.last = seen
        if ends:
            self._ends(row, [0])

    def _ends(self, row: Row, steps: list[int]) -> None:
        """The episode is over; its last observation is `steps` after the last one."""
        same_step = self.mode is AutoresetMode.SAME_STEP
        final = row.final_obs if same_step else row.observation
        assert final is not None, "no final_obs"
        assert final[:2].tolist() == self.last[:2].tolist(), "not of the episode that ended"
        assert final[2] - self.last[2] in steps
        self.last = final
        self.over = True
        if same_step:
            self._begins(row)

    def _begins(self, row: Row) -> None:
        """The row shows the first observation of an episode."""
        first = row.observation
        assert first[2] == 0, "not the first of an episode"
        assert (row.reward == 0.0 and not row.truncated) or self.mode is AutoresetMode.SAME_STEP
        if self.last is not None and first[0] == self.last[0]:
            assert not self.faults, "a fault was told, and the life goes on"
            assert first[1] > self.last[1]
        else:
            assert first[0] not in self.lives
            assert self.last is None or self.faults, "another life without a fault"
            self.lives.add(first[0])
            assert first[1] == 1
        self.faults = 0
        self.last, self.over = first, False


def rows_of(
    observations: Any,
    infos: dict[str, Any],
    rewards: Any = None,
    terminations: Any = None,
    truncations: Any = None,
) -> list[Row]:
    """Return what a vector env returned, env by env."""
    rows = [Row(observation) for observation in observations]
    for i, row in enumerate(rows):
        if rewards is not None:
            row.reward = float(rewards[i])
            row.terminated, row.truncated = bool(terminations[i]), bool(truncations[i])
        if "fault" in infos and infos["_fault"][i]:
            row.fault = infos["fault"]["cause"][i]
        if "final_obs" in infos and infos["_final_obs"][i]:
            row.final_obs = infos["final_obs"][i]
    return rows
