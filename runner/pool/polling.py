"""The dict side of `ActorPool`: results and actions by env and agent, as RLlib's BaseEnv has them.

Leaves out what may be asked when (`pool_core.py`), and what is held back for agents without an
observation (`agent_results.py`).
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium

from envbus.actors.arrays.copies import own
from envbus.actors.arrays.packing import pack_by_agent
from envbus.actors.spaces import spaces
from envbus.actors.spaces.agent_spaces import AgentID, AgentSpaces, RecordSpace
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.engine.env_calls import SubEnvironment
from envbus.runner.engine.env_states import EnvState
from envbus.runner.errors import Fault
from envbus.runner.pool.agent_results import (
    DUMMY_AGENT,
    HeldBack,
    PollResult,
    single_record,
)
from envbus.runner.pool.pool_core import PoolCore

__all__ = ["DictSide"]

#: By agent: its observation and action space.
_AskedSpaces: TypeAlias = dict[AgentID, list[gymnasium.Space[Any]]]

logger = logging.getLogger("envbus.runner.pool.polling")


class DictSide:
    """Does what `ActorPool` promises by env and agent.

    Args:
        core: The envs, and what both sides of the pool share.
        observation_space: Of one env.
        action_space: Of one env.
    """

    def __init__(
        self,
        core: PoolCore,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self._core = core
        self._spaces = observation_space, action_space
        self._is_multi_agent = isinstance(observation_space, RecordSpace)
        self._states = core.states
        self._results = core.results
        self._faults = core.faults
        #: By env: what is held back, and in which episode.
        self._held_back: dict[int, tuple[tuple[int, int], HeldBack]] = {}
        #: By env: an episode, and spaces of agents that were asked for in it and in the one before,
        #: as the env did not name them beforehand.
        self._asked_spaces: dict[int, tuple[tuple[int, int], _AskedSpaces, _AskedSpaces]] = {}
        self._polled = False
        self._told_of_idle_agents = False

    def poll(
        self, timeout: float | None, min_envs: int | None, batch_wait: float | None
    ) -> PollResult:
        """Return what envs have, once enough are ready."""
        num_envs = len(self._states)
        check_number("timeout", timeout, optional=True)
        check_number("batch_wait", batch_wait, least=0.0, optional=True)
        check_number("min_envs", min_envs, whole=True, least=1, most=num_envs, optional=True)
        if self._core.unpolled:
            return self._core.unpolled.pop()
        if not self._polled:
            self._polled = True
            idle = self._states.those(EnvState.IDLE)
            if new := [env_id for env_id in idle if self._core.episode(env_id) == (0, 0)]:
                self._core.reset(env_ids=new)
        wanted = min_envs or (1 if batch_wait is None else num_envs)
        late = self._core.wait_for("poll", wanted, timeout, batch_wait)
        seen = self._observations(self._states.ready)
        self._states.receive(len(seen))
        result = self._result(seen, self._faults.take(), late)
        self._core.engine.recycle()  # before the caller can reset those whose episodes have ended
        return result

    @uninterrupted_call
    def send_actions(self, actions: Mapping[int, Mapping[Any, Any]]) -> None:
        """Ask envs to step."""
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"actions are a dict of dicts, {{0: {{'agent0': 1}}}}, not {actions!r:.80}"
            )
        chosen = self._core.check_env_ids(list(actions))
        self._core.placement.check_vector_groups(chosen)
        for env_id in chosen:
            self._check_actions(env_id, actions[env_id])
        active = self._states.idle(chosen)
        # Copies: what is sent must not change under the sender's hands.
        if self._is_multi_agent:
            self._core.engine.step(active, actions, functools.partial(pack_by_agent, copy=True))
        else:
            self._core.engine.step(active, {i: own(actions[i][DUMMY_AGENT]) for i in active})

    def take_first(self, env_ids: Sequence[int], timeout: float | None) -> PollResult:
        """Wait for the first observations of these envs' new episodes, and take them."""
        states, engine, faults = self._states, self._core.engine, self._faults
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if any(states[i] is EnvState.HELD for i in env_ids):
            engine.stop_holding()  # others cannot go on while the caller waits
        faults.raise_next()
        while late := [i for i in states.late() if i in env_ids]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise multiprocessing.TimeoutError(
                    f"envs {late} were not reset within {timeout} s; `poll` returns them later"
                )
            engine.take_events(left)
            faults.raise_next()
        for i in env_ids:
            if states[i] is EnvState.LOST:
                raise faults.loss(i)
        seen = self._observations(env_ids)
        for i in env_ids:
            states.take(i)
        return self._result(seen, faults=[], late=[])

    @uninterrupted_call
    def try_restart(self, env_id: int | None) -> None:
        """Have an env, or all, made anew."""
        core = self._core
        asked = range(len(self._states)) if env_id is None else [env_id]
        chosen = core.check_env_ids(
            sorted({j for i in asked for j in core.placement.vector_groups.get(i, [i])}),
            is_restart=True,
        )
        # Those that recover are being made anew already.
        chosen = [i for i in chosen if self._states[i] is not EnvState.RECOVERING]
        for i in chosen:
            self._states.recover(i)
        self._faults.incarnations.begin(chosen)
        self._core.engine.remake([range(i, i + 1) for i in chosen])

    def agent_ids(self) -> set[AgentID]:
        """Return the agents that the envs name beforehand."""
        action = self._spaces[1]
        return set(action.spaces) if isinstance(action, AgentSpaces) else {DUMMY_AGENT}

    def agent_spaces(
        self, agent_id: AgentID, env: SubEnvironment
    ) -> Sequence[gymnasium.Space[Any]]:
        """Return an agent's observation and action space, for which `env` is asked if need be."""
        observation, action = self._spaces
        if not isinstance(observation, AgentSpaces) or not isinstance(action, AgentSpaces):
            if agent_id != DUMMY_AGENT:
                raise KeyError(f"envs with one agent call it {DUMMY_AGENT!r}, not {agent_id!r}")
            return self._spaces
        if agent_id in observation.spaces:
            return observation[agent_id], action[agent_id]
        episode = self._core.episode(env.env_id)
        known = self._asked_spaces.get(env.env_id)
        if known is None or known[0] != episode:
            known = self._asked_spaces[env.env_id] = episode, {}, {} if known is None else known[1]
        _, asked, before = known
        if agent_id not in asked:
            found = [spaces.from_plain(plain) for plain in env.call("agent_spaces", agent_id)]
            if before.get(agent_id) == found:
                found = before[agent_id]  # with the state of their random generators
            asked[agent_id] = found
        return asked[agent_id]

    # --- private -----------------------------------------------------------------------------

    def _observations(self, env_ids: Iterable[int]) -> dict[int, Any]:
        """Return what is the caller's to be, before it is taken: there may be no memory for it."""
        return {env_id: self._results.observations.single(env_id) for env_id in env_ids}

    def _result(self, seen: Mapping[int, Any], faults: list[Fault], late: list[int]) -> PollResult:
        """Return what envs have brought, by env with its observation."""
        incarnations = self._faults.incarnations.numbers
        return PollResult.of(
            {
                env_id: self._take_record(env_id, observation)
                for env_id, observation in seen.items()
            },
            faults=faults,
            late=late,
            incarnations={env_id: int(incarnations[env_id]) for env_id in seen},
        )

    def _take_record(self, env_id: int, observation: Any) -> dict[str, Any]:
        info = self._results.take_info(env_id)
        if not self._is_multi_agent:
            blocks = self._results.blocks
            terminated = bool(blocks.terminations[env_id])
            truncated = bool(blocks.truncations[env_id])
            reward = float(blocks.rewards[env_id])
            return single_record(observation, reward, terminated, truncated, info)
        episode = self._core.episode(env_id)
        held = self._held_back.get(env_id)
        if held is None or held[0] != episode:
            held = self._held_back[env_id] = (episode, HeldBack())
        record = held[1].settle(observation)
        is_idle = not record["observations"] and not self._results.has_ended(env_id)
        if is_idle and not self._told_of_idle_agents:
            self._told_of_idle_agents = True
            logger.warning(
                "env %d: no agent has an observation, so that none can act; step it by an empty "
                "dict, as in send_actions({%d: {}}). This is said once.",
                env_id,
                env_id,
            )
        return record

    def _check_actions(self, env_id: int, actions: object) -> None:
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"the actions of env {env_id} must be a dict by agent, not a "
                f"{type(actions).__qualname__}"
            )
        if self._core.episode(env_id) == (0, 0):
            raise ValueError(f"Env {env_id} has not been reset: call `poll` or `try_reset` first")
        settled = self._states[env_id] in (EnvState.IDLE, EnvState.HELD)
        if settled and self._results.has_ended(env_id):
            raise ValueError(
                f"Env {env_id} is already done and cannot accept new actions; call "
                f"try_reset({env_id}) first"
            )
        if not self._is_multi_agent and list(actions) != [DUMMY_AGENT]:
            raise ValueError(
                f"env {env_id} has one agent, {DUMMY_AGENT!r}; the actions are for {list(actions)}"
            )
