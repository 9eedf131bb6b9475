"""Plain envs and policies, a log of callbacks, and a look at trees, for tests of sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from envbus.actors.testing import CountingEnv
from envbus.runner.sampling.callbacks import Callbacks


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def counting(num_envs: int, length: int = 1000) -> list[Callable[[], CountingEnv]]:
    return [functools.partial(CountingEnv, length)] * num_envs


class Log(Callbacks):
    """Notes what is told of whom: the env, or the episode of a simulator, which has a name.

    Args:
        failing: What is told when it raises.
    """

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, int | str]] = []
        self.failing = failing

    def _add(self, name: str, who: int | str) -> None:
        self.calls.append((name, who))
        if name == self.failing:
            raise RuntimeError("no")

    def on_sub_environment_created(self, *, env_id: int, incarnation: int) -> None:
        self._add("env", env_id)

    def on_episode_created(self, *, episode: Any) -> None:
        assert episode.length == 0
        self._add("created", episode.episode_id or episode.env_id)

    def on_episode_start(self, *, episode: Any) -> None:
        self._add("start", episode.episode_id or episode.env_id)

    def on_episode_step(self, *, episode: Any) -> None:
        episode.custom_metrics["steps"] = episode.length
        self._add("step", episode.episode_id or episode.env_id)

    def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
        assert (episode.done, fault) == (True, None)
        self._add("end", episode.episode_id or episode.env_id)

    def on_sample_end(self, *, sample: Any) -> None:
        self.calls.append(("sample", len(sample)))
