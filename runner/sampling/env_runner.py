"""`EnvRunner`: drives a pool or a bridge with policies, and returns what happened as columns.

Leaves out the two ways of doing so: `column_sampler.py` (fast) and `dict_sampler.py` (general).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from envbus.actors.external.errors import SimulatorError
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.spaces import is_fixed_size
from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError, RestartLimitError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.engine.env_calls import SubEnvironment
from envbus.runner.engine.seeding import Life, restart_seed
from envbus.runner.monitoring.figures import PartFigures
from envbus.runner.monitoring.registry import show, unshow
from envbus.runner.policies.policy import Policy, Weights, versioned_weights
from envbus.runner.policies.policy_map import Policies, PolicyMap, check_state, checked_ids
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.callbacks import let_know, naming, wants_episodes
from envbus.runner.sampling.column_sampler import ColumnSampler
from envbus.runner.sampling.columns import Make
from envbus.runner.sampling.config import (
    CONNECTED,
    EnvQuotas,
    PolicyMapping,
    Postprocess,
    RunnerConfig,
    Sample,
    check_mapping,
)
from envbus.runner.sampling.dict_sampler import DictSampler
from envbus.runner.sampling.screen import Screen, draws_itself
from envbus.runner.sampling.sources import BridgeSource, EnvNumbers, PoolSource, Source
from envbus.runner.sampling.video import VideoRecorder

__all__ = ["EnvRunner"]

logger = logging.getLogger("envbus.runner")

Envs: TypeAlias = "ActorPool | ExternalEnvBridge | Sequence[ActorPool | ExternalEnvBridge]"
#: What makes envs, and what makes the policies for them.
_Factories: TypeAlias = tuple[Callable[..., Any], Callable[..., Policies]]


class _ServingThread:
    """Runs `serve(is_over)` in a thread, from `start` to `end`.

    Sockets go over into that thread and come back: nothing that `serve` uses may be used meanwhile.

    Args:
        serve: Returns soon after `is_over()` has become true.
    """

    def __init__(self, serve: Callable[[Callable[[], bool]], None]) -> None:
        self._serve = serve
        self._over = threading.Event()
        #: Not `Thread.join`: one that an exception breaks off takes the thread for ended (3.11).
        self._ended = threading.Event()
        self._is_started = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="envbus serving", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether it was to end; Ctrl-C may have broken off the wait for it."""
        return self._over.is_set()

    @uninterrupted_call
    def start(self) -> None:
        """Begin; after Ctrl-C, too, it runs."""
        self._thread.start()
        self._is_started = True

    @uninterrupted_call
    def end(self) -> None:
        """Wait until nothing is used any more. Idempotent; `serve` itself may call it."""
        self._over.set()
        if self._is_started and self._thread.ident != threading.get_ident():
            self._ended.wait()

    def raise_error(self) -> None:
        """Raise what `serve` raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._serve(self._over.is_set)
        except BaseException as exc:
            self._error = exc
        finally:
            self._ended.set()


class _EnvSet:
    """At most one pool, and any number of bridges.

    Attributes:
        pool: Its envs have the ids from 0.
        bridges: Their episodes have higher ones.

    Raises:
        ConfigError: There is neither, or more than one pool; the pool has a vector env; or an
            agent of one has other spaces than in another.
    """

    def __init__(self, envs: Envs) -> None:
        given = list(envs) if isinstance(envs, Sequence) else [envs]
        pools = [one for one in given if isinstance(one, ActorPool)]
        self.bridges = [one for one in given if isinstance(one, ExternalEnvBridge)]
        if not given or len(pools) > 1 or len(pools) + len(self.bridges) < len(given):
            raise ConfigError(
                "envs must be an ActorPool, an ExternalEnvBridge, or several bridges and at most "
                f"one pool, not {envs!r:.200}"
            )
        self.pool = pools[0] if pools else None
        together = self.pool.vector_envs() if self.pool is not None else []
        if together:
            raise ConfigError(
                f"an EnvRunner begins episodes one by one, and envs {together[0].start} to "
                f"{together[0].stop - 1} are one vector env, which steps as a whole; give the pool "
                "factories of single envs"
            )
        self._check_spaces()

    @property
    def num_envs(self) -> int:
        """Envs of the pool."""
        return 0 if self.pool is None else self.pool.num_envs

    def given_up(self) -> list[int]:
        """Return the envs of the pool that were given up."""
        return [] if self.pool is None else self.pool.given_up()

    @property
    def uses(self) -> int:
        """How often somebody has used the pool."""
        return 0 if self.pool is None else self.pool.uses

    @property
    def closed(self) -> bool:
        """Whether any of them was closed."""
        return any(one.closed for one in self._all())

    def close(self, *, terminate: bool = False) -> None:
        """Close all. Idempotent; `terminate` does not wait for envs of the pool."""
        for bridge in self.bridges:
            bridge.stop()
        if self.pool is not None:
            self.pool.close(terminate=terminate)

    def spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as far as they are known."""
        return {agent_id: both for one in reversed(self._all()) for agent_id, both in _spaces(one)}

    def get_sub_environments(self) -> list[SubEnvironment]:
        """Return proxies of the pool's envs."""
        return [] if self.pool is None else self.pool.get_sub_environments()

    def tell_policies(self, policies: Mapping[str, Policy], *, publish: bool) -> None:
        """Have clients told who may act; if they may do so themselves, have them given models."""
        for bridge in self.bridges:
            bridge.policy_ids = list(policies)
            bridge.retain_models(policies if publish else ())
            for policy_id, policy in policies.items() if publish else ():
                weights, version = versioned_weights(policy)
                model = weights.get("model")
                if isinstance(model, bytes) and len(weights) == 1:
                    bridge.publish(policy_id, onnx=model, version=version)
                else:
                    bridge.publish(policy_id, weights=weights, version=version)

    def _all(self) -> list[ActorPool | ExternalEnvBridge]:
        return [*([] if self.pool is None else [self.pool]), *self.bridges]

    def _check_spaces(self) -> None:
        known: dict[AgentID, tuple[Space[Any], Space[Any]]] = {}
        for one in self._all():
            for agent_id, both in _spaces(one):
                if known.setdefault(agent_id, both) != both:
                    raise ConfigError(
                        f"agent {agent_id!r} has the observation and action space "
                        f"{known[agent_id]} in one, and {both} in {one!r}: a policy has one form "
                        "of row; bring them together, or sample them by two runners"
                    )


