"""`ActorPool`: envs that are stepped whenever their actions are there, first ready first served.

Leaves out processes and messages (`fleet.py`).
"""

from __future__ import annotations

import multiprocessing
import operator
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import gymnasium
import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from envbus.actors.protocol import Rebuild, Reset, Step, StepResult
from envbus.bus.broker import failure_to_error
from envbus.bus.errors import NoPeerError, RestartLimitError
from envbus.bus.keys import Allow, PathLike
from envbus.bus.messages import FailureCode, Tree
from envbus.bus.restart import RestartPolicy
from envbus.runner.actions import ActionStore
from envbus.runner.actor import Actor, ActorState
from envbus.runner.config import FleetConfig, Timeouts
from envbus.runner.env_states import EnvState, EnvStates
from envbus.runner.fault_log import FaultLog, Hooks
from envbus.runner.faults import (
    ActorLostError,
    EnvError,
    Fault,
    FaultCause,
    advise,
    raise_env_errors,
    to_exception,
)
from envbus.runner.fleet import Fleet
from envbus.runner.news import Answer, Gone, Lost, News, Ready
from envbus.runner.observations import ObservationStore
from envbus.runner.polling import DictSide
from envbus.runner.recovery import Lives, Recovery
from envbus.runner.recycling import RecycleAfter
from envbus.runner.seeding import spread_seeds
from envbus.runner.statistics import Statistics, gather
from envbus.runner.vector_spaces import check_max_concurrency, choose_spaces

__all__ = ["ActorPool", "Batch"]

#: Longest single wait, in seconds; without a time-out the pool waits again.
_LONGEST_WAIT = 3600.0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What `ActorPool.recv` returns: one row per env that was ready. Arrays are the caller's."""

    #: `(n,)` int64: which envs; pass them to `send` with the actions.
    env_ids: npt.NDArray[np.int64]
    #: As Gymnasium batches `n` observations: an array `(n, *shape)`, or a dict or tuple of them.
    observations: Any
    #: `(n,)` float64; 0 after a reset.
    rewards: npt.NDArray[np.float64]
    #: `(n,)` bool.
    terminations: npt.NDArray[np.bool_]
    #: `(n,)` bool.
    truncations: npt.NDArray[np.bool_]
    #: Merged as a vector env of `n` envs merges them: rows are those of this batch.
    infos: dict[str, Any]
    #: `(n,)` int64: which life of the env each row comes from, from 0.
    incarnations: npt.NDArray[np.int64]
    #: Envs that failed, alone or with their actor, since the last batch: their episodes are over,
    #: without a last row. The first observation of their next episode comes by itself.
    faults: list[Fault]
    #: Envs that were asked and have not answered, if the time-out ended this `recv`.
    late: list[int]


