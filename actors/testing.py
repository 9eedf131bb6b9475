"""Envs for tests and measurements of whatever hosts envs: deterministic, each with one trait.

Leaves out assertions; those belong to tests.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["CountingEnv", "ExitingEnv", "InfoEnv", "NullEnv"]

Info: TypeAlias = dict[str, Any]
Array: TypeAlias = npt.NDArray[Any]
Options: TypeAlias = dict[str, Any] | None


class NullEnv(gymnasium.Env[Array, np.int64]):
    """Does nothing: 4 floats, reward 0, no end, no info. What is left is the host's own cost."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Return zeros."""
        super().reset(seed=seed, options=options)
        return self._observation, {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:  # noqa: ARG002
        """Return zeros."""
        return self._observation, 0.0, False, False, {}


class CountingEnv(gymnasium.Env[Array, np.int64]):
    """Counts: its observation is `[episode, step, last action, seed]`.

    Its reward is `10 * episode + step`, the info of a reset `{"episode": ...}`. An episode ends
    after `length` steps, terminated in odd episodes and truncated in even ones.

    Attributes:
        actions: All actions that `step` got, the very objects.
        options: All `options` that `reset` got, the very objects.
        closed: Whether `close` was called.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as Gymnasium's
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(100)

    def __init__(self, length: int = 3, *, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.episode = 0
        self.count = 0
        self.actions: list[Any] = []
        self.options: list[Any] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Array, Info]:
        """Begin the next episode."""
        super().reset(seed=seed, options=options)
        self.options.append(options)
        self.episode += 1
        self.count = 0
        return self._observe(0), {"episode": self.episode}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Count."""
        self.actions.append(action)
        self.count += 1
        over = self.count >= self.length
        odd = self.episode % 2 == 1
        reward = 10.0 * self.episode + self.count
        return self._observe(action), reward, over and odd, over and not odd, {}

    def render(self) -> Array:
        """Return a picture of one pixel that shows the count."""
        return np.full((1, 1, 3), self.count, np.uint8)

    def close(self) -> None:
        """Remember that it was called."""
        self.closed = True

    def add(self, number: int, *, times: int = 1) -> int:
        """Return the count plus `number * times`."""
        return self.count + number * times

    def _observe(self, action: np.int64 | int) -> Array:
        # np_random_seed draws a seed if there was none: that would differ from run to run.
        seed = -1 if self._np_random_seed is None else self._np_random_seed
        return np.array([self.episode, self.count, action, seed], np.float64)


class ExitingEnv(CountingEnv):
    """A `CountingEnv` that ends its process in a step.

    Args:
        after: How many steps go well before.
        code: Exit code, by `os._exit`: no handler and no clean-up runs.
        signal: If not None, the process kills itself by this signal instead.
        length: Steps of an episode.
    """

    def __init__(
        self, after: int = 0, code: int = 9, signal: int | None = None, length: int = 3
    ) -> None:
        super().__init__(length)
        self.after = after
        self.code = code
        self.signal = signal

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """End the process, or do as `CountingEnv`."""
        self.after -= 1
        if self.after < 0:
            if self.signal is not None:
                os.kill(os.getpid(), self.signal)
            os._exit(self.code)
        return super().step(action)


class InfoEnv(CountingEnv):
    """A `CountingEnv` with infos of all sorts, some of which come and go.

    Args:
        length: Steps of an episode.
        item: Something to be put into each step's info, e.g. an object that no codec knows.
    """

    def __init__(self, length: int = 3, item: object = None) -> None:
        super().__init__(length)
        self.item = item

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, Info]:
        """Do as `CountingEnv`, with an info."""
        observation, reward, terminated, truncated, _ = super().step(action)
        info: Info = {
            "int": self.count,
            "float": self.count / 3,
            "bool": self.count % 2 == 0,
            "scalar": np.float32(self.count),
            "array": np.full((2, 3), self.count, np.int16),
            "text": f"step {self.count}",
            "none": None,
            "list": [self.count, "x"],
            "nested": {"inner": self.count, "deeper": {"array": np.arange(2.0) * self.count}},
        }
        if self.count % 2:
            info["odd"] = self.count
        if self.item is not None:
            info["item"] = self.item
        return observation, reward, terminated, truncated, info