class EnvRunner(BaseEnvRunner, StaysHere):
    """Samples envs with policies.

        pool = ActorPool(["CartPole-v1"] * 64)
        space = pool.single_action_space
        with EnvRunner(pool, RandomPolicy(space), RunnerConfig(rollout_fragment_length=128)) as run:
            batch = run.sample().single()  # 64 * 128 rows, env by env

    Envs go on where the sample before has left them; no fragment begins with a gap. One thread
    creates, uses and stops it.

    Args:
        envs: A pool, an `ExternalEnvBridge`, or several bridges and at most one pool; the runner's
            own from now on. With several agents, callbacks that are told of single episodes, or a
            bridge, the pool's `autoreset_mode` must be "Disabled". docs/sampling.md says how a
            bridge's episodes are sampled.
        policies: One, or by policy id; functions `observations -> actions` are policies, too.
        config: None: the defaults.
        make_column: `(shape, dtype) -> array` or None, asked for the memory of each column of a
            fragment, where rows are kept in columns: for shared memory, or pinned one. What it
            returns is written to until the sample is over. None, or where it returns None: fresh
            memory.

    Attributes:
        envs: As given.
        config: As given.
        metrics: What `get_metrics` reads.
        timers: Likewise.
        connector_times: Likewise.

    Raises:
        ConfigError: Envs, policies and config do not fit together. The envs are left open.
    """

    def __init__(
        self,
        envs: Envs,
        policies: Policies,
        config: RunnerConfig | None = None,
        *,
        make_column: Make | None = None,
    ) -> None:
        if make_column is not None:
            _check_function("make_column", make_column)
        self.envs = envs
        self._make_column = make_column
        self._envs = _EnvSet(envs)
        super().__init__(config)
        self._factories: _Factories | None = None
        #: Whether the factories are given the config, too.
        self._with_config = False
        self._policies = PolicyMap(policies)
        self._num_samples = 0
        #: How often the envs, or the policies, were made anew.
        self._renewals = 0
        #: Callbacks of the sampler's own, each around those before.
        self._onlookers: list[VideoRecorder | Screen] = []
        self._asking = threading.RLock()
        self._sampler = self._make_sampler(self.config.policy_mapping_fn)
        self._begun = False
        show(self, type(self).__name__)
        #: A sample has raised: nobody knows what the envs of the pool are at, and what the episodes
        #: of bridges are.
        self._lost_track = self._lost_episodes = False
        #: Of the pool, after the last sample.
        self._uses = 0
        self._told_of_others = False
        #: Answers simulators, or did so last.
        self._server: _ServingThread | None = None

    @classmethod
    def from_factories(
        cls,
        make_env: Callable[..., Any],
        make_module: Callable[..., Policies],
        config: RunnerConfig | None = None,
        *,
        with_config: bool = False,
    ) -> EnvRunner:
        """Return a runner that can make its envs and policies anew.

        Args:
            make_env: Returns envs: a pool, a bridge, or a sequence of these.
            make_module: `envs -> policies` for their spaces; the envs are not its own.
            config: None: the defaults.
            with_config: Call `make_env(config)` and `make_module(envs, config)`, also later, with
                the runner's `config` as it is then: it may be replaced. Settings of their own are
                fields of a class that is derived from `RunnerConfig`.
        """
        _check_function("make_env", make_env)
        _check_function("make_module", make_module)
        config = RunnerConfig() if config is None else config
        also = (config,) if with_config else ()
        envs = make_env(*also)
        try:
            runner = cls(envs, make_module(envs, *also), config)
        except BaseException:
            _close(envs)
            raise
        runner._factories, runner._with_config = (make_env, make_module), with_config
        return runner

    @property
    def is_vectorized(self) -> bool:
        """Whether rows are kept in columns over all envs."""
        return isinstance(self._sampler, ColumnSampler)

    def sample(
        self,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        timeout: float | None = None,
        force_reset: bool = False,
        explore: bool | None = None,
    ) -> Sample:
        """Step the envs until there are as many rows as asked, and return these.

        Each env contributes an equal part, so that fast ones are not over-represented. Without a
        number, each contributes `rollout_fragment_length` steps.

        Args:
            num_env_steps: Of all envs together; exactly, or in complete_episodes mode at least.
            num_episodes: Of all envs together, exactly; each whole. Running ones of which rows
                have left already are given up for it, as in complete_episodes mode.
            timeout: Seconds after which what is there is returned; `late` names the envs that
                were awaited. Nothing is lost: they go on in the next call. A policy that is asked
                is awaited: `PolicyWorkers(timeout=)`. None: no limit but the deadlines of the
                pool's requests.
            force_reset: Give up all running episodes and begin new ones.
            explore: None: as configured.

        Raises:
            ValueError: Both numbers, or a negative one.
            CallbackError, ConnectorError: It names which one.
            ConfigError: An agent was given to a policy that is not there.
            RestartLimitError: No env is left.
            ClosedEnvironmentError: It was stopped, also by a callback or a signal's handler while
                this call is under way.
            SimulatorError: A simulator that a bridge hosts has ended. Nothing is lost by it.
            Exception: What the pool raises, if its envs are not made anew. After any other
                exception the next call begins new episodes in all envs.
        """
        self._assert_open()
        sampler, config = self._sampler, self.config
        explore = config.explore if explore is None else explore
        check_number("timeout", timeout, optional=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        live = self._live()
        quotas = EnvQuotas.of(
            config,
            live,
            num_env_steps=num_env_steps,
            num_episodes=num_episodes,
            turn=self._num_samples,
            first=sampler.stepping,
        )
        if not live.any():
            self.assert_healthy()
        let_know(config.callbacks, self)
        try:
            self._tell_connectors(explore)
            self._begin(quotas, force_reset=force_reset)
            try:
                sample = sampler.sample(quotas, deadline, explore, config.unique(self._num_samples))
            finally:  # also where a simulator has ended, and episodes go on
                self._uses = self._envs.uses
            self._num_samples += 1
            if config.postprocess is not None:
                sample = self._postprocessed(sample, config.postprocess)
            self.metrics.add_steps(
                env_steps=sample.env_steps,
                agent_steps=sample.agent_steps,
                module_steps={name: len(batch) for name, batch in sample.policy_batches.items()},
            )
            with naming("on_sample_end"):
                config.callbacks.on_sample_end(sample=sample)
        except BaseException as exc:
            self._lose_track(exc)
            if self._envs.closed and isinstance(exc, Exception):
                raise ClosedEnvironmentError("`EnvRunner` was stopped during a sample.") from exc
            raise
        return sample

    def __iter__(self) -> Iterator[Sample]:
        """Yield `sample()` again and again, until the runner is stopped."""
        while not self._envs.closed:
            yield self.sample()

    def serve(self, seconds: float, *, explore: bool | None = None) -> None:
        """Answer the simulators of its bridges for some time, without sampling.

        The rows wait for the next sample: see `RunnerConfig.max_waiting_steps`.

        Args:
            seconds: How long.
            explore: None: as configured.

        Raises:
            ConfigError: It has no bridge.
            Exception: As from `sample`.
        """
        self._assert_open()
        check_number("seconds", seconds)
        self._serve(time.monotonic() + seconds, explore, lambda: False)

    @contextmanager
    def serving(self, *, explore: bool | None = None) -> Iterator[None]:
        """Answer the simulators of its bridges in a thread, while the block runs.

            with runner.serving():
                train(sample)  # must not change what the policies read, but by `set_weights`

        The runner cannot be used meanwhile, except for `set_weights` and what only reads.

        Raises:
            ConfigError: It has no bridge.
            Exception: As from `sample`, at the end of the block.
        """
        self._assert_open()
        self._bridged()
        server = _ServingThread(lambda is_over: self._serve(math.inf, explore, is_over))
        self._server = server
        try:
            server.start()
            yield
        finally:
            self._end_serving()
        server.raise_error()

    # --- policies ----------------------------------------------------------------------------

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policies by id."""
        return self._policies.by_id

    @property
    def policy_mapping_fn(self) -> PolicyMapping | None:
        """Who says which policy is an agent's; if set, of episodes that begin from now on.

        Raises:
            ConfigError: The runner keeps columns; make it with `vectorized=False`.
        """
        return self._general("policy_mapping_fn").episodes.policy_mapping_fn

    @policy_mapping_fn.setter
    def policy_mapping_fn(self, policy_mapping_fn: PolicyMapping | None) -> None:
        sampler = self._general("policy_mapping_fn")
        check_mapping(policy_mapping_fn)
        sampler.episodes.policy_mapping_fn = policy_mapping_fn

    def add_policy(
        self,
        policy_id: str,
        policy: Policy | Callable[[Any], Any],
        policy_mapping_fn: PolicyMapping | None = None,
    ) -> None:
        """Add a policy, or put another in the place of one, for episodes that begin from now on.

        One that has other columns than that in whose place it is put needs `force_reset=True` in
        the next sample: rows of both do not join.

        Raises:
            ConfigError: The runner keeps columns; make it with `vectorized=False`. Or an argument
                is none. Nothing has changed.
        """
        sampler = self._general("add_policy")
        check_mapping(policy_mapping_fn)
        self._policies.put(policy_id, policy)
        self._tell_policies()
        if policy_mapping_fn is not None:
            sampler.episodes.policy_mapping_fn = policy_mapping_fn

    def remove_policy(
        self,
        policy_id: str,
        policy_mapping_fn: PolicyMapping | None = None,
    ) -> None:
        """Remove a policy; episodes that run with it keep it to their end.

        Raises:
            ConfigError: There is no such policy, or no other, or the runner keeps columns.
        """
        sampler = self._general("remove_policy")
        check_mapping(policy_mapping_fn)
        self._policies.remove(policy_id)
        self._tell_policies()
        if policy_mapping_fn is not None:
            sampler.episodes.policy_mapping_fn = policy_mapping_fn

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id, of all policies or of some."""
        return self._policies.get_weights(policy_ids)

    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Set weights by policy id; actions from now on are theirs, and say so.

        In a block of `serving` it waits until the policy has answered what it was just asked.

        Raises:
            ConfigError: There is no such policy. Nothing was set.
        """
        with self._asking:
            self._policies.set_weights(weights, version)
        self._tell_policies()

    # --- beginning anew ----------------------------------------------------------------------

    def make_env(self) -> None:
        """Close the envs, whatever became of them, and make them anew; new episodes begin.

        Policies, connectors, metrics and the numbers of episodes go on; seeds are derived from
        the config's, so that no episode comes a second time.

        Raises:
            ConfigError: It does not know how: use `from_factories`.
            Exception: What the factory raised; the runner is stopped then, and can try again.
        """
        make_env, _ = self._known_factories("make_env")
        self.stop()
        self.envs = make_env(*self._for_factories())
        try:
            self._envs = _EnvSet(self.envs)
            self._renew()
        except BaseException:
            _close(self.envs)
            raise

    def make_module(self) -> None:
        """Make the policies anew, with fresh weights of the next version; new episodes begin.

        Raises:
            ConfigError: It does not know how: use `from_factories`.
            Exception: What the factory raised, or policies that do not fit; nothing has changed.
        """
        _, make_module = self._known_factories("make_module")
        self._assert_open()
        before = self._policies.by_id
        self._policies.replace(make_module(self.envs, *self._for_factories()))
        try:
            self._renew()
        except BaseException:
            self._policies.by_id = before
            self._tell_policies()
            raise

    def get_state(self) -> dict[str, Any]:
        """Return weights, their versions, connectors' states and the counts of a lifetime.

        Running episodes are no part of it: neither the envs' own state, nor their rows that have
        not left, nor what policies and connectors keep of them. Who takes it over begins new
        ones, under ids that were not used yet.
        """
        next_eps_id, num_samples = self.ids_reached()
        return {
            "policies": self._policies.get_state(),
            "connectors": {name: one.get_state() for name, one in self.config.connectors().items()},
            "metrics": self.metrics.get_state(),
            "num_samples": num_samples,
            "next_eps_id": next_eps_id,
        }

    @uninterrupted_call
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this runner or another; episodes go on.

        All of it is taken over, or nothing. Episodes that run here keep their ids, which the other
        runner may have used: where that matters, sample with `force_reset=True` next.

        Raises:
            ConfigError: It is no state, has a policy that is not here, or lacks a connector.
            Exception: What a policy or a connector raises that does not take its part.
        """
        check_state(state, "policies", "connectors", "metrics", "num_samples", "next_eps_id")
        connectors = self.config.connectors()
        missing = sorted(connectors.keys() - state["connectors"].keys())
        if missing:
            raise ConfigError(f"the state has nothing of the connectors {missing}")
        ids = checked_ids(state)
        with contextlib.ExitStack() as undo:
            undo.callback(self._tell_policies)  # last: of those of before
            before = self._policies.set_state(state["policies"])
            undo.callback(self._policies.set_state, before)
            for name, connector in connectors.items():
                undo.callback(connector.set_state, connector.get_state())
                connector.set_state(state["connectors"][name])
            self._tell_policies()
            self.metrics.set_state(state["metrics"])
            undo.pop_all()  # all is well
        self.go_on_from(*ids)

    def ids_reached(self) -> tuple[int, int]:
        """Return what no number of an episode, and of a sample, has reached yet here."""
        return self._sampler.ids.following, self._num_samples

    def go_on_from(self, next_eps_id: int, num_samples: int) -> None:
        """Have later episodes and samples be numbered from these on, if they are not already."""
        self._num_samples = max(self._num_samples, num_samples)
        if self._sampler.ids.following < next_eps_id:
            self._sampler.ids.go_on_from(next_eps_id)

    # --- about it ----------------------------------------------------------------------------

    def get_spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the envs have them."""
        return self._envs.spaces()

    def get_policy_spaces(self) -> dict[str, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by policy id, as the envs have them.

        They are those of the agents that the envs name beforehand: whose a policy is says the
        `policy_mapping_fn`, which is asked with an episode that has not begun. Policies of which no
        agent is known are left out. What connectors make of an observation is not looked at.

        Raises:
            ConfigError: Agents of one policy have different spaces; or there are several policies
                and no `policy_mapping_fn`.
        """
        found: dict[str, tuple[AgentID, tuple[Space[Any], Space[Any]]]] = {}
        for agent_id, both in self.get_spaces().items():
            policy_id = self._policy_id_of(agent_id)
            first, known = found.setdefault(policy_id, (agent_id, both))
            if known != both:
                raise ConfigError(
                    f"agents {first!r} and {agent_id!r} have policy {policy_id!r} and different "
                    f"spaces: {known} and {both}"
                )
        return {policy_id: both for policy_id, (_, both) in found.items()}

    def _policy_id_of(self, agent_id: AgentID) -> str:
        """Return whose an agent would be in an episode that begins now."""
        sampler = self._sampler
        choose = None if isinstance(sampler, ColumnSampler) else sampler.episodes.policy_mapping_fn
        if choose is not None:
            return choose(agent_id, EpisodeRecorder(-1, -1))
        if len(self.policies) > 1:
            raise ConfigError("a policy_mapping_fn must say which policy is an agent's own")
        return next(iter(self.policies))

    def assert_healthy(self) -> None:
        """Raise if it cannot sample with all of its envs.

        Raises:
            ClosedEnvironmentError: It was stopped.
            RestartLimitError: Envs were given up; they are named.
        """
        self._assert_open()
        lost = [env_id for env_id, live in enumerate(self._live()) if not live]
        if lost:
            raise RestartLimitError(
                f"envs {lost} of {self._envs.num_envs} failed too often and were given up; the "
                "pool's hooks and the log say why"
            )

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; called by another thread than samples."""
        levels: dict[str, float] = dict(self.timers.read())
        for policy_id, policy in dict(self._policies.by_id).items():
            levels[f"version.{policy_id}"] = int(policy.policy_version)  # or NumPy's
        counts: dict[str, float] = dict(self.metrics.get_state())
        return PartFigures(name=name, kind=type(self).__name__, counts=counts, levels=levels)

    def stop(self) -> None:
        """Close the envs, and finish videos. Idempotent."""
        self.__exit__(None)

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        try:
            self._end_serving()
            try:
                self._end_onlooking()
            finally:
                self._envs.close(terminate=exc_type is not None)
        finally:
            unshow(self)

    # --- private -----------------------------------------------------------------------------

    def _make_sampler(self, policy_mapping_fn: PolicyMapping | None) -> ColumnSampler | DictSampler:
        config = self.connector_times.timing(
            dataclasses.replace(self.config, policy_mapping_fn=policy_mapping_fn)
        )
        self._onlookers = []
        for onlook in (self._recorder_of, self._screen_of):
            if (onlooker := onlook(config)) is not None:
                self._onlookers.append(onlooker)
                config = dataclasses.replace(config, callbacks=onlooker)
        self._tell_policies()
        pool, bridges = self._envs.pool, self._envs.bridges
        if bridges and config.batch_wait is not None:
            raise ConfigError(
                "batch_wait is for the envs of a pool, and episodes of a bridge come when they "
                "like; say by min_envs for how many to wait"
            )
        reason = _why_not_columns(self._envs, config, self._policies.by_id)
        for setting in ("vectorized", "pipelined", "run_ahead"):
            value = getattr(config, setting)
            if value and reason:
                raise ConfigError(f"this cannot be sampled with {setting}={value}: {reason}")
            if value and config.vectorized is False:
                raise ConfigError(
                    f"{setting}={value} needs columns, and vectorized=False refuses them"
                )
        if pool is not None and pool.autoreset_mode is AutoresetMode.SAME_STEP:
            raise ConfigError('a runner takes a pool with autoreset_mode "NextStep" or "Disabled"')
        if pool is not None and reason is None and config.vectorized is not False:
            ((name, policy),) = self._policies.by_id.items()
            make = self._make_column
            return ColumnSampler(pool, config, name, policy, self.metrics, self.timers, make)
        if pool is not None and pool.autoreset_mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                'make the pool with autoreset_mode="Disabled": it cannot be sampled in columns, as '
                + (reason or "vectorized=False was asked for")
            )
        clip, num_envs = config.clip_actions, self._envs.num_envs
        sources: list[Source] = []
        if pool is not None:
            sources.append(PoolSource(pool, clip_actions=clip, batch_wait=config.batch_wait))
        numbers = EnvNumbers(num_envs)
        for index, bridge in enumerate(bridges, num_envs):
            width, least = config.envs_per_bridge, config.min_envs
            sources.append(BridgeSource(bridge, index, width, numbers, least, clip_actions=clip))
        return DictSampler(sources, config, self._policies, self.metrics, self.timers, self._asking)

    def _live(self) -> npt.NDArray[np.bool_]:
        """Return who can contribute a part, `(parts,)`."""
        live = self._sampler.live
        live[self._envs.given_up()] = False  # also those of whom the sampler was not told
        return live

    def _reset(self, seed: int | None) -> None:
        """Begin new episodes in the pool."""
        # An exception may have kept it from the sampler, or another sampler was told.
        self._sampler.lose(self._envs.given_up())
        self._sampler.reset(seed)

    def _tell_connectors(self, explore: bool) -> None:
        for connector in self.config.connectors().values():
            connector.is_evaluated = not explore

    def _tell_policies(self) -> None:
        self._envs.tell_policies(self._policies.by_id, publish=self.config.publish)

    def _recorder_of(self, config: RunnerConfig) -> VideoRecorder | None:
        if config.video is None:
            return None
        envs = self._envs.get_sub_environments()
        return VideoRecorder(config.video, config.callbacks, envs, self.timers)

    def _screen_of(self, config: RunnerConfig) -> Screen | None:
        if (env_id := config.render_env) is None:
            return None
        envs = self._envs.get_sub_environments()
        if draws_itself(env_id, envs):
            return None
        return Screen(envs[env_id], config.callbacks, self.timers)

    def _end_onlooking(self) -> None:
        for onlooker in self._onlookers:
            onlooker.close()

    def _begin(self, quotas: EnvQuotas, *, force_reset: bool) -> None:
        """See that the episodes that run are ones that this sample can go on with."""
        sampler = self._sampler
        if not self._begun:
            self._tell_of_idle_connectors()
            for env_id in range(self._envs.num_envs):
                with naming("on_sub_environment_created"):
                    self.config.callbacks.on_sub_environment_created(env_id=env_id, incarnation=0)
            seed = self.config.seed
            if self._renewals:
                seed = restart_seed(seed, 0, self._renewals, Life.SAMPLER)
            self._reset(seed)
            self._begun = True
        elif force_reset or self._lost_track or (quotas.complete and sampler.has_cut_episode()):
            self._reset(None)
        elif self._uses != self._envs.uses:  # its next row would lead from one episode to another
            if not self._told_of_others:
                self._told_of_others = True
                logger.warning(
                    "the runner's pool was used by somebody else since its last sample, another "
                    "runner or a call of the pool: new episodes begin, as with force_reset=True. "
                    "Give each runner a pool of its own. This is said once."
                )
            self._reset(None)
        self._lost_track = False
        self._give_up_lost(force_reset=force_reset)

    def _postprocessed(self, sample: Sample, function: Postprocess) -> Sample:
        batches = {}
        for policy_id, rows in sample.policy_batches.items():
            with naming("postprocess"):
                made = function(rows, self.policies.get(policy_id))
                if not isinstance(made, SampleBatch):
                    raise TypeError(f"it returned {brief(made)}, and rows are a SampleBatch")
            batches[policy_id] = made
        return dataclasses.replace(sample, policy_batches=batches)

    def _lose_track(self, error: BaseException) -> None:
        """A sample, or `serve`, has raised something."""
        if not isinstance(error, SimulatorError):
            self._lost_track = self._lost_episodes = True

    def _tell_of_idle_connectors(self) -> None:
        """Log which connectors are of policies that are not here: they may come, or be misnamed."""
        for kind in CONNECTED:
            given = getattr(self.config, f"{kind}_connector")
            if isinstance(given, Mapping) and (idle := sorted(given.keys() - self.policies.keys())):
                logger.warning(
                    "%s_connector has the policies %s, which are not here: it does nothing for "
                    "them; there are %s",
                    kind,
                    idle,
                    sorted(self.policies),
                )

    def _give_up_lost(self, *, force_reset: bool = False) -> None:
        """Give up the episodes of bridges of which nobody knows what they are at."""
        if (force_reset or self._lost_episodes) and isinstance(self._sampler, DictSampler):
            self._sampler.give_up()
        self._lost_episodes = False

    def _serve(self, deadline: float, explore: bool | None, is_over: Callable[[], bool]) -> None:
        sampler = self._bridged()
        explore = self.config.explore if explore is None else explore
        let_know(self.config.callbacks, self)
        try:
            self._tell_connectors(explore)
            self._give_up_lost()
            sampler.serve(deadline, explore, is_over)
        except BaseException as exc:
            self._lose_track(exc)
            raise

    def _end_serving(self) -> None:
        """See that no other thread uses the envs."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def _renew(self) -> None:
        """Begin anew with other envs or policies, and go on counting.

        Where they do not fit, the sampler stays the one before.
        """
        old, onlookers = self._sampler, self._onlookers
        mapping = self.config.policy_mapping_fn
        if isinstance(old, DictSampler):
            mapping = old.episodes.policy_mapping_fn
        try:
            fresh = self._make_sampler(mapping)
        except BaseException:
            self._onlookers = onlookers
            raise
        for onlooker in onlookers:
            onlooker.close()
        if isinstance(old, DictSampler):
            old.abandon()
        fresh.ids.go_on_from(old.ids.following)
        self._sampler = fresh
        self._begun = False
        self._renewals += 1

    def _for_factories(self) -> tuple[RunnerConfig, ...]:
        """Return what factories are given besides."""
        return (self.config,) if self._with_config else ()

    def _known_factories(self, verb: str) -> _Factories:
        if self._factories is None:
            raise ConfigError(
                f"{verb}: this runner was given its envs and policies ready-made; make it by "
                "EnvRunner.from_factories(make_env, make_module)"
            )
        return self._factories

    def _bridged(self) -> DictSampler:
        if not self._envs.bridges:
            raise ConfigError("serve: there is no bridge whose simulators could be answered")
        return self._general("serve")

    def _general(self, verb: str) -> DictSampler:
        if isinstance(self._sampler, ColumnSampler):
            raise ConfigError(
                f"{verb}: rows are kept in columns for one policy; make the runner with "
                'RunnerConfig(vectorized=False) and the pool with autoreset_mode="Disabled"'
            )
        return self._sampler

    def _assert_open(self) -> None:
        if self._envs.closed:
            raise ClosedEnvironmentError("Trying to operate on `EnvRunner`, after `stop()`.")
        if self._server is not None:
            if not self._server.is_over:
                text = "the runner is serving; leave `serving` first"
                raise AlreadyPendingCallError(text, "serving")
            self._end_serving()  # Ctrl-C broke off the wait for it


def _close(envs: Envs) -> None:
    """Close envs of which no runner came, whatever they are; without waiting for those of pools."""
    for one in envs if isinstance(envs, Sequence) else [envs]:
        if isinstance(one, ActorPool):
            one.close(terminate=True)
        elif isinstance(one, ExternalEnvBridge):
            one.stop()


def _check_function(name: str, given: object) -> None:
    if not callable(given):
        raise ConfigError(f"{name} must be a function, not {brief(given)}")


def _spaces(
    one: ActorPool | ExternalEnvBridge,
) -> Iterator[tuple[AgentID, tuple[Space[Any], Space[Any]]]]:
    if isinstance(one, ActorPool):
        for agent_id in one.get_agent_ids():
            yield agent_id, (one.get_observation_space(agent_id), one.get_action_space(agent_id))
        return
    observation, action = one.observation_space, one.action_space
    if isinstance(observation, AgentSpaces) and isinstance(action, AgentSpaces):
        for agent_id, space in observation.spaces.items():
            yield agent_id, (space, action[agent_id])
    elif observation is not None and action is not None:
        yield DUMMY_AGENT, (observation, action)


def _why_not_columns(
    envs: _EnvSet, config: RunnerConfig, policies: Mapping[str, Policy]
) -> str | None:
    pool = envs.pool
    if envs.bridges or pool is None:
        return "episodes of a bridge come and go"
    if pool.is_multi_agent:
        return "the envs have several agents"
    if not all(map(is_fixed_size, (pool.single_observation_space, pool.single_action_space))):
        return "a space has no fixed size"
    if len(policies) > 1 or config.policy_mapping_fn is not None:
        return "there are several policies, or a policy_mapping_fn"
    if isinstance(config.callbacks, VideoRecorder | Screen):
        return "episodes are filmed, or seen on the screen"
    if wants_episodes(config.callbacks):
        return "callbacks are told of single episodes"
    if config.infos:
        return "infos are kept"
    return None
