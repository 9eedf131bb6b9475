"""The dict side of `ActorPool`: results and actions by env and agent, as RLlib's BaseEnv has them.

A part of the pool, which asks envs and takes their answers (`pool.py`). Leaves out what is held
back for agents without an observation (`agent_results.py`).
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from envbus.actors.copies import own
from envbus.actors.packing import pack_by_agent
from envbus.actors.protocol import Step
from envbus.bus.errors import ConfigError
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.messages import Tree
from envbus.runner.agent_results import (
    ASYNC_RESET,
    DUMMY_AGENT,
    HeldBack,
    PollResult,
    single_record,
)
from envbus.runner.engine import slots_of
from envbus.runner.env_results import EnvResults
from envbus.runner.env_states import EnvState
from envbus.runner.sub_environments import SubEnvironments

__all__ = ["DictSide"]

logger = logging.getLogger("envbus.runner.polling")

#: Longest single wait, in seconds; without a time-out the pool waits again.
_LONGEST_WAIT = 3600.0


class DictSide(SubEnvironments):
    """What `ActorPool` offers by env and agent.

    For pools with `autoreset_mode="Disabled"`: who polls resets envs whose episode is over. Envs
    with one agent appear with the agent `"agent0"`.

        with ActorPool(["pettingzoo.butterfly.pistonball_v6:parallel_env"] * 4,
                       autoreset_mode="Disabled") as pool:
            for _ in range(1000):
                observations, _, terminateds, truncateds, _, _ = pool.poll()
                for env_id, seen in observations.items():
                    if terminateds[env_id]["__all__"] or truncateds[env_id]["__all__"]:
                        pool.try_reset(env_id)
                    else:
                        pool.send_actions({env_id: policy(seen)})
    """

    #: Of the batch, as in a vector env; of one env, by agent, where envs have several agents.
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    # The pool's.
    autoreset_mode: AutoresetMode
    _results: EnvResults
    _assert_awaited: Callable[[str], None]
    _check_env_ids: Callable[[Sequence[int]], list[int]]
    reset: Callable[..., None]
    close: Callable[..., None]

    def _set_up_dict_side(self) -> None:
        self._set_up_sub_environments()
        if self.is_multi_agent:  # nobody batches dicts by agent
            self.observation_space = self.single_observation_space
            self.action_space = self.single_action_space
        self._held_back = [HeldBack() for _ in range(self.num_envs)]
        #: Envs whose first episode has begun, or was asked for.
        self._begun: set[int] = set()
        self._polled = False
        #: What Ctrl-C kept from the caller of `poll`, or of `try_reset`.
        self._unpolled: list[PollResult] = []
        self._told_of_idle_agents = False

    def poll(
        self,
        timeout: float | None = None,
        *,
        min_envs: int | None = None,
        batch_wait: float | None = None,
    ) -> PollResult:
        """Wait for envs to be ready, and return what they have, by env and agent.

        The first call resets the envs that were not reset before. Returns as soon as `min_envs`
        envs are ready; or `batch_wait` seconds after the first one was; or when none is awaited any
        more, when an env has failed, or when `timeout` is over. It waits without spinning.

        Args:
            timeout: Seconds; None: until the requests' own deadlines.
            min_envs: None: as many as are awaited, if there is a `batch_wait`, else 1.
            batch_wait: Seconds to wait for more once one env is ready; None: no limit.

        Returns:
            A tuple of six dicts `{env_id: {agent_id: value}}`: observations, rewards, terminateds,
            truncateds, infos, off-policy actions. Rewards of an agent without an observation are
            added up and its flags OR-ed until its next one, or the episode's end. All is the
            caller's own.

        Raises:
            ConfigError: The pool resets its envs itself.
            NoAsyncCallError: Nothing is awaited: each env waits for `send_actions` or `try_reset`.
            Exception: What an env raised, or what became of its actor, as `recv` raises it.
        """
        self._assert_dict_side()
        if min_envs is not None and not 1 <= min_envs <= self.num_envs:
            raise ValueError(f"min_envs must be from 1 to {self.num_envs}, not {min_envs}")
        return hand_out(lambda: self._poll(timeout, min_envs, batch_wait), self._unpolled.append)

    def _poll(
        self, timeout: float | None, min_envs: int | None, batch_wait: float | None
    ) -> PollResult:
        """Do what `poll` promises."""
        if self._unpolled:
            return self._unpolled.pop()
        if not self._polled:
            self._polled = True
            new = [i for i in self._states.those(EnvState.IDLE) if i not in self._begun]
            if new:
                self.reset(env_ids=new)
        self._assert_awaited("poll")
        wanted = min_envs or (1 if batch_wait is None else self.num_envs)
        timed_out = self._wait_for(wanted, batch_wait, timeout)
        self._faults.raise_next()
        faults = self._faults.take()
        for fault in faults:
            self._held_back[fault.env_id].clear()
        env_ids = self._states.receive(self._states.num_ready)
        records = {env_id: self._take_record(env_id) for env_id in env_ids}
        result = PollResult.of(
            records,
            faults=faults,
            late=self._states.late() if timed_out else [],
            incarnations={env_id: int(self._faults.lives.numbers[env_id]) for env_id in env_ids},
        )
        self._engine.recycle()  # before the caller can reset those whose episodes have ended
        return result

    @uninterrupted_call
    def fileno(self) -> int:
        """Return a descriptor to wait for beside others.

        Where it is readable call `recv(timeout=0.0)`, or `poll(0.0)`, and wait again only after
        that has brought nothing. It tells of what envs send; for deadlines and restarts make that
        call now and then in any case, each second for example.

        Raises:
            ClosedEnvironmentError: The pool was closed.
        """
        self._assert_open()
        self._engine.use_messages()
        return self._fleet.fileno()

    @uninterrupted_call
    def send_actions(self, actions: Mapping[int, Mapping[Any, Any]]) -> None:
        """Ask envs to step by `{env_id: {agent_id: action}}`; `poll` returns what comes of it.

        An env none of whose agents acts is stepped by an empty dict. Envs that failed meanwhile
        are skipped: their next episode begins by itself.

        Raises:
            ValueError: An env is unknown, done or not reset yet, or an env with one agent got no
                action for it. Nothing was sent.
            TypeError: An env's actions are no dict. Nothing was sent.
            AlreadyPendingCallError: An env has not been polled since it was asked. Nothing was
                sent.
            ActorLostError, RestartLimitError: The actor of one of the envs is gone for good.
                Nothing was sent.
        """
        self._assert_dict_side()
        chosen = self._check_env_ids(list(actions))
        self._roster.check_company(chosen)
        for env_id in chosen:
            self._check_actions(env_id, actions[env_id])
        active = [i for i in chosen if self._states[i] is EnvState.IDLE]
        for actor, members in self._roster.by_actor(active):
            # Copies: what is sent must not change under the sender's hands.
            if self.is_multi_agent:
                given = pack_by_agent([actions[env_id] for env_id in members], copy=True)
            else:
                given = [own(actions[env_id][DUMMY_AGENT]) for env_id in members]
            request = Step(slots=slots_of(actor, members), actions=Tree(given))
            self._engine.ask(actor, request, members, self.timeouts.step)

    def try_reset(
        self,
        env_id: int | None = None,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> tuple[Any, Any]:
        """Begin a new episode of one env, or of all.

        Args:
            env_id: Which; None: all, and what they were asked before is dropped.
            seed: Of this env; of all envs: env i gets `seed + i`.
            options: Handed to the env.
            wait: Return the first observation instead of leaving it to `poll`.
            timeout: Seconds to wait; None: until the reset's own deadline.

        Returns:
            `ASYNC_RESET` twice; with `wait`, observations and infos as `{env_id: {agent_id: ...}}`.

        Raises:
            multiprocessing.TimeoutError: The time-out is over; `poll` will return the observation.
            Exception: As `ActorPool.reset`; with `wait` also as `poll`.
        """
        self._assert_dict_side()
        if env_id is None:
            named: Sequence[int] = range(self.num_envs)
            self.reset(seed, options)
        else:
            named = [env_id]
            self.reset([seed], options, env_ids=named)
        if not wait:
            return ASYNC_RESET, ASYNC_RESET
        first = hand_out(lambda: self._take_first(named, timeout), self._unpolled.append)
        return first.observations, first.infos

    def _take_first(self, named: Sequence[int], timeout: float | None) -> PollResult:
        """Wait for the first observations of these envs' new episodes, and take them."""
        self._wait_for_first(named, timeout)
        records = {}
        for i in named:
            if self._states[i] is EnvState.LOST:
                raise self._faults.loss(i)
            self._states.take(i)
            records[i] = self._take_record(i)
        lives = self._faults.lives.numbers
        return PollResult.of(
            records, faults=[], late=[], incarnations={i: int(lives[i]) for i in named}
        )

    @uninterrupted_call
    def try_restart(self, env_id: int | None = None) -> None:
        """Close an env, or all, and make it anew in its actor; `poll` returns what it begins with.

        It has the next incarnation then, and a seed derived from its last one. Envs that are one
        vector env are made anew together.

        Raises:
            AlreadyPendingCallError: The env has not been polled since it was asked.
            ActorLostError, RestartLimitError: Its actor is gone for good.
        """
        self._assert_dict_side()
        asked = range(self.num_envs) if env_id is None else [env_id]
        chosen = self._check_env_ids(
            sorted({j for i in asked for j in self._roster.company.get(i, [i])})
        )
        # Those that recover are being made anew already.
        chosen = [i for i in chosen if self._states[i] is not EnvState.RECOVERING]
        for i in chosen:
            self._states.recover(i)
        self._faults.lives.begin(chosen)
        self._begin_episodes(chosen)
        self._engine.remake([range(i, i + 1) for i in chosen])

    def stop(self) -> None:
        """Close all envs and end their processes. Idempotent; the same as `close`."""
        self.close()

    # --- private -----------------------------------------------------------------------------

    def _begin_episodes(self, env_ids: Sequence[int]) -> None:
        """The caller has asked for these envs' next episodes."""
        self._begun.update(env_ids)
        for env_id in env_ids:
            self._held_back[env_id].clear()
            self._episodes[env_id] += 1

    def _wait_for(self, wanted: int, batch_wait: float | None, timeout: float | None) -> bool:
        """Return once enough envs are ready; whether the time-out was what ended it."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        batch_ends_at = math.inf
        self._engine.take_news(0.0)
        states = self._states
        while states.num_ready < wanted and states.awaited():
            if self._faults.any():
                break
            now = time.monotonic()
            if states.num_ready and batch_wait is not None:
                batch_ends_at = min(batch_ends_at, now + batch_wait)
            if now >= batch_ends_at:
                break
            if now >= deadline:
                return True
            self._engine.take_news(min(deadline - now, batch_ends_at - now, _LONGEST_WAIT))
        return False

    def _wait_for_first(self, env_ids: Sequence[int], timeout: float | None) -> None:
        """Wait for the first observations of these envs' new episodes."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if any(self._states[i] is EnvState.HELD for i in env_ids):
            self._engine.stop_holding()  # others cannot go on while the caller waits
        while True:
            self._faults.raise_next()
            late = [i for i in self._states.late() if i in env_ids]
            if not late:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise multiprocessing.TimeoutError(
                    f"envs {late} were not reset within {timeout} s; `poll` returns them later"
                )
            self._engine.take_news(min(left, _LONGEST_WAIT))

    def _take_record(self, env_id: int) -> dict[str, Any]:
        """Return what an env has brought."""
        self._begun.add(env_id)
        info = self._results.take_info(env_id)
        observation = self._results.observations.single(env_id)
        if not self.is_multi_agent:
            blocks = self._results.blocks
            terminated = bool(blocks.terminations[env_id])
            truncated = bool(blocks.truncations[env_id])
            reward = float(blocks.rewards[env_id])
            return single_record(observation, reward, terminated, truncated, info)
        record = self._held_back[env_id].settle(observation)
        if not record["observations"] and not self._results.has_ended(env_id):
            self._tell_of_idle_agents(env_id)
        return record

    def _tell_of_idle_agents(self, env_id: int) -> None:
        if not self._told_of_idle_agents:
            self._told_of_idle_agents = True
            logger.warning(
                "env %d: no agent has an observation, so that none can act; step it by an empty "
                "dict, as in send_actions({%d: {}}). This is said once.",
                env_id,
                env_id,
            )

    def _check_actions(self, env_id: int, actions: object) -> None:
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"the actions of env {env_id} must be a dict by agent, not a "
                f"{type(actions).__qualname__}"
            )
        if env_id not in self._begun:
            raise ValueError(f"Env {env_id} has not been reset: call `poll` or `try_reset` first")
        settled = self._states[env_id] in (EnvState.IDLE, EnvState.HELD)
        if settled and self._results.has_ended(env_id):
            raise ValueError(
                f"Env {env_id} is already done and cannot accept new actions; call "
                f"try_reset({env_id}) first"
            )
        if not self.is_multi_agent and list(actions) != [DUMMY_AGENT]:
            raise ValueError(
                f"env {env_id} has one agent, {DUMMY_AGENT!r}; the actions are for {list(actions)}"
            )

    def _assert_dict_side(self) -> None:
        self._assert_open()
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                "by env and agent, the caller resets envs whose episodes are over: make the pool "
                f'with autoreset_mode="Disabled", not {self.autoreset_mode.value!r}'
            )