class ActorPool(DictSide):
    """Env actors that are stepped asynchronously: `send` actions, `recv` whoever is ready.

    A slow env does not hold up the others, apart from those in the same actor: choose
    `num_actors=len(env_fns)` where envs differ much in speed, or wait rather than compute. The
    envs of one vector env step together: they are sent and received as any others, but always
    all of them at once.

        pool = ActorPool(["CartPole-v1"] * 16)
        pool.reset(seed=0)
        while training:
            batch = pool.recv(min_envs=4)
            pool.send(policy(batch.observations), batch.env_ids)

    One thread creates, uses and closes it.

    Args:
        env_fns: As in `BusVectorEnv`.
        shared_memory: Exchange arrays of fixed size through shared memory.
        context: None, "fork", "forkserver" or "spawn".
        autoreset_mode: What happens at the end of an episode. DISABLED: reset the env yourself.
        max_concurrency: Most envs that step at one time.
        num_actors: Processes; "auto": as many as there are usable CPU cores.
        restart_failed_sub_environments: Make envs anew that raised, and start actors again that
            died or passed a deadline, while the others go on. Off, `recv` raises the env's
            error, an `ActorLostError` or a time-out.
        restart_policy: How often and how soon, per env and per actor; None: the default policy.
        all_or_nothing: Raise a `RestartLimitError` when an env is given up, instead of going on
            with the others.
        hooks: Functions that are told of faults and restarts.
        memory_limit_mb: Resident memory in MiB that an actor may use, with all that it started;
            one that uses more is killed, with or without restart. Looked at about once per
            second, for actors on this host, while `recv` or `send` runs.
        recycle_after: When actors on this host that work are exchanged for fresh ones; None:
            never. See docs/recovery.md.
        timeouts: Default deadline of each verb, in seconds.
        preload: Modules that are imported once, before actors are forked.
        lanes: Carry the messages of local actors through a socketpair each, where the platform
            can; else, and with False, through ROUTER and DEALER sockets.
        remote_actors: How many of the actors join from other hosts (`envbus actor ENDPOINT`);
            they host the last envs, which must be given as ids or import paths.
        bind: Endpoints that they join at, e.g. `"tcp://127.0.0.1:5555"`.
        keys: File of this runner's secret key. Only actors with keys can join at `bind` then.
        allow: Which actors: a folder of their public keys, or one file, or a function of the
            public key that returns True or False. See docs/security.md.
        insecure: Allow binding to more than this host without keys, where anybody may join.

    Raises:
        ConfigError: A setting cannot be used.
        RuntimeError: The envs' spaces differ; the message names which.
        StartError: An actor did not come up.
        Exception: What an env's constructor raised. No process is left.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]] | str | Any],
        *,
        shared_memory: bool = True,
        context: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        num_actors: int | Literal["auto"] = "auto",
        restart_failed_sub_environments: bool = False,
        restart_policy: RestartPolicy | None = None,
        all_or_nothing: bool = False,
        hooks: Hooks | None = None,
        memory_limit_mb: float | None = None,
        recycle_after: RecycleAfter | None = None,
        timeouts: Timeouts | None = None,
        preload: Sequence[str] = (),
        lanes: bool = True,
        remote_actors: int = 0,
        bind: str | Sequence[str] = (),
        keys: PathLike | None = None,
        allow: Allow | None = None,
        insecure: bool = False,
    ) -> None:
        sources = list(env_fns)
        if not sources:
            raise ValueError("`env_fns` is empty; pass one factory or id per env")
        self.closed = False
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.timeouts = timeouts or Timeouts()
        self._restarts = restart_failed_sub_environments
        self._all_or_nothing = all_or_nothing
        self._log = FaultLog(hooks)
        policy = (restart_policy or RestartPolicy()) if self._restarts else None
        self._fleet = Fleet(
            sources,
            self.autoreset_mode,
            FleetConfig(
                num_actors=num_actors,
                shared_memory=shared_memory,
                context=context,
                max_concurrency=check_max_concurrency(max_concurrency),
                timeouts=self.timeouts,
                restart=policy,
                memory_limit_mb=memory_limit_mb,
                recycle=recycle_after,
                preload=tuple(preload),
                lanes=lanes,
                remote_actors=remote_actors,
                bind=(bind,) if isinstance(bind, str) else tuple(bind),
                keys=keys,
                allow=allow,
                insecure=insecure,
            ),
        )
        # Not `__del__`: see `BusVectorEnv`.
        self._finalizer = weakref.finalize(self, self._fleet.abandon)
        try:
            self._fleet.start()
            self._set_up(shared_memory, policy)
        except BaseException:
            self.close(terminate=True)
            raise

    def _set_up(self, shared_memory: bool, policy: RestartPolicy | None) -> None:
        fleet = self._fleet
        self.num_envs = fleet.num_envs
        spaces = choose_spaces(fleet.env_spaces(), "same", shared_memory=False)
        self.single_observation_space = spaces.single_observation_space
        self.single_action_space = spaces.single_action_space
        self.observation_space = spaces.observation_space
        self.action_space = spaces.action_space
        self._blocks = fleet.map_blocks(self.single_observation_space, self.single_action_space)
        self._shared_memory = shared_memory
        self._observations = ObservationStore(
            self.single_observation_space, self.num_envs, self._blocks.observations
        )
        self._actions = ActionStore(self.action_space, self.num_envs, self._blocks.actions)
        self._merger = VectorEnv[Any, Any, Any]()
        self._states = EnvStates(self.num_envs)
        self._infos: dict[int, dict[str, Any]] = {}
        self._faults: list[Fault] = []
        #: What the next calls of `recv` raise: what envs and requests failed of in this round,
        #: and actors lost for good.
        self._errors: deque[Exception] = deque()
        self._losses: deque[Exception] = deque()
        #: By env: why it is lost for good.
        self._lost: dict[int, str] = {}
        self._lives = Lives(self.num_envs)
        units = [unit for actor in fleet.actors for unit in actor.units()]
        #: None where errors are raised.
        self._recovery = Recovery(units, policy, random.random) if policy else None
        self._actor_of = [actor for actor in fleet.actors for _ in actor.env_ids]
        #: For each env that is part of a vector env, the ids of all envs of that one.
        self._company = {i: unit for unit in units for i in unit if len(unit) > 1}
        #: Number of the current reset; results that were asked for before it are dropped.
        self._round = 0
        #: Ids of requests in flight, by their first env.
        self._requests: dict[int, int] = {}
        self._set_up_dict_side()

    # --- use ---------------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Ask envs to begin new episodes; their first observations come from `recv`.

        Args:
            seed: Env i gets `seed + i`; or one seed, or None, per env of the pool.
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
        seeds = spread_seeds(seed, self.num_envs)
        if env_ids is None:
            self._assert_some_left()
            self._drop_everything()
            named: Sequence[int] = range(self.num_envs)
        else:
            named = self._check_env_ids(env_ids)
        for env_id in named:
            self._lives.remember(env_id, seeds[env_id])
        self._begin_episodes(named)
        idle = [env_id for env_id in named if self._states[env_id] is EnvState.IDLE]
        for actor, members in self._by_actor(idle):
            own = [seeds[env_id] for env_id in members]
            request = Reset(
                slots=self._slots(actor, members),
                seeds=None if all(s is None for s in own) else Tree(own),
                options=None if options is None else Tree(options),
            )
            self._ask(actor, request, members, self.timeouts.reset)

    def send(
        self, actions: Any, env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Ask envs to step; their results come from `recv`.

        Args:
            actions: As many actions as `env_ids`, batched as Gymnasium batches them, or a
                sequence of single actions.
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
        chosen = self._check_env_ids(self._left() if env_ids is None else env_ids)
        self._check_company(chosen)
        index = np.asarray(chosen, np.int64)
        rows = slice(None) if len(chosen) == self.num_envs and env_ids is None else index
        singles = self._actions.store(actions, rows)
        position = {env_id: place for place, env_id in enumerate(chosen)}
        active = [i for i in chosen if self._states[i] is EnvState.IDLE]
        for actor, members in self._by_actor(active):
            slots = self._slots(actor, members)
            if singles is not None:
                picked = [singles[position[env_id]] for env_id in members]
                request = Step(slots=slots, actions=Tree(picked))
            elif actor.reads_blocks:
                request = Step(slots=slots)
            else:
                assert self._blocks.actions is not None
                arrays = [leaf[members] for leaf in self._blocks.actions]
                request = Step(slots=slots, action_arrays=arrays)
            self._ask(actor, request, members, self.timeouts.step)

    def recv(
        self,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
    ) -> Batch:
        """Wait until `min_envs` envs are ready, and return those that are, oldest first.

        Returns early when nothing is pending any more, when an env's actor has died, and with
        fewer rows, or none, when `timeout` is over: `late` then names who has not answered.

        Args:
            min_envs: From 1 to `num_envs`.
            max_envs: Most rows; what is over waits for the next call. None: no limit.
            timeout: Seconds; None: until the requests' own deadlines.

        Raises:
            NoAsyncCallError: Nothing is pending, ready or recovering.
            ActorLostError: An actor died and is not started again.
            RestartLimitError: An actor was started again too often.
            multiprocessing.TimeoutError: An env passed the deadline of its step or reset.
            Exception: What an env raised, as its own type where possible.

        Each error is raised once, and takes nothing away: what other envs returned can be
        received by the next call. Only when no actor is left does each call raise its loss.
        """
        self._assert_open()
        if not 1 <= min_envs <= self.num_envs:
            raise ValueError(f"min_envs must be from 1 to {self.num_envs}, not {min_envs}")
        if max_envs is not None and max_envs < min_envs:
            raise ValueError(f"max_envs={max_envs} is less than min_envs={min_envs}")
        self._assert_awaited("recv")
        deadline = None if timeout is None else time.monotonic() + timeout
        timed_out = False
        self._take_news(0.0)
        states = self._states
        while states.num_ready < min_envs and states.awaited():
            if self._faults or self._has_error():
                break
            left = _LONGEST_WAIT if deadline is None else max(deadline - time.monotonic(), 0.0)
            if deadline is not None and left <= 0:
                timed_out = True
                break
            self._take_news(min(left, _LONGEST_WAIT))
        self._raise_next_error()
        count = states.num_ready if max_envs is None else min(states.num_ready, max_envs)
        batch = self._make_batch(states.receive(count), timed_out)
        self._recycle()  # before the caller can send to those whose episodes have ended
        return batch

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        given_up = len(self._lost) if self._restarts else 0
        return gather(self._fleet, self._log, self._recovery, given_up)

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return [actor.child.pid for actor in self._fleet.actors if actor.child is not None]

    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end their processes. Idempotent.

        Args:
            timeout: Seconds for the envs to close before they are killed; None:
                `timeouts.close`.
            terminate: Kill the processes at once.
        """
        if not self.closed:
            self.closed = True
            self._fleet.close(timeout=timeout, terminate=terminate)
            self._finalizer.detach()

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close(terminate=exc is not None)

    def __repr__(self) -> str:
        if self.closed:
            return "ActorPool(closed)"
        return f"ActorPool(num_envs={self.num_envs}, ready={self._states.num_ready})"

    # --- private -----------------------------------------------------------------------------

    def _ask(
        self,
        actor: Actor,
        request: Reset | Rebuild | Step,
        members: list[int],
        timeout: float | None,
    ) -> None:
        try:
            request_id = self._fleet.ask(
                actor, request, timeout=timeout, tag=(self._round, members, type(request))
            )
        except NoPeerError:  # it left, and its exit has not been told yet
            self._on_gone(members, self._fleet.why_gone(actor))
            return
        self._requests[members[0]] = request_id
        self._states.ask(members)

    def _take_news(self, timeout: float) -> None:
        recovery = self._recovery
        if recovery:
            wake_at = recovery.wake_at()
            if wake_at is not None:
                timeout = min(timeout, max(wake_at - time.monotonic(), 0.0))
        recycling = self._fleet.recycling
        if recycling is not None:
            timeout = min(timeout, max(recycling.hold_ends_at() - time.monotonic(), 0.0))
        for news in self._fleet.poll(timeout):
            self._on_news(news)
        if recovery:
            self._remake(recovery.due(time.monotonic()))
        self._recycle()

    def _on_news(self, news: News) -> None:
        if type(news) is Answer:
            self._on_answer(news)
        elif type(news) is Lost:
            self._on_lost(news)
        elif type(news) is Gone:
            lost = news.actor.state is ActorState.LOST
            self._on_gone(news.actor.env_ids, news.reason, news.cause, for_good=lost)
            if lost and (not self._restarts or self._all_or_nothing):
                self._losses.append(self._loss(news.actor.env_ids.start))
        elif type(news) is Ready:
            self._on_ready(news.actor)

    def _on_answer(self, news: Answer) -> None:
        round_number, members, kind = news.tag
        if round_number != self._round:
            self._end_call(round_number, news)
            return
        self._settle(members)
        result: StepResult = news.reply
        failed = {error.slot for error in result.errors}
        first = news.actor.env_ids.start
        if result.observation_arrays is not None:
            self._observations.put_arrays(members, result.observation_arrays)
        if result.observations is not None:
            self._observations.put_singles(members, result.observations.value)
        blocks = self._blocks
        if kind is not Step:
            blocks.rewards[members] = 0.0
            blocks.terminations[members] = False
            blocks.truncations[members] = False
        elif result.rewards is not None:
            blocks.rewards[members] = result.rewards
            blocks.terminations[members] = result.terminations
            blocks.truncations[members] = result.truncations
        if kind is Step and self._fleet.recycling is not None:
            ended = np.count_nonzero(blocks.terminations[members] | blocks.truncations[members])
            self._fleet.recycling.count(news.actor.index, len(members), int(ended))
        if result.infos is not None:
            for env_id, info in zip(members, result.infos.value, strict=True):
                if info:
                    self._infos[env_id] = info
        for env_id in members:
            if env_id - first not in failed:
                self._states.offer(env_id)
        if result.errors:
            self._take_errors(news.actor, result)
        elif kind is not Step and self._recovery:
            self._recovery.works(members)
        if kind is Rebuild:
            for env_id in members:
                if env_id - first not in failed:
                    self._log.restarted(env_id, int(self._lives.numbers[env_id]))

    def _settle(self, members: list[int]) -> None:
        self._requests.pop(members[0], None)
        self._states.settle(members)

    def _take_errors(self, actor: Actor, result: StepResult) -> None:
        """Envs raised: have them made anew, or the next `recv` raise it."""
        rebuilt = [
            to_exception(
                error,
                env_id=actor.env_ids[error.slot],
                actor=actor.name,
                incarnation=actor.incarnation,
            )
            for error in result.errors
        ]
        if self._recovery is not None:
            self._on_env_errors(self._recovery, [error for error, _ in rebuilt])
            return
        try:
            raise_env_errors([error for error, _ in rebuilt], [found for _, found in rebuilt])
        except Exception as exc:  # raised by the next `recv`, after this news is all taken
            self._errors.append(exc)

    def _on_lost(self, news: Lost) -> None:
        round_number, members, _ = news.tag
        if round_number != self._round:
            self._end_call(round_number, news)
            return
        self._settle(members)
        if news.failed.code in (FailureCode.PEER_LOST, FailureCode.NO_PEER):
            self._on_gone(members, news.failed.message, news.cause)
        elif news.failed.code is not FailureCode.TIMEOUT:
            self._errors.append(failure_to_error(news.failed, 0))
        elif self._restarts:
            reason = f"{news.actor.describe()} did not answer in time: {news.failed.message}"
            # Nothing else ends a step that never returns.
            self._fleet.kill(news.actor, FaultCause.TIMEOUT, news.failed.message)
            self._on_gone(members, reason, FaultCause.TIMEOUT)
        else:
            names = ", ".join(map(str, members))
            self._errors.append(
                multiprocessing.TimeoutError(
                    f"env(s) {names} did not answer in time: {news.failed.message}"
                )
            )

    def _on_env_errors(self, recovery: Recovery, errors: Sequence[EnvError]) -> None:
        """Envs raised and are made anew, each with those that it is one vector env with."""
        seen: set[int] = set()
        for error in errors:
            unit = recovery.unit_of(error.env_id)
            if unit.start in seen:
                continue
            seen.add(unit.start)
            restarts = recovery.failed(unit, error.summary, time.monotonic())
            message = error.summary
            if restarts is not None:
                message = f"failed again after {restarts} restarts: {message}"
            for env_id in unit:
                self._end_life(env_id, error.cause, message, error, for_good=restarts is not None)
            if restarts is not None and self._all_or_nothing:
                self._losses.append(self._loss(unit.start))

    def _remake(self, units: Sequence[range]) -> None:
        """Ask for envs that failed to be made anew, and reset."""
        due = [i for unit in units for i in unit if self._states[i] is EnvState.RECOVERING]
        for actor, members in self._by_actor(due):
            if actor.state is not ActorState.READY:
                continue  # they are made anew with it
            seeds = self._lives.seeds(members)
            request = Rebuild(
                slots=[env_id - actor.env_ids.start for env_id in members],
                seeds=None if seeds is None else Tree(seeds),
                close_timeout=self.timeouts.close,
            )
            self._ask(actor, request, members, self.timeouts.start)

    def _on_gone(
        self,
        members: Sequence[int],
        reason: str,
        cause: FaultCause = FaultCause.CRASH,
        *,
        for_good: bool = False,
    ) -> None:
        """An actor died, or is about to: the episodes of `members` are over.

        Told once for each request that it held, and once for all of its envs. Those that are
        PENDING have a request whose own failure is still to come.
        """
        passed = [EnvState.PENDING, EnvState.LOST]
        if not for_good:
            passed.append(EnvState.RECOVERING)
        for env_id in members:
            if self._states[env_id] not in passed:
                self._end_life(env_id, cause, reason, for_good=for_good)

    def _end_life(
        self,
        env_id: int,
        cause: FaultCause,
        reason: str,
        error: EnvError | None = None,
        *,
        for_good: bool,
    ) -> None:
        """An env's episode is over by a fault; another life follows, unless `for_good`."""
        self._infos.pop(env_id, None)
        if for_good:
            self._states.lose(env_id)
            self._lost[env_id] = reason
        else:
            self._states.recover(env_id)
        if not self._restarts:
            return
        fault = Fault(
            env_id=env_id,
            cause=cause,
            message=reason,
            restarts=int(self._lives.numbers[env_id]),
            error=error,
            given_up=for_good,
        )
        self._faults.append(fault)
        self._log.fault(fault)
        self._lives.begin([env_id])

    def _loss(self, env_id: int) -> ActorLostError | RestartLimitError:
        """Return the error that says that an env is gone for good."""
        reason = self._lost[env_id]
        if self._restarts:
            return RestartLimitError(reason)
        actor = self._actor_of[env_id]
        return ActorLostError(
            advise(
                reason,
                "close the pool and make a new one, or pass restart_failed_sub_environments=True "
                "to have its envs started again",
            ),
            env_ids=actor.env_ids,
            actor=actor.name,
        )

    def _on_ready(self, actor: Actor) -> None:
        """An actor runs again: its envs begin new episodes."""
        members = [i for i in actor.env_ids if self._states[i] is not EnvState.LOST]
        if self._recovery is not None:
            self._recovery.works(members)
        self._states.resume(members)
        for env_id in members:
            self._log.restarted(env_id, int(self._lives.numbers[env_id]))
        seeds = self._lives.seeds(members)
        request = Reset(
            slots=self._slots(actor, members), seeds=None if seeds is None else Tree(seeds)
        )
        self._ask(actor, request, members, self.timeouts.reset)

    def _recycle(self) -> None:
        """Hold back the envs of the actor whose turn it is, and exchange it once all are held.

        The next first observation of an env that was held comes by itself, as after a fault.
        """
        recycling = self._fleet.recycling
        if recycling is None:
            return
        now = time.monotonic()
        index = recycling.turn(now)
        if index is None:
            return
        actor = self._fleet.actors[index]
        if actor.state is not ActorState.READY:
            return  # it was killed, and ends
        if now >= recycling.hold_ends_at():
            self._stop_holding()
            return
        for unit in actor.units():
            if all(self._states[i] is EnvState.IDLE and self._has_ended(i) for i in unit):
                self._states.hold(unit)
        at_rest = (EnvState.HELD, EnvState.RECOVERING, EnvState.LOST)
        states = [self._states[env_id] for env_id in actor.env_ids]
        if EnvState.HELD in states and all(state in at_rest for state in states):
            members = [i for i in actor.env_ids if self._states[i] is not EnvState.LOST]
            for env_id in members:
                self._states.recover(env_id)
            self._lives.begin(members)
            self._fleet.recycle(actor)

    def _stop_holding(self) -> None:
        """Let the actor whose turn it is go on, and its held envs begin their next episodes."""
        recycling = self._fleet.recycling
        assert recycling is not None
        recycling.pass_turn(time.monotonic())
        for actor, members in self._by_actor(self._states.those(EnvState.HELD)):
            self._ask(actor, Reset(slots=self._slots(actor, members)), members, self.timeouts.reset)

    def _has_ended(self, env_id: int) -> bool:
        """Return whether an idle env's last row was the last of its episode."""
        return bool(self._blocks.terminations[env_id] or self._blocks.truncations[env_id])

    def _has_error(self) -> bool:
        return bool(self._errors or self._losses)

    def _raise_next_error(self) -> None:
        self._log.tell()
        if self._has_error():
            raise self._errors.popleft() if self._errors else self._losses.popleft()

    def _assert_awaited(self, verb: str) -> None:
        """See that waiting for results will come to an end."""
        states = self._states
        if states.num_ready or states.awaited() or self._faults or self._has_error():
            return
        if len(self._lost) == self.num_envs:
            raise self._loss(min(self._lost))
        if EnvState.HELD not in states:
            send = "`try_reset` or `send_actions`" if verb == "poll" else "`reset` or `send`"
            raise NoAsyncCallError(f"Nothing to receive: call {send} first.", verb)
        self._stop_holding()  # the caller waits for those who wait for others

    def _drop_everything(self) -> None:
        self._round += 1
        self._errors.clear()
        for request_id in self._requests.values():
            self._fleet.cancel(request_id)
        self._requests.clear()
        self._infos.clear()
        self._states.drop()

    def _make_batch(self, env_ids: list[int], timed_out: bool) -> Batch:
        index = np.asarray(env_ids, np.int64)
        infos = self._take_infos(env_ids) if self._infos else {}
        faults, self._faults = self._faults, []
        return Batch(
            env_ids=index,
            observations=self._observations.select(index),
            rewards=self._blocks.rewards[index],
            terminations=self._blocks.terminations[index],
            truncations=self._blocks.truncations[index],
            infos=infos,
            incarnations=self._lives.numbers[index],
            faults=faults,
            late=self._states.late() if timed_out else [],
        )

    def _take_infos(self, env_ids: list[int]) -> dict[str, Any]:
        """Merge the infos of a batch; all are taken, also if they cannot be merged."""
        found = [(row, self._infos.pop(env_id, None)) for row, env_id in enumerate(env_ids)]
        infos: dict[str, Any] = {}
        self._merger.num_envs = len(env_ids)
        for row, info in found:
            if info:
                infos = self._merger._add_info(infos, info, row)
        return infos

    def _left(self) -> Sequence[int]:
        """Return the envs that are not gone for good."""
        self._assert_some_left()
        return [i for i in range(self.num_envs) if i not in self._lost]

    def _check_env_ids(
        self, env_ids: Sequence[int] | range | npt.NDArray[np.integer[Any]]
    ) -> list[int]:
        chosen = [operator.index(env_id) for env_id in env_ids]
        unknown = [i for i in chosen if not 0 <= i < self.num_envs]
        if unknown:
            raise ValueError(f"unknown env ids {unknown}; there are envs 0 to {self.num_envs - 1}")
        if len(set(chosen)) != len(chosen):
            twice = sorted({i for i in chosen if chosen.count(i) > 1})
            raise ValueError(f"env ids {twice} are named more than once")
        busy = [i for i in chosen if self._states[i] in (EnvState.PENDING, EnvState.READY)]
        if busy:
            raise AlreadyPendingCallError(
                f"envs {busy} have a result that was not received yet; call `recv` first", "recv"
            )
        for env_id in chosen:
            if self._states[env_id] is EnvState.LOST:
                raise self._loss(env_id)
        return chosen

    def _assert_some_left(self) -> None:
        """See that not all envs are gone for good; where all are wanted, that none is."""
        if self._lost and (
            not self._restarts or self._all_or_nothing or len(self._lost) == self.num_envs
        ):
            raise self._loss(min(self._lost))

    def _check_company(self, chosen: list[int]) -> None:
        """Refuse a step of only some envs of one vector env."""
        for company in {self._company[i] for i in chosen if i in self._company}:
            missing = [i for i in company if i not in chosen]
            if missing:
                raise ValueError(
                    f"envs {company.start} to {company.stop - 1} are one vector env and step "
                    f"together, but {missing} are not named"
                )

    def _by_actor(self, env_ids: Sequence[int]) -> list[tuple[Actor, list[int]]]:
        """Group env ids by actor, in order, as vector envs want theirs."""
        groups: dict[int, list[int]] = {}
        for env_id in sorted(env_ids):
            groups.setdefault(self._actor_of[env_id].index, []).append(env_id)
        return [(self._fleet.actors[index], members) for index, members in groups.items()]

    def _slots(self, actor: Actor, members: list[int]) -> list[int] | None:
        """Return the members' slots; None for all of them in their order."""
        if members == list(actor.env_ids):
            return None
        return [env_id - actor.env_ids.start for env_id in members]

    def _assert_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("Trying to operate on `ActorPool`, after `close()`.")
