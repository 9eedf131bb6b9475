"""One env of a `DictSampler`: its episode, and who waits for an action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbus.runner.bridge.results import ClientChoice
from envbus.runner.episode import EpisodeRecorder
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy
from envbus.runner.sampling import Phase, PolicyMapping
from envbus.runner.trajectory import AgentID

__all__ = ["Slot"]


class Slot:
    """What is known of an env: one of a pool, or an episode of a bridge.

    Args:
        episode_id: Of an episode of a bridge: what its simulator calls it.
        training_enabled: Whether its rows are to be trained on.
    """

    def __init__(self, env_id: int, *, episode_id: str = "", training_enabled: bool = True) -> None:
        self.env_id = env_id
        self.episode_id = episode_id
        self.training_enabled = training_enabled
        #: What runs is the rest of an episode that was given up: it is answered, and that is all.
        self.is_rest = False
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
        #: Which policy of the simulator's has chosen the actions in `off_policy`; None: none.
        self.choice: ClientChoice | None = None
        #: Which weights chose its last action.
        self.policy_version = 0

    @property
    def is_kept(self) -> bool:
        """Whether rows of what runs may leave."""
        return self.training_enabled and not self.is_rest

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of the env is awaited."""
        return self.phase in (Phase.RESETTING, Phase.STEPPING)

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

    def end_episode(self) -> None:
        """The episode is over."""
        self.phase, self.episode = Phase.ENDED, None
