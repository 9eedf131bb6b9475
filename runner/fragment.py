"""A piece of an episode, as an `EpisodeRecorder` cuts it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envbus.runner.batch import SampleBatch

__all__ = ["Fragment"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of an episode: the rows that were completed since the piece before."""

    #: Policy id and rows of each agent that completed some, in the order they were first seen; of
    #: an agent several, if actions of it did not happen.
    parts: list[tuple[str, SampleBatch]]
    env_steps: int
    #: The `t` of the first of its env steps.
    begin: int = 0

    @property
    def agent_steps(self) -> int:
        """Rows of all agents."""
        return sum(len(batch) for _, batch in self.parts)

    def split(self, env_steps: int) -> tuple[Fragment, Fragment]:
        """Return its first env steps and the others, as views."""
        end = self.begin + env_steps
        both: tuple[list[tuple[str, SampleBatch]], list[tuple[str, SampleBatch]]] = ([], [])
        for policy_id, batch in self.parts:
            row = int(np.searchsorted(batch["t"], end))
            for parts, rows in zip(both, (batch[:row], batch[row:]), strict=True):
                if len(rows):
                    parts.append((policy_id, rows))
        return (
            Fragment(both[0], env_steps, self.begin),
            Fragment(both[1], self.env_steps - env_steps, end),
        )

    def env_steps_with(self, agent_steps: int) -> int:
        """Return how many of its env steps have at least that many rows, or all of them."""
        ts = np.sort(np.concatenate([batch["t"] for _, batch in self.parts]))
        return (
            int(ts[agent_steps - 1]) + 1 - self.begin if agent_steps <= len(ts) else self.env_steps
        )
