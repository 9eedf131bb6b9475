"""The running episodes of envs with one agent each, in arrays, and the ids of all. Pure.

What `EpisodeRecorder` knows of one episode, for one per env.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.metrics import EpisodeResult
from envbus.runner.sampling import RunnerConfig

__all__ = ["EpisodeIds", "RunningEpisodes"]

_Ints: TypeAlias = npt.NDArray[np.int64]


class EpisodeIds:
    """Numbers episodes: by env and how many it has had, not by who was faster.

    Attributes:
        running: `(num_envs,)` id of each env's last episode that has begun.
    """

    def __init__(self, config: RunnerConfig, num_envs: int) -> None:
        self._config = config
        self._base = 0
        self._begun = np.zeros(num_envs, np.int64)
        self.running: _Ints = np.full(num_envs, -1, np.int64)

    def begin(self, env_ids: _Ints | int) -> None:
        """The next episode of each env begins."""
        number = self._base + self._begun[env_ids] * len(self._begun) + env_ids
        self.running[env_ids] = self._config.unique(0) + number
        self._begun[env_ids] += 1

    @property
    def following(self) -> int:
        """What no id has reached yet, without the part that is the runner's."""
        return self._base + int(self._begun.max(initial=0)) * len(self._begun)

    def go_on_from(self, following: int) -> None:
        """Have all later ids be at least `following`; those of running episodes stay."""
        self._base = max(self.following, following)
        self._begun[:] = 0


class RunningEpisodes:
    """Arrays `(num_envs,)`; of an env between two episodes they tell of the last one.

    Env ids are given in increasing order, each once: so `num_envs` of them are all envs.

    Attributes:
        ids: Of the episodes.
        first_row: Row of this fragment that it begins with.
        fragments: That it is in already, without this one.
        length: Env steps.
        incarnation: Life of the env.
        ended: Episodes that the env has ended in this sample, faulty ones left out.
    """

    def __init__(self, config: RunnerConfig, policy_id: str, num_envs: int) -> None:
        self._policy_id = policy_id
        self.ids = EpisodeIds(config, num_envs)
        self.first_row: _Ints = np.zeros(num_envs, np.int64)
        self.fragments: _Ints = np.zeros(num_envs, np.int64)
        self.length: _Ints = np.zeros(num_envs, np.int64)
        self.incarnation: _Ints = np.zeros(num_envs, np.int64)
        self.ended: _Ints = np.zeros(num_envs, np.int64)
        self._return = np.zeros(num_envs, np.float64)

    def begin(self, env_ids: _Ints, incarnations: _Ints, first_rows: _Ints) -> None:
        """The next episode of each env begins."""
        self.incarnation[env_ids] = incarnations
        self.ids.begin(env_ids)
        self.first_row[env_ids] = first_rows
        self.fragments[env_ids] = self.length[env_ids] = 0
        self._return[env_ids] = 0.0

    def step(self, env_ids: _Ints, rewards: npt.NDArray[np.float64]) -> None:
        """Each env was stepped."""
        if len(env_ids) == len(self._return):  # all: in a third of the time
            self._return += rewards
            self.length += 1
            return
        self._return[env_ids] += rewards
        self.length[env_ids] += 1

    def eps_ids(self, env_ids: _Ints) -> _Ints:
        """Return the episodes' ids."""
        ids: _Ints = self.ids.running[env_ids]
        return ids

    def result(
        self,
        env_id: int,
        terminated: bool,
        truncated: bool,
        *,
        faulty: bool,
        dropped: int,
        has_rows: bool,
    ) -> EpisodeResult:
        """Return the summary of an episode that is over.

        Args:
            env_id: Its env.
            terminated: By the env's word, as `truncated`.
            truncated: Likewise.
            faulty: It failed instead.
            dropped: Rows that were forgotten for that.
            has_rows: Whether this fragment has rows of it.
        """
        value, length = float(self._return[env_id]), int(self.length[env_id])
        return EpisodeResult(
            eps_id=int(self.ids.running[env_id]),
            env_id=env_id,
            incarnation=int(self.incarnation[env_id]),
            episode_return=value,
            length=length,
            agent_returns={DUMMY_AGENT: value},
            agent_steps={DUMMY_AGENT: length - dropped},
            agent_policies={DUMMY_AGENT: self._policy_id},
            terminated=terminated,
            truncated=truncated,
            faulty=faulty,
            fragments=int(self.fragments[env_id]) + has_rows,
            unrecorded_reward=0.0,
            custom_metrics={},
        )
