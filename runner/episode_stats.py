"""Return and length of each env's episode, over the autoreset of a vector env.

Pure: arrays in, arrays out. Leaves out where the arrays come from and how results are shown.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

__all__ = ["EpisodeStats", "EpisodeSummary", "FinishedEpisodes"]


class FinishedEpisodes(msgspec.Struct, frozen=True, gc=False):
    """The episodes that one vector step finished, in the order of their envs."""

    #: `(episodes,)` int64.
    env_ids: npt.NDArray[np.int64]
    #: `(episodes,)` float64, undiscounted sums of rewards.
    returns: npt.NDArray[np.float64]
    #: `(episodes,)` int64, in env steps.
    lengths: npt.NDArray[np.int64]


class EpisodeSummary(msgspec.Struct, frozen=True):
    """All episodes that were finished so far. Means and bounds are None without any."""

    episodes: int
    #: Episodes that an env's or an actor's failure cut off; they count in no other field.
    lost: int
    #: Steps that an env took, without those that only reset it.
    env_steps: int
    mean_return: float | None
    min_return: float | None
    max_return: float | None
    mean_length: float | None


class EpisodeStats:
    """Tracks the episodes of `num_envs` envs.

    Costs a few array operations per vector step, whatever the number of envs, and keeps
    nothing of an episode once it is finished.

    Args:
        num_envs: Rows of every array that is handed in.
        autoreset_mode: The vector env's mode. In NEXT_STEP the step after the end of an episode
            only resets the env; in DISABLED an env whose episode has ended counts for nothing
            until `reset` names it.
    """

    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        self.num_envs = num_envs
        self.autoreset_mode = autoreset_mode
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        #: Envs whose next step belongs to no episode.
        self._idle = np.zeros(num_envs, np.bool_)
        self._episodes = 0
        self._lost = 0
        self._env_steps = 0
        self._return_sum = 0.0
        self._length_sum = 0
        self._min_return = math.inf
        self._max_return = -math.inf

    @property
    def env_steps(self) -> int:
        """Steps that the envs took, without those that only reset one."""
        return self._env_steps

    @property
    def episodes(self) -> int:
        """Episodes that were finished, lost ones left out."""
        return self._episodes

    def reset(self, mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Begin new episodes; unfinished ones are dropped.

        Args:
            mask: `(num_envs,)` bool, the envs that were reset; None: all.
        """
        rows: Any = slice(None) if mask is None else mask
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self._idle[rows] = False

    def update(
        self,
        rewards: npt.NDArray[Any],
        terminations: npt.NDArray[np.bool_],
        truncations: npt.NDArray[np.bool_],
        lost: npt.NDArray[np.bool_] | None = None,
    ) -> FinishedEpisodes | None:
        """Take in one vector step.

        Args:
            rewards: `(num_envs,)`, any number type.
            terminations: `(num_envs,)` bool.
            truncations: `(num_envs,)` bool.
            lost: `(num_envs,)` bool: the episode ended because the env or its actor failed, so
                that its return says nothing. Read where the episode ends.

        Returns:
            The episodes that ended by themselves, or None if there are none.
        """
        ended = terminations | truncations
        if self._idle.any():
            acting = ~self._idle
            self._env_steps += int(np.count_nonzero(acting))
            np.add(self._returns, rewards, out=self._returns, where=acting)
            self._lengths += acting
            finished = ended & acting
        else:
            self._env_steps += self.num_envs
            self._returns += rewards
            self._lengths += 1
            finished = ended
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            # Not `finished`: an actor that dies during a reset is reset once more.
            self._idle = ended.copy()
        elif self.autoreset_mode is AutoresetMode.DISABLED:
            self._idle |= ended
        if not finished.any():
            return None
        return self._finish(finished, lost)

    def summary(self) -> EpisodeSummary:
        """Return what is known about the finished episodes."""
        count = self._episodes
        return EpisodeSummary(
            episodes=count,
            lost=self._lost,
            env_steps=self._env_steps,
            mean_return=self._return_sum / count if count else None,
            min_return=self._min_return if count else None,
            max_return=self._max_return if count else None,
            mean_length=self._length_sum / count if count else None,
        )

    def _finish(
        self, finished: npt.NDArray[np.bool_], lost: npt.NDArray[np.bool_] | None
    ) -> FinishedEpisodes | None:
        counted = finished if lost is None else finished & ~lost
        env_ids = np.flatnonzero(counted)
        returns, lengths = self._returns[env_ids], self._lengths[env_ids]
        self._returns[finished] = 0.0
        self._lengths[finished] = 0
        self._lost += int(np.count_nonzero(finished)) - len(env_ids)
        if not len(env_ids):
            return None
        self._episodes += len(env_ids)
        self._return_sum += float(returns.sum())
        self._length_sum += int(lengths.sum())
        self._min_return = min(self._min_return, float(returns.min()))
        self._max_return = max(self._max_return, float(returns.max()))
        return FinishedEpisodes(env_ids, returns, lengths)
