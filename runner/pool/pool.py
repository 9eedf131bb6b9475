"""`ActorPool`: envs that are stepped whenever their actions are there, first ready first served.

Leaves out processes and messages (`workers/fleet.py`), requests (`engine/engine.py`), what envs
have brought (`engine/env_results.py`), what fails (`engine/env_faults.py`), what may be asked when
(`pool_core.py`), and how dicts by agent are put together (`polling.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from typing_extensions import Unpack

from envbus.actors.protocol import MapBlocks
from envbus.actors.spaces.agent_spaces import AgentID, RecordSpace
from envbus.bus.errors import ConfigError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.engine.engine import Engine, Statistics
from envbus.runner.engine.env_calls import EnvCalls, MakeOne, SubEnvironment
from envbus.runner.engine.env_results import Batch, Rows
from envbus.runner.monitoring.registry import unshow
from envbus.runner.pool.agent_results import ASYNC_RESET, PollResult
from envbus.runner.pool.polling import DictSide
from envbus.runner.pool.pool_core import PoolCore
from envbus.runner.vector.vector_spaces import (
    check_equal_spaces,
    choose_spaces,
)
from envbus.runner.workers.actions import ActionStore
from envbus.runner.workers.config import (
    ActorSettings,
    FleetConfig,
    choose_autoreset_mode,
    env_sources,
    with_settings,
)
from envbus.runner.workers.local_fleet import make_fleet

__all__ = ["ActorPool"]


class ActorPool(StaysHere):
    """Env actors that are stepped asynchronously: `send` actions, `recv` whoever is ready.

    A slow env does not hold up the others, apart from those in the same actor: choose
    `num_actors=len(env_fns)` where envs differ much in speed, or wait rather than compute. The
    envs of one vector env step together: they are sent and received as any others, but always
    all of them at once. `EnvRunner` takes no such pool.

        pool = ActorPool(["CartPole-v1"] * 16)
        pool.reset(seed=0)
        while training:
            batch = pool.recv(min_envs=4)
            pool.send(policy(batch.observations), batch.env_ids)

    With `autoreset_mode="Disabled"` also by env and agent, as RLlib's BaseEnv has it: who polls
    resets envs whose episode is over. Envs with one agent appear with the agent `"agent0"`.

        pool = ActorPool(["pettingzoo.butterfly.pistonball_v6:parallel_env"] * 4,
                         autoreset_mode="Disabled")
        while training:
            observations, _, terminateds, truncateds, _, _ = pool.poll()
            for env_id, seen in observations.items():
                if terminateds[env_id]["__all__"] or truncateds[env_id]["__all__"]:
                    pool.try_reset(env_id)
                else:
                    pool.send_actions({env_id: policy(seen)})

    One thread creates, uses and closes it.

    Args:
        env_fns: As in `BusVectorEnv`; with `num_envs` one function of an env's index.
        shared_memory: Exchange arrays of fixed size through shared memory.
        context: None, "fork", "forkserver" or "spawn".
        autoreset_mode: What happens at the end of an episode. DISABLED: reset the env yourself.
        max_concurrency: Most envs that step at one time.
        num_envs: How many envs the function `env_fns` makes; None: it is a sequence.
        all_or_nothing: Raise a `RestartLimitError` when an env is given up, instead of going on
            with the others.
        **settings: About the actors, as of `BusVectorEnv`: `num_actors`, `restart` and all else
            that `ActorSettings` explains.

    Raises:
        ConfigError: A setting cannot be used.
        RuntimeError: The envs' spaces differ; the message names which.
        StartError: An actor did not come up.
        Exception: What an env's constructor raised. No process is left.
    """

    #: Whether infos are merged into one dict of arrays. If not, they are a dict by env of those
    #: that are not empty, as the envs returned them.
    _merges_infos: ClassVar[bool] = True
    #: "same"; "different": of observation spaces only shapes and dtypes have to be equal.
    _observation_mode: ClassVar[str] = "same"

    @with_settings
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any]
        | Callable[[int], gymnasium.Env[Any, Any] | Any]
        | str,
        *,
        shared_memory: bool = True,
        context: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        num_envs: int | None = None,
        all_or_nothing: bool = False,
        **settings: Unpack[ActorSettings],
    ) -> None:
        sources = env_sources("env_fns", env_fns, num_envs, '["CartPole-v1"] * 8')
        if not sources:
            raise ValueError("`env_fns` is empty; pass one factory or id per env")
        self.closed = False
        #: Counts calls that ask envs to go on, or take what came of it: who has made the last one
        #: sees by it that nobody else has used the envs since.
        self.uses = 0
        self.autoreset_mode = choose_autoreset_mode(autoreset_mode)
        self._fleet = make_fleet(
            sources,
            self.autoreset_mode,
            FleetConfig.of(
                settings,
                shared_memory=shared_memory,
                context=context,
                max_concurrency=max_concurrency,
            ),
        )
        self.timeouts = self._fleet.config.timeouts
        # Not `__del__`: see `BusVectorEnv`.
        self._finalizer = weakref.finalize(self, self._fleet.abandon)
        try:
            self._fleet.start()
            self._set_up(all_or_nothing=all_or_nothing)
        except BaseException:
            self.closed = True
            self._fleet.close(terminate=True)
            self._finalizer.detach()
            raise

    def _set_up(self, *, all_or_nothing: bool) -> None:
        fleet = self._fleet
        self.num_envs = fleet.num_envs
        if self._observation_mode == "same":
            check_equal_spaces(fleet.env_spaces())
        spaces = choose_spaces(fleet.env_spaces(), self._observation_mode, shared_memory=False)
        self.single_observation_space = spaces.single_observation_space
        self.single_action_space = spaces.single_action_space
        #: Whether the envs have several agents.
        self.is_multi_agent = isinstance(self.single_observation_space, RecordSpace)
        #: Of the batch, as in a vector env; of one env, by agent, where envs have several agents.
        self.observation_space = spaces.observation_space
        self.action_space = spaces.action_space
        blocks = fleet.map_blocks(self.single_observation_space, self.single_action_space)
        self._actions = ActionStore(self.action_space, self.num_envs, blocks.actions)
        self._everyone = list(range(self.num_envs))
        #: Whether the envs are in this process, and share rows with it.
        self.steps_in_place = fleet.in_place is not None
        self._engine = engine = Engine(
            type(self).__name__,
            fleet,
            self.single_observation_space,
            blocks,
            self.autoreset_mode,
            all_or_nothing=all_or_nothing,
            as_they_come=True,
        )
        self._placement, self._states = engine.placement, engine.states
        self._results, self._faults = engine.results, engine.faults
        self._core = PoolCore(engine)
        self._dict_side = DictSide(
            self._core, self.single_observation_space, self.single_action_space
        )
        self._calls = EnvCalls(engine)
        if self.is_multi_agent:  # nobody batches dicts by agent
            self.observation_space = self.single_observation_space
            self.action_space = self.single_action_space

    # --- batches -----------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Ask envs to begin new episodes; their first observations come from `recv`.

        Args:
            seed: Env i gets `seed + i`; or one seed, or None, for each of `env_ids`.
            options: Handed to each env.
            env_ids: Which envs; None: all, and what they were asked before is dropped. Those
                whose actor died are skipped: their next episode begins by itself, with a seed
                derived from this one.

        Raises:
            ValueError: Unknown env ids, or another number of seeds. Nothing was sent.
            AlreadyPendingCallError: `env_ids` names an env that has not answered yet.
            ActorLostError, RestartLimitError: The actor of one of the envs is gone for good.
                Nothing was sent.
        """
        self._assert_open()
        self.uses += 1
        self._core.reset(seed, options, env_ids)

    @uninterrupted_call
    def send(
        self, actions: Any, env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Ask envs to step; their results come from `recv`.

        Args:
            actions: As many actions as `env_ids`, batched as Gymnasium batches them, or a
                sequence of single actions where their space is no Dict or Tuple: a list of tuples
                would be one part after the other, as in Gymnasium.
            env_ids: Which envs, in the order of the actions; None: all that were not given up.
                Those that failed meanwhile are skipped: their next episode begins by itself.

        Raises:
            ValueError: An unknown env id, another number of actions, or only some envs of one
                vector env. Nothing was sent.
            TypeError: `actions` is not a batch at all, or `env_ids` not of integers.
            AlreadyPendingCallError: An env has not answered yet. Nothing was sent.
            ActorLostError, RestartLimitError: The actor of one of the envs is gone for good.
                Nothing was sent.
        """
        self._assert_open()
        self.uses += 1
        chosen = self._core.check_env_ids(self._left() if env_ids is None else env_ids)
        self._placement.check_vector_groups(chosen)
        rows: npt.NDArray[Any] | None = None
        if env_ids is not None or len(chosen) < self.num_envs:
            rows = env_ids if isinstance(env_ids, np.ndarray) else np.asarray(chosen, np.int64)
        singles = self._actions.store(actions, rows)
        idle = self._states.idle(chosen)
        if self._results.cut is not None and idle:
            self._results.cut.on_send(idle)
        self._engine.step(
            idle, None if singles is None else dict(zip(chosen, singles, strict=True))
        )

    def recv(
        self,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
        *,
        batch_wait: float | None = None,
        copy: bool = True,
        infos: bool = True,
    ) -> Batch:
        """Wait until `min_envs` envs are ready, and return those that are, oldest first.

        Returns early when nothing is pending any more, when an env's actor has died, `batch_wait`
        seconds after the first env was ready, and with fewer rows, or none, when `timeout` is over:
        `late` then names who has not answered.

        Args:
            min_envs: From 1 to `num_envs`.
            max_envs: Most rows; what is over waits for the next call. None: no limit.
            timeout: Seconds; None: until the requests' own deadlines.
            batch_wait: Seconds to wait for `min_envs` once one env is ready; None: no limit.
            copy: False: observations may be views of what the envs write when they are next asked.
            infos: False: the batch has none, and nothing is merged.

        Raises:
            ClosedEnvironmentError: After `close`, also by a signal's handler meanwhile.
            NoAsyncCallError: Nothing is pending, ready or recovering.
            ActorLostError: An actor died and is not started again.
            RestartLimitError: An actor was started again too often.
            multiprocessing.TimeoutError: An env passed the deadline of its step or reset.
            ValueError: The infos of these rows cannot be merged; the next call returns the rows,
                without the info that the message names.
            MemoryError: There is none for these rows; the next call may have fewer (`max_envs`).
            Exception: What an env raised, as its own type where possible.

        Where a remote actor was lost and is to be restarted, it waits until another one joins, for
        as long as `timeout` allows.

        Each error is raised once, and takes nothing away: what other envs returned can be
        received by the next call. Only when no actor is left does each call raise its loss.

        After Ctrl-C the next call returns, or raises, what this one would have, or goes on waiting
        for it.
        """
        self._assert_open()
        self.uses += 1
        if type(min_envs) is not int:  # asked for at each step
            check_number("min_envs", min_envs, whole=True)
        if max_envs is not None:
            check_number("max_envs", max_envs, whole=True)
        if timeout is not None:
            check_number("timeout", timeout)
        if batch_wait is not None:
            check_number("batch_wait", batch_wait, least=0.0)
        if not 1 <= min_envs <= self.num_envs:
            raise ValueError(f"min_envs must be from 1 to {self.num_envs}, not {min_envs}")
        if max_envs is not None and max_envs < min_envs:
            raise ValueError(f"max_envs={max_envs} is less than min_envs={min_envs}")
        return hand_out(
            lambda: self._receive(min_envs, max_envs, timeout, batch_wait, copy=copy, infos=infos),
            self._core.kept.append,
            self._faults.was_raised,
        )

    def _receive(
        self,
        min_envs: int,
        max_envs: int | None,
        timeout: float | None,
        batch_wait: float | None,
        *,
        copy: bool,
        infos: bool,
    ) -> Batch:
        """Do what `recv` promises."""
        if self._core.kept:
            return self._core.kept.pop()
        late = self._core.wait_for("recv", min_envs, timeout, batch_wait)
        states = self._states
        count = len(states.ready) if max_envs is None else min(len(states.ready), max_envs)
        env_ids = states.receive(count)
        try:
            batch = self._results.batch(
                env_ids,
                incarnations=self._faults.incarnations.numbers,
                take_faults=self._faults.take,
                late=late,
                copy=copy,
                with_infos=infos,
                merge=self._merges_infos,
            )
        except MemoryError:
            states.put_back(env_ids)
            raise
        if self._engine.recycling is not None:
            self._engine.recycle()  # before the caller can send to those whose episodes have ended
        if self._results.strange:
            self._engine.let_go(self._results.strange)
            self._results.strange.clear()
        misfit, self._results.misfit = self._results.misfit, None
        if misfit is not None:
            self._core.kept.append(batch)
            raise misfit
        return batch

    def step_in_place(self, actions: Any) -> Rows | None:
        """Step all envs, at once and without the way over `send` and `recv` if that is possible.

        It is where `steps_in_place` holds, every env waits for an action, and no array has to be
        made of the actions first.

        Args:
            actions: Of all envs, as `send` takes them.

        Returns:
            What came of it, without infos. None: `recv` tells it, as after a `send`; also where an
            env has failed, or observations have no fixed size.

        Raises:
            ClosedEnvironmentError: It was closed, also by an env or a signal's handler meanwhile.
            KeyboardInterrupt: As from `recv`, which tells afterwards what came of the step.
            Exception: As from `send`. Nothing was stepped.
        """
        self._assert_open()
        self.uses += 1
        return hand_out(lambda: self._step_in_place(actions), self._offer_again)

    def _step_in_place(self, actions: Any) -> Rows | None:
        fits = self.steps_in_place and self._states.are_all_idle() and not self._core.kept
        if not fits or self._actions.store(actions) is not None:
            self.send(actions)
            return None
        return self._results.rows if self._engine.step_all(self._everyone) else None

    def _offer_again(self, stepped: Rows | None) -> None:
        """Have `recv` tell what a step in place has brought."""
        if stepped is not None:
            self._states.offer(self._everyone)

    # --- by env and agent --------------------------------------------------------------------

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
            MemoryError: There is none for what they have; the next call returns it.
            Exception: What an env raised, or what became of its actor, as `recv` raises it.
        """
        side = self._by_agent()
        return hand_out(
            lambda: side.poll(timeout, min_envs, batch_wait),
            self._core.unpolled.append,
            self._faults.was_raised,
        )

    def send_actions(self, actions: Mapping[int, Mapping[Any, Any]]) -> None:
        """Ask envs to step by `{env_id: {agent_id: action}}`; `poll` returns what comes of it.

        An env none of whose agents acts is stepped by an empty dict. Envs that failed meanwhile
        are skipped: their next episode begins by itself.

        Raises:
            ValueError: An env is unknown, done or not reset yet, or an env with one agent got no
                action for it. Nothing was sent.
            TypeError: Actions, or those of an env, are no dict. Nothing was sent.
            AlreadyPendingCallError: An env has not been polled since it was asked. Nothing was
                sent.
            ActorLostError, RestartLimitError: The actor of one of the envs is gone for good.
                Nothing was sent.
        """
        self._by_agent().send_actions(actions)

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
        side = self._by_agent()
        check_number("timeout", timeout, optional=True)
        named = None if env_id is None else [env_id]
        self._core.reset(seed if named is None else [seed], options, named)
        if not wait:
            return ASYNC_RESET, ASYNC_RESET
        first = hand_out(
            lambda: side.take_first(named or self._everyone, timeout),
            self._core.unpolled.append,
            self._faults.was_raised,
        )
        return first.observations, first.infos

    def try_restart(self, env_id: int | None = None) -> None:
        """Close an env, or all, and make it anew in its actor; `poll` returns what it begins with.

        It has the next incarnation then, and a seed derived from its last one. Envs that are one
        vector env are made anew together.

        Raises:
            AlreadyPendingCallError: The env has not been polled since it was asked.
            ActorLostError, RestartLimitError: Its actor is gone for good.
        """
        self._by_agent().try_restart(env_id)

    def get_agent_ids(self) -> set[AgentID]:
        """Return the agents that an env may have, as far as it names them before its reset."""
        return self._dict_side.agent_ids()

    def get_observation_space(self, agent_id: AgentID, env_id: int = 0) -> gymnasium.Space[Any]:
        """Return an agent's space: the same object each time within an episode.

        For agents that the envs named beforehand the same object for ever, and for all envs.
        Others are asked for, of this env.

        Raises:
            KeyError: As the env has it, if it knows no such agent.
        """
        return self._dict_side.agent_spaces(agent_id, self._sub_environment(env_id))[0]

    def get_action_space(self, agent_id: AgentID, env_id: int = 0) -> gymnasium.Space[Any]:
        """Return an agent's space; as `get_observation_space` else."""
        return self._dict_side.agent_spaces(agent_id, self._sub_environment(env_id))[1]

    # --- single envs, and all ----------------------------------------------------------------

    def get_sub_environments(self) -> list[SubEnvironment]:
        """Return one proxy per env, in their order."""
        return [self._sub_environment(env_id) for env_id in range(self.num_envs)]

    def try_render(self, env_id: int | None = None) -> Any:
        """Return the frame of one env, or a list of those of all; errors as in `SubEnvironment`."""
        if env_id is None:
            return [env.render() for env in self.get_sub_environments()]
        return self._sub_environment(env_id).render()

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

    def env_groups(self, count: int) -> list[list[int]]:
        """Return all env ids in `count` groups, over which the envs of each actor are spread.

        Raises:
            ConfigError: `count` is no positive integer.
        """
        return self._placement.groups(count)

    def vector_envs(self) -> list[range]:
        """Return the env ids of each vector env that a factory made; these step together."""
        return list(dict.fromkeys(self._placement.vector_groups.values()))

    def given_up(self) -> list[int]:
        """Return the envs that failed too often, and are not made anew any more."""
        return [] if self._faults.recovery is None else sorted(self._faults.lost)

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        return self._engine.statistics()

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return the shared memory in which each env has its row, for who is to read it elsewhere.

        Returns:
            Descriptor, which stays the pool's; bytes; and what is where. None: observations have
            no fixed size, or there is no shared memory. The row of an env is still from `recv` to
            the `send` that names it.

        Raises:
            ClosedEnvironmentError: The pool was closed.
        """
        self._assert_open()
        return self._fleet.shared_rows()

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return [actor.pid for actor in self._fleet.actors if actor.pid is not None]

    @uninterrupted_call
    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end their processes. Idempotent.

        Args:
            timeout: Seconds for the envs to close before they are killed; None:
                `timeouts.close`.
            terminate: Kill the processes at once.
        """
        check_number("timeout", timeout, optional=True)
        self.closed = True
        try:
            self._fleet.close(timeout=timeout, terminate=terminate)  # goes on after Ctrl-C
        finally:
            unshow(self._engine)
        self._finalizer.detach()

    def stop(self) -> None:
        """Close all envs and end their processes. Idempotent; the same as `close`."""
        self.close()

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.close(terminate=exc_type is not None)

    def __repr__(self) -> str:
        if self.closed:
            return "ActorPool(closed)"
        return f"ActorPool(num_envs={self.num_envs}, ready={self._states.num_ready})"

    # --- private -----------------------------------------------------------------------------

    def _left(self) -> Sequence[int]:
        """Return the envs that are not gone for good."""
        self._faults.check_some_left()
        return [i for i in range(self.num_envs) if i not in self._faults.lost]

    def _by_agent(self) -> DictSide:
        """Return the dict side, if it can be used."""
        self._assert_open()
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                "by env and agent, the caller resets envs whose episodes are over: make the pool "
                f'with autoreset_mode="Disabled", not {self.autoreset_mode.value!r}'
            )
        self.uses += 1
        return self._dict_side

    def _sub_environment(self, env_id: int) -> SubEnvironment:
        return SubEnvironment(self._ask_one, env_id)  # a pool lives as long as these

    def _ask_one(self, env_id: int, make: MakeOne) -> Any:
        self._assert_open()
        return self._calls.ask_one(env_id, make)

    def _assert_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("Trying to operate on `ActorPool`, after `close()`.")
