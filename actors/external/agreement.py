"""What a bridge and its clients agree upon when they meet: the spaces, of one agent or of several.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from envbus.actors.env.agents import ALL
from envbus.actors.external.elements import Take, opened, taker
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import Value
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.spaces import Element, Space, from_plain, shown, to_plain
from envbus.bus.brief import brief, cut
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.bus.wire.limits import MAX_DEPTH

__all__ = ["Agreement", "SpaceLike", "element_cost"]

#: What a codec nests values in.
_NESTED: Final = (dict, list, tuple)
#: Spaces within each other or beside each other, and agents, that somebody may tell us.
_MAX_SPACES: Final = 4096
_MAX_AGENTS: Final = 1024
#: Characters of an agent's id: each row has it, at its full length.
_MAX_ID_CHARS: Final = 256
#: Characters of all strings in what they tell, most of which are those that a Text may have.
_MAX_CHARACTERS: Final = 2**17
#: What an element may cost (`element_cost`), of all agents together. `sample` takes 2 s for that.
_MAX_COST: Final = 2**24
#: What a character of a Text costs, and any space besides its numbers, if a number costs 1.
_CHARACTER_COST: Final = 16
_SPACE_COST: Final = 256
#: Characters of a space in an error.
_LONGEST: Final = 1000

#: One agent's space, or those of several by agent.
SpaceLike: TypeAlias = "Space | Mapping[Any, Space]"


class Agreement:
    """The spaces of one bridge.

    Args:
        observation_space: Of the one agent, or by agent.
        action_space: The same.

    Attributes:
        multi_agent: Whether values are dicts by agent.
        observation_space: As given; an `AgentSpaces` where there are several agents.
        action_space: The same.
        described: How a client tells them, with bounds as arrays.

    Raises:
        ConfigError: The two are not of the same agents, or a space has no form on the wire.
    """

    observation_space: Space
    action_space: Space

    def __init__(self, observation_space: SpaceLike, action_space: SpaceLike) -> None:
        observations, actions = _by_agent(observation_space), _by_agent(action_space)
        if (observations is None) != (actions is None):
            raise ConfigError("give both spaces by agent, or neither")
        self.multi_agent = observations is not None
        if observations is not None and actions is not None:
            if observations.keys() != actions.keys():
                raise ConfigError(
                    f"the observation spaces are those of {sorted(map(str, observations))}, the "
                    f"action spaces those of {sorted(map(str, actions))}"
                )
            observation_space, action_space = AgentSpaces(observations), AgentSpaces(actions)
        assert isinstance(observation_space, gymnasium.Space)
        assert isinstance(action_space, gymnasium.Space)
        self.observation_space, self.action_space = observation_space, action_space
        self.described = _describe(observation_space), _describe(action_space)
        self._observation = _taker(observation_space)
        self._action = _taker(action_space)

    @cached_property
    def wire(self) -> tuple[Value, Value]:
        """How a bridge tells them: without ext types, so with nested lists for arrays."""
        observation_space, action_space = self.described
        return _listed(observation_space), _listed(action_space)

    @classmethod
    def of(
        cls, observation_space: SpaceLike | None, action_space: SpaceLike | None
    ) -> Agreement | None:
        """Return that of spaces that need not be given; None: they are not.

        Raises:
            ConfigError: Only one is given; or as the class.
        """
        if observation_space is not None and action_space is not None:
            return cls(observation_space, action_space)
        if observation_space is None and action_space is None:
            return None
        raise ConfigError("give both spaces, or neither: then those of the other side are taken")

    @classmethod
    def from_wire(cls, observation_space: Value, action_space: Value) -> Agreement:
        """Return what `wire` of another one says.

        Raises:
            SpaceMismatchError: It says nothing that can be understood.
        """
        try:
            return cls(_build(observation_space), _build(action_space))
        except (EnvbusError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SpaceMismatchError(f"the spaces cannot be read: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Agreement):
            return NotImplemented
        ours, theirs = self.observation_space, other.observation_space
        return bool(ours == theirs and self.action_space == other.action_space)

    @property
    def agents(self) -> list[Any]:
        """Who acts; empty if there is one agent without a name."""
        space = self.observation_space
        return list(space.spaces) if isinstance(space, AgentSpaces) else []

    def check_equal(self, other: Agreement) -> None:
        """Refuse a client of other spaces.

        Raises:
            SpaceMismatchError: They differ; both are printed.
        """
        for kind in ("observation", "action"):
            ours, theirs = getattr(self, f"{kind}_space"), getattr(other, f"{kind}_space")
            if ours != theirs:
                told = shown(ours, _LONGEST), shown(theirs, _LONGEST)
                raise SpaceMismatchError(
                    f"the bridge has the {kind} space {told[0]}, this client has {told[1]}"
                )

    def take_observation(self, value: Value, place: str) -> Element:
        """Return the observation, by agent where there are several; see `elements.taker`."""
        return self._observation(value, place)

    def take_action(self, value: Value, place: str) -> Element:
        """Return the action, by agent where there are several; see `elements.taker`."""
        return self._action(value, place)


def element_cost(space: Space) -> int:
    """Return what making an element costs, if a number costs 1.

    A few bytes may describe a space whose elements fill memory, or take hours.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple | spaces.OneOf | AgentSpaces):
        parts = space.spaces.values() if isinstance(space.spaces, dict) else space.spaces
        return _SPACE_COST + sum(map(element_cost, parts))
    if isinstance(space, spaces.Sequence):  # a sample has 4 on average
        return _SPACE_COST + 4 * element_cost(space.feature_space)
    if isinstance(space, spaces.Graph):  # a sample has 10 nodes and up to 90 edges
        edge_cost = 0 if space.edge_space is None else element_cost(space.edge_space)
        return _SPACE_COST + 10 * element_cost(space.node_space) + 90 * edge_cost
    if isinstance(space, spaces.Text):
        return _SPACE_COST + _CHARACTER_COST * space.max_length
    shape = space.shape or ()
    if 0 in shape:  # it has no bytes, and is told, and may be sent, as that many lists
        return _SPACE_COST * math.prod(max(size, 1) for size in shape)
    return _SPACE_COST + math.prod(shape)


