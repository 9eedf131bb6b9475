"""One env of a `DictSampler`: its episode, who waits for an action, and what it has contributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbus.runner.batch import SampleBatch
from envbus.runner.episode import EpisodeRecorder, Fragment
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy
from envbus.runner.sampling import Demand, Phase, PolicyMapping
from envbus.runner.trajectory import AgentID

__all__ = ["Slot"]


class Slot:
    """What is known of an env."""

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.phase = Phase.ENDED
        self.incarnation = 0
        self.episode: EpisodeRecorder | None = None
        #: What there was when the episode began: policies by id, and who says which one is an
        #: agent's; by agent what was said.
        self.policies: Mapping[str, Policy] = {}
        self.policy_mapping_fn: PolicyMapping | None = None
        self.policy_ids: dict[AgentID, str] = {}
        #: By agent: what those that are to act have seen.
        self.seen: dict[AgentID, Tree] = {}
        #: By agent: states of policies; actions that were chosen elsewhere.
        self.states: dict[AgentID, Tree] = {}
        self.off_policy: dict[AgentID, Any] = {}
        #: In this fragment: rows by policy, env steps of these, whole episodes.
        self.parts: list[tuple[str, SampleBatch]] = []
        self.env_steps = 0
        self.agent_steps = 0
        self.episodes = 0
        self._quota = 0

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of the env is awaited."""
        return self.phase in (Phase.RESETTING, Phase.STEPPING)

    def begin_fragment(self, quota: int) -> None:
        """Count from zero."""
        self._quota = quota
        self.parts = []
        self.env_steps = self.agent_steps = self.episodes = 0

    def begin_episode(
        self,
        episode: EpisodeRecorder,
        policies: Mapping[str, Policy],
        policy_mapping_fn: PolicyMapping | None,
    ) -> None:
        """Its first observations are awaited."""
        self.phase = Phase.RESETTING
        self.episode, self.policies = episode, policies
        self.policy_mapping_fn = policy_mapping_fn
        self.policy_ids, self.states, self.off_policy, self.seen = {}, {}, {}, {}

    def take(self, ready: list[AgentID], observations: Mapping[AgentID, Tree]) -> None:
        """The agents in `ready` are to act on what they have seen."""
        self.phase = Phase.WAITING
        self.seen = {agent_id: observations[agent_id] for agent_id in ready}

    def collect(self, fragment: Fragment) -> None:
        """Add rows to what the env contributes."""
        self.parts += fragment.parts
        self.env_steps += fragment.env_steps
        self.agent_steps += fragment.agent_steps

    def end_episode(self, *, faulty: bool) -> None:
        """The episode is over, and its rows were collected."""
        self.phase, self.episode = Phase.ENDED, None
        self.episodes += not faulty

    def met(self, demand: Demand) -> bool:
        """Return whether the env has contributed its part, or cannot."""
        if self.phase is Phase.LOST or (self._quota == 0 and demand.complete):
            return True
        if demand.complete and self.phase >= Phase.WAITING:
            return False
        episode = self.episode
        if demand.unit == "episodes":
            count = self.episodes
        elif demand.unit == "agent_steps":
            count = self.agent_steps + (episode.agent_steps if episode else 0)
        else:
            count = self.env_steps + (episode.env_steps if episode else 0)
        return count >= self._quota
