"""Spaces of envs with several agents: one space per agent, and any subset of agents at a time.

Pure. What such an env returns is made in `env/agents.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np

__all__ = ["AgentID", "AgentSpaces", "RecordSpace"]

#: Whatever an env calls its agents: strings as a rule, also integers and tuples.
AgentID: TypeAlias = Hashable


class AgentSpaces(gymnasium.Space[Any]):
    """Elements are dicts of some agents' elements, `{agent_id: element}`.

    An agent that the env did not name beforehand may occur too: of its element nothing is known.

    Attributes:
        spaces: By agent, in the env's order. Agents may share one space.
    """

    def __init__(self, spaces: Mapping[Any, gymnasium.Space[Any]]) -> None:
        super().__init__()
        self.spaces: dict[Any, gymnasium.Space[Any]] = dict(spaces)

    def __getitem__(self, agent_id: AgentID) -> gymnasium.Space[Any]:
        return self.spaces[agent_id]

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Any:
        """Return an element of each agent's space; masks are given per agent."""
        masks, odds = mask or {}, probability or {}
        return {
            agent_id: space.sample(
                **({"mask": masks[agent_id]} if agent_id in masks else {}),
                **({"probability": odds[agent_id]} if agent_id in odds else {}),
            )
            for agent_id, space in self.spaces.items()
        }

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a dict whose known agents have elements of their spaces."""
        return isinstance(x, dict) and all(
            self.spaces[agent_id].contains(element)
            for agent_id, element in x.items()
            if agent_id in self.spaces
        )

    def seed(self, seed: Any = None) -> Any:
        """Seed the agents' spaces, each by a seed derived from this one."""
        seeded = super().seed(seed)
        derived = np.random.SeedSequence(seed).generate_state(max(len(self.spaces), 1))
        for space, number in zip(self.spaces.values(), derived.tolist(), strict=False):
            space.seed(number)
        return seeded

    @property
    def is_np_flattenable(self) -> bool:
        """False: who is there changes from step to step."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.spaces == other.spaces

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spaces})"


class RecordSpace(AgentSpaces):
    """Elements are what `AgentsEnv` returns: records whose "observations" are those of agents."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Any:
        """Return a record of which only the observations are filled."""
        empty: dict[str, Any] = {
            name: {} for name in ("rewards", "terminateds", "truncateds", "infos")
        }
        observations = super().sample(mask, probability)
        return {"observations": observations, **empty, "agents": list(observations)}

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a record with observations of the agents' spaces."""
        return isinstance(x, dict) and super().contains(x.get("observations"))
