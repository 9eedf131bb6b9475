"""Tells of episodes that do not end where whole ones are awaited. Pure.

Such a sample lasts for ever, and its rows pile up: mostly of an env that has no time limit.
"""

from __future__ import annotations

import logging
from typing import Final

from envbus.runner.sampling import RunnerConfig

__all__ = ["EndlessEpisodes"]

_log = logging.getLogger(__name__)

#: Env steps of one episode that are nothing to be told of.
_LONG: Final = 10_000
#: Fragments in one episode that are nothing to be told of.
_FRAGMENTS: Final = 10
#: Iterations of a sample between two looks.
_INTERVAL: Final = 1_000


class EndlessEpisodes:
    """Warns once, of the first episode that seems to have no end."""

    def __init__(self, config: RunnerConfig) -> None:
        self._limit = max(_LONG, _FRAGMENTS * config.rollout_fragment_length)
        self._iterations = 0
        self._told = False

    def is_due(self) -> bool:
        """Return whether to `look`; called in each iteration of a sample of whole episodes."""
        self._iterations += 1
        return not self._told and self._iterations % _INTERVAL == 0

    def look(self, lengths: dict[int, int]) -> None:
        """Warn if an episode is too long; `lengths` are env steps so far, by env."""
        env_id, length = max(lengths.items(), key=lambda item: item[1], default=(0, 0))
        if length > self._limit:
            self._told = True
            _log.warning(
                "env %d: its episode goes on after %d steps, and whole episodes are awaited; does "
                "it end, or is max_episode_steps missing?",
                env_id,
                length,
            )