def _by_agent(space: SpaceLike) -> dict[Any, Space] | None:
    if isinstance(space, AgentSpaces):
        return space.spaces
    if isinstance(space, gymnasium.Space):
        return None
    spaces: dict[Any, Any] = {}
    if hasattr(space, "items"):
        spaces = dict(space)
    if not spaces or not all(isinstance(sub, gymnasium.Space) for sub in spaces.values()):
        raise ConfigError(
            f"expected a Gymnasium space, or a dict of them by agent, not {brief(space)}"
        )
    for agent in spaces:
        if agent == ALL or type(agent) is bool or not isinstance(agent, str | int):
            raise ConfigError(
                f"an agent's id is a string or an integer, and not {ALL!r}: {brief(agent)}"
            )
    return spaces


def _taker(space: Space) -> Take:
    if not isinstance(space, AgentSpaces):
        return taker(space)
    takers = {agent: (agent, taker(sub)) for agent, sub in space.spaces.items()}

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, Mapping):
            raise SpaceMismatchError(
                f"{place}: expected a map by agent, got a {type(value).__name__}"
            )
        taken = {}
        for agent, element in value.items():
            known_as = takers.get(agent)
            if known_as is None:
                known = cut(", ".join(map(str, takers)), _LONGEST)
                raise SpaceMismatchError(
                    f"{place}: no agent {brief(agent)}; the agents are {known}"
                )
            own, take_one = known_as  # 1.0 and True are found as 1, and are called so
            taken[own] = take_one(element, f"{place}[{own!r}]")
        return taken

    return take


def _describe(space: Space) -> Value:
    if isinstance(space, AgentSpaces):
        return {agent: _describe(sub) for agent, sub in space.spaces.items()}
    return _told(to_plain(space))


def _told(plain: Any) -> Value:
    """Return a plain form without the state of random generators."""
    if isinstance(plain, gymnasium.Space):
        raise ConfigError(
            f"{plain} has no form on the wire: use the classes of gymnasium.spaces themselves"
        )
    if isinstance(plain, Mapping):
        return {key: _told(value) for key, value in plain.items() if key != "random"}
    if isinstance(plain, list | tuple):
        return [_told(value) for value in plain]
    return plain


def _listed(plain: Any) -> Value:
    """Return a plain form without arrays."""
    if isinstance(plain, Mapping):
        return {key: _listed(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_listed(value) for value in plain]
    if isinstance(plain, np.ndarray | np.generic):
        return plain.tolist()
    return plain


def _build(value: Value) -> SpaceLike:
    value = opened(value)
    _assert_bounded(value)
    by_agent = value
    if not isinstance(value, Mapping) or isinstance(value.get("space"), str):
        by_agent = {None: value}
    if len(by_agent) > _MAX_AGENTS:
        raise ValueError(f"{len(by_agent)} agents, and at most {_MAX_AGENTS} are allowed")
    for agent in by_agent:
        if isinstance(agent, str) and (len(agent) > _MAX_ID_CHARS or not agent.isprintable()):
            raise ValueError(
                f"an agent's id has at most {_MAX_ID_CHARS} characters, none of them a control "
                f"character, unlike {brief(agent)}"
            )
    built = {agent: from_plain(plain) for agent, plain in by_agent.items()}
    if any(isinstance(space, AgentSpaces) for space in built.values()):
        raise ValueError("several agents are told as a map of their spaces")
    cost = sum(map(element_cost, built.values()))
    if cost > _MAX_COST:
        raise ValueError(f"an element costs {brief(cost)}, and at most {_MAX_COST} is allowed")
    return built if by_agent is value else built[None]


def _assert_bounded(value: Value) -> None:
    """Raise ValueError for what is nested without reason, or made to fill memory."""
    level: list[Any] = [value] if isinstance(value, _NESTED) else []
    spaces = characters = 0
    for _ in range(MAX_DEPTH):
        spaces += sum(isinstance(item, dict) for item in level)
        if spaces > _MAX_SPACES:
            raise ValueError(f"more than {_MAX_SPACES} spaces")
        within = [item.values() if isinstance(item, dict) else item for item in level]
        parts = list(chain.from_iterable(within))
        characters += sum(len(part) for part in parts if isinstance(part, str))
        if characters > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters in strings")
        level = [part for part in parts if isinstance(part, _NESTED)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
