"""A client's own copy of a policy: takes models, answers observations. Pure.

Keeps the policy's states by episode and agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from envbus.actors.external.elements import opened, to_wire
from envbus.actors.external.protocol import Model, Value
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.spaces import Element, Space, is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number

__all__ = ["Answered", "LocalPolicy", "LocalSettings", "PolicyOrFactory"]

#: What has `compute_actions`, as a runner's policies; or a function `(observation space, action
#: space, weights) -> policy`, which is called with the first weights.
PolicyOrFactory: TypeAlias = "Any | Callable[[Space, Space, Mapping[str, Any]], Any]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """How a client chooses actions itself.

    Raises:
        ConfigError: A number is not positive.
    """

    #: Which of the bridge's policies; "": the first.
    policy_id: str = ""
    #: Steps of an episode after which they are sent, though it goes on; large ones in parts.
    fragment_length: int = 64
    #: Steps of all episodes that may wait to be sent.
    max_unsent: int = 10_000
    #: What the policy is told.
    explore: bool = True

    def __post_init__(self) -> None:
        for name in ("fragment_length", "max_unsent"):
            check_number(name, getattr(self, name), whole=True, least=1)


class Answered(NamedTuple):
    """What a policy has done with one observation of an episode."""

    #: Element of the action space; with several agents by agent.
    action: Element
    policy_version: int
    #: As `FragmentStep.extras`.
    extras: Value


class LocalPolicy:
    """One policy for all agents of a client.

    Args:
        policy: It, or what makes it.
        observation_space: Of the agent, or an `AgentSpaces` of alike ones.
        action_space: The same.
        explore: What it is told.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(
        self,
        policy: PolicyOrFactory,
        observation_space: Space,
        action_space: Space,
        *,
        explore: bool = True,
    ) -> None:
        is_policy = hasattr(policy, "compute_actions") and not isinstance(policy, type)
        self._policy: Any = policy if is_policy else None  # a class makes one
        if self._policy is None and not callable(policy):
            raise ConfigError(
                'inference="client" needs policy=..., which has compute_actions, or is a function '
                f"(observation_space, action_space, weights) that makes such a one, not {policy!r}"
            )
        self._make = policy
        self._spaces = observation_space, action_space
        self._multi_agent = isinstance(observation_space, AgentSpaces)
        self._explore = explore
        #: Of the weights it has; -1: none yet.
        self.version = -1
        self._states: dict[str, dict[Any, Any]] = {}

    def take(self, model: Model) -> bool:
        """Take over a model, if it is one; return whether it did.

        Raises:
            ConfigError: The policy cannot be made of it.
            Exception: What the policy's `set_weights` raises; the one before is kept.
        """
        if model.onnx is not None:
            weights: Any = {"model": model.onnx}
        elif model.weights is not None:
            weights = opened(model.weights)
        else:
            return False
        if self._policy is None:
            observation, action = (self._one_of(space) for space in self._spaces)
            made = self._make(observation, action, weights)
            if not hasattr(made, "compute_actions"):
                raise ConfigError(f"the function given as policy returned {made!r:.80}")
            made.set_weights(weights, model.version)
            self._policy = made
        else:
            self._policy.set_weights(weights, model.version)
        self.version = model.version
        return True

    def answer(self, episode_id: str, observation: Element, done: Mapping[Any, bool]) -> Answered:
        """Choose what an episode does; `done`: agents that are not asked."""
        if not self._multi_agent:
            action, extras = self._ask(episode_id, None, observation)
            return Answered(action, self.version, extras)
        both = {
            agent: self._ask(episode_id, agent, own)
            for agent, own in observation.items()
            if not done.get(agent)
        }
        return Answered(
            {agent: action for agent, (action, _) in both.items()},
            self.version,
            {agent: extras for agent, (_, extras) in both.items()},
        )

    def end(self, episode_id: str) -> None:
        """Forget the states of an episode."""
        self._states.pop(episode_id, None)

    def _ask(self, episode_id: str, agent: Any, observation: Element) -> tuple[Element, Any]:
        policy, spaces = self._policy, self._spaces
        if self._multi_agent:
            assert isinstance(spaces[0], AgentSpaces)
            assert isinstance(spaces[1], AgentSpaces)
            spaces = spaces[0].spaces[agent], spaces[1].spaces[agent]
        fixed = is_fixed_size(spaces[0]) and is_fixed_size(spaces[1])
        initial = policy.initial_state() if hasattr(policy, "initial_state") else None
        states = None
        if initial is not None:
            states = _row(self._states.get(episode_id, {}).get(agent, initial))
            before = _first(states)
        out = policy.compute_actions(
            _row(observation) if fixed else _objects(observation), states, explore=self._explore
        )
        action = _first(out.actions) if fixed else out.actions[0]
        extras = {name: _first(values) for name, values in out.extras.items()}
        if states is not None:
            after = _first(out.states)
            extras |= {"state_in": before, "state_out": after}
            self._states.setdefault(episode_id, {})[agent] = after
        return action, {name: to_wire(value) for name, value in extras.items()}

    def _one_of(self, space: Space) -> Space:
        """Return what the policy is made for: with several agents, the first one's."""
        return next(iter(space.spaces.values())) if isinstance(space, AgentSpaces) else space


def _row(tree: Any) -> Any:
    """Return rows `(1, ...)` of one element, in new memory."""
    if isinstance(tree, dict):
        return {key: _row(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_row(part) for part in tree)
    return np.array(tree)[np.newaxis]


def _first(tree: Any) -> Any:
    """Return the first row, in new memory: a policy may use its arrays again."""
    if isinstance(tree, dict):
        return {key: _first(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_first(part) for part in tree)
    return np.array(np.asarray(tree)[0])


def _objects(element: Element) -> Any:
    rows = np.empty(1, object)
    rows[0] = element
    return rows
