"""The envs of an `ActorPool` one by one: their methods, attributes, frames, agents and spaces.

A part of the pool, which may step other envs meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import gymnasium

from envbus.actors import spaces
from envbus.actors.agent_spaces import AgentID, AgentSpaces, RecordSpace
from envbus.actors.copies import own
from envbus.actors.protocol import Call, CallResult, Exec, SetAttr
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.messages import Request, Tree
from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.config import Timeouts
from envbus.runner.engine import Engine
from envbus.runner.env_calls import EnvCalls
from envbus.runner.env_faults import EnvFaults
from envbus.runner.env_roster import EnvRoster
from envbus.runner.env_states import EnvState, EnvStates
from envbus.runner.faults import raise_env_errors
from envbus.runner.local_fleet import AnyFleet

__all__ = ["SubEnvironment", "SubEnvironments"]

#: Longest single wait, in seconds; the request's deadline ends it.
_LONGEST_WAIT = 3600.0


class SubEnvironment:
    """One env of a pool, in its actor.

    Its methods wait for the answer, and for the end of a step of the same actor that is under
    way. They raise what the env raises; `ActorLostError` if its actor is not there now;
    `RequestTimeoutError` after `timeouts.call`.

    Attributes:
        env_id: Its number in the pool.
    """

    def __init__(self, pool: SubEnvironments, env_id: int) -> None:
        self._pool = pool
        self.env_id = env_id

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, or read an attribute; looks through wrappers."""
        positional, named = Tree(own(args)), Tree(own(kwargs))
        return self._pool._ask_one(
            self.env_id,
            lambda slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    def get_attr(self, name: str) -> Any:
        """Return an attribute; one that is a method is called without arguments."""
        return self.call(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute."""
        values = Tree([own(value)])
        self._pool._ask_one(
            self.env_id, lambda slots: SetAttr(name=name, values=values, slots=slots)
        )

    def exec_func(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `func(env, *args, **kwargs)`, run beside the env; local actors only."""
        what, positional, named = Tree(func), Tree(own(args)), Tree(own(kwargs))
        return self._pool._ask_one(
            self.env_id,
            lambda slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def render(self) -> Any:
        """Return what the env draws."""
        return self.call("render")

    def __repr__(self) -> str:
        return f"SubEnvironment({self.env_id})"


class SubEnvironments:
    """What `ActorPool` offers about single envs."""

    # The pool's.
    num_envs: int
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    timeouts: Timeouts
    _fleet: AnyFleet
    _roster: EnvRoster
    _engine: Engine
    _faults: EnvFaults
    _states: EnvStates
    _assert_open: Callable[[], None]

    def _set_up_sub_environments(self) -> None:
        self._calls = EnvCalls(self._fleet, self._engine, self._roster, self._faults)
        #: Spaces of agents that the env did not name beforehand, by env and agent, and the
        #: episode in which they were asked for.
        self._asked_spaces: dict[tuple[int, AgentID], tuple[Any, list[gymnasium.Space[Any]]]] = {}
        #: By env: how many episodes its caller has begun.
        self._episodes = [0] * self.num_envs

    @property
    def is_multi_agent(self) -> bool:
        """Whether the envs have several agents."""
        return isinstance(self.single_observation_space, RecordSpace)

    def get_sub_environments(self) -> list[SubEnvironment]:
        """Return one proxy per env, in their order."""
        return [SubEnvironment(self, env_id) for env_id in range(self.num_envs)]

    def try_render(self, env_id: int | None = None) -> Any:
        """Return the frame of one env, or a list of those of all; errors as in `SubEnvironment`."""
        if env_id is None:
            return [env.render() for env in self.get_sub_environments()]
        return SubEnvironment(self, env_id).render()

    def get_agent_ids(self) -> set[AgentID]:
        """Return the agents that an env may have, as far as it names them before its reset."""
        if isinstance(self.single_action_space, AgentSpaces):
            return set(self.single_action_space.spaces)
        return {DUMMY_AGENT}

    def get_observation_space(self, agent_id: AgentID, env_id: int = 0) -> gymnasium.Space[Any]:
        """Return an agent's space: the same object each time within an episode.

        For agents that the envs named beforehand the same object for ever, and for all envs.
        Others are asked for, of this env.

        Raises:
            KeyError: As the env has it, if it knows no such agent.
        """
        return self._agent_spaces(agent_id, env_id)[0]

    def get_action_space(self, agent_id: AgentID, env_id: int = 0) -> gymnasium.Space[Any]:
        """Return an agent's space; as `get_observation_space` else."""
        return self._agent_spaces(agent_id, env_id)[1]

    def _agent_spaces(self, agent_id: AgentID, env_id: int) -> list[gymnasium.Space[Any]]:
        observation, action = self.single_observation_space, self.single_action_space
        if not isinstance(observation, AgentSpaces) or not isinstance(action, AgentSpaces):
            if agent_id != DUMMY_AGENT:
                raise KeyError(f"envs with one agent call it {DUMMY_AGENT!r}, not {agent_id!r}")
            return [observation, action]
        if agent_id in observation.spaces:
            return [observation[agent_id], action[agent_id]]
        episode = (self._episodes[env_id], int(self._faults.lives.numbers[env_id]))
        known = self._asked_spaces.get((env_id, agent_id))
        if known is not None and known[0] == episode:
            return known[1]
        told = SubEnvironment(self, env_id).call("agent_spaces", agent_id)
        found = [spaces.from_plain(plain) for plain in told]
        if known is not None and known[1] == found:
            found = known[1]  # with the state of their random generators
        self._asked_spaces[env_id, agent_id] = (episode, found)
        return found

    @uninterrupted_call
    def _ask_one(self, env_id: int, make: Callable[[list[int]], Request[CallResult]]) -> Any:
        """Ask an env's actor something about that env alone, and wait for the answer."""
        self._assert_open()
        env_id = operator.index(env_id)
        if not 0 <= env_id < self.num_envs:
            raise ValueError(f"unknown env id {env_id}; there are envs 0 to {self.num_envs - 1}")
        if self._states[env_id] is EnvState.LOST:
            raise self._faults.loss(env_id)
        asked = self._calls.ask([env_id], lambda _, slots: make(slots), wait=False)
        self._calls.wait(asked)
        self._calls.raise_loss(asked)
        for error, original in asked.errors:
            raise_env_errors([error], [original])
        return asked.values[env_id]
