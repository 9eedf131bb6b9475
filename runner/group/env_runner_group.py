"""`EnvRunnerGroup`: several `EnvRunner`s, each in a process of its own, sampled as one.

Leaves out their processes and what they are asked (`group/rounds.py`), how much each is asked for
(`sampling/config.py`), and how samples become one (`group/joining.py`).
"""

from __future__ import annotations

import copy
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError

from envbus.bus.brief import brief
from envbus.bus.complaints import PROGRESS_AFTER
from envbus.bus.errors import ConfigError, EnvbusError, RestartLimitError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.settings import check_number
from envbus.bus.transport.cores import usable_cores
from envbus.bus.wire.messages import Tree
from envbus.runner.batches.metrics import PerfTimers, SampleMetrics
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.errors import FaultCause
from envbus.runner.group.config import GroupConfig, RunnerStatus, counts_of, envs_of
from envbus.runner.group.joining import GroupSample, RunnerPart, join
from envbus.runner.group.protocol import (
    AnyEnvs,
    Apply,
    MakePolicies,
    MakeRunnerOfOwn,
    RollCall,
    RunnerSpec,
)
from envbus.runner.group.rounds import Rounds, RunnerProcess, RunnerWorkerGroup, Ticket
from envbus.runner.group.sample_memory import Asked
from envbus.runner.inference.remote_policy import PolicyHandle
from envbus.runner.monitoring.figures import PartFigures, figures_of
from envbus.runner.monitoring.registry import show, unshow
from envbus.runner.policies.policy import Weights, versioned_weights
from envbus.runner.policies.policy_map import (
    Policies,
    check_are_here,
    check_known,
    check_state,
    check_weights,
    checked_ids,
    checked_versions,
    chosen_ids,
)
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.config import Quota, RunnerConfig, split_quota
from envbus.runner.sampling.connector_times import ConnectorTimes, mean_over_runners
from envbus.runner.workers.config import LONGEST_WAIT, FleetConfig, check_kind
from envbus.runner.workers.env_placement import as_ids
from envbus.runner.workers.worker import ActorState
from envbus.runner.workers.worker_group import WorkerGroupStatistics

__all__ = ["EnvRunnerGroup"]

#: Seconds without any runner until the log says once more who is waited for, at most.
_MOST_PAUSE = 60.0
#: Seconds of a time-out that is as good as none: some thirty years.
_LONGEST = 1e9
#: Of a time-out, what is left for the way back of what runners have by then: this part, and at
#: most as many seconds.
_RETURN_PART, _RETURN_SECONDS = 0.1, 1.0

logger = logging.getLogger("envbus.runner.group")


class EnvRunnerGroup(StaysHere):
    """Runs n `EnvRunner`s side by side.

        envs = ["CartPole-v1"] * 64
        with EnvRunnerGroup(2, envs, policy, RunnerConfig(seed=0)) as group:
            for _ in range(100):
                batch = group.sample().single()
                group.set_weights({"default_policy": learn(batch)})

    Each runner is a process, with an `ActorPool` of its own below it. One that is slow holds up
    nobody, one that dies is started again, with the weights and connectors' states of the group.
    One thread creates, uses and stops it.

    Args:
        num_runners: n.
        envs: One factory, id or import path per env, shared out evenly; or a function `(index of
            the runner) -> ActorPool` that is called in the runner's process. With `num_envs`: one
            function, or its import path, that is called with each env's index in the group.
        policies: As `EnvRunner` takes them; each runner gets a copy. Copies of one that draws
            random numbers from a seed all draw the same ones: use `make_policies` for it. Those of
            `PolicyWorkers` (`workers.policy()`, or the handle for all) are asked by all runners.
        config: Of each runner, which gets its own part of the seeds: env i of the group is reset
            with `seed + i`. `worker_index` is that of runner 0's first life; each further life of
            a runner takes one more.
        make_policies: Instead of `policies`: `(pool, worker index) -> policies`, called in the
            runner's process. No other runner, and no other life of it, has that index.
        make_runner: A class derived from `EnvRunner` or `BaseEnvRunner`, or a function, called in
            the runner's process instead of `EnvRunner`, with what that takes. Without `envs` and
            policies it is called with the config alone, and makes its own.
        num_envs: How many envs a function `envs` makes; or, without `envs`, how many all runners
            together count for, where numbers and env ids are shared out: None is one each.
        settings: How processes are started and watched; None: the defaults.

    Raises:
        ConfigError: A setting cannot be used.
        EncodeError: Envs, policies or config cannot be pickled.
        StartError: A runner did not come up.
        RemoteError: A factory, an env or a runner's constructor raised. No process is left.
    """

    def __init__(
        self,
        num_runners: int,
        envs: AnyEnvs | Callable[[int], Any] | str | None = None,
        policies: Policies | PolicyHandle | None = None,
        config: RunnerConfig | None = None,
        *,
        make_policies: MakePolicies | None = None,
        make_runner: MakeRunnerOfOwn | None = None,
        num_envs: int | None = None,
        settings: GroupConfig | None = None,
    ) -> None:
        _check_parts(envs, policies, make_policies, make_runner)
        if isinstance(policies, PolicyHandle):
            policies = _all_of(policies)
        if config is not None:
            example = "RunnerConfig(rollout_fragment_length=128)"
            check_kind("config", config, RunnerConfig, example=example)
        if settings is not None:
            check_kind("settings", settings, GroupConfig, example="GroupConfig(sample_timeout=60)")
        config, settings = config or RunnerConfig(), settings or GroupConfig()
        if envs is None:
            parts = [
                RunnerSpec(None, {}, None, None, config, make_runner, count)
                for count in counts_of(num_runners, num_envs)
            ]
        else:
            shares = envs_of(num_runners, envs, settings, cores=usable_cores(), num_envs=num_envs)
            parts = [
                RunnerSpec(part, pool, policies, make_policies, config, make_runner)
                for part, pool in shares
            ]
        self.config = config
        self.settings = settings
        self.closed = False
        self.metrics = SampleMetrics()
        #: Envs that their runners have given up, by runner.
        self._lost_envs: dict[int, set[int]] = {}
        #: Of each runner's present life: means in ms, of how many iterations.
        self._timers: dict[int, tuple[dict[str, float], int]] = {}
        #: By runner: what it told of its connectors.
        self._connectors: dict[int, dict[str, dict[str, Any]]] = {}
        self._num_samples = 0
        #: `sample_async` was called, and what came of it was not collected yet, but for faults.
        self._is_asked = False
        #: What Ctrl-C kept from the caller of `sample`, or `collect`.
        self._kept: list[GroupSample] = []
        self._worker_group = RunnerWorkerGroup(
            parts,
            FleetConfig(
                context=settings.context,
                timeouts=settings.timeouts,
                restart=settings.restart,
                memory_limit_mb=settings.memory_limit_mb,
                preload=settings.preload,
                threads_per_process=settings.threads_per_process,
            ),
        )
        # Not `__del__`: see `BusVectorEnv`.
        self._finalizer = weakref.finalize(self, self._worker_group.abandon)
        try:
            self._worker_group.start()
            self._rounds = Rounds(
                self._worker_group,
                config.connectors(),
                self._worker_group.first_versions(),
                settings.sample_timeout,
            )
        except BaseException:
            self.stop(terminate=True)
            raise
        show(self, type(self).__name__)

    # --- samples -------------------------------------------------------------------------------

    def sample(
        self,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        timeout: float | None = None,
        force_reset: bool = False,
        explore: bool | None = None,
    ) -> GroupSample:
        """Have all runners sample, and return their rows, ordered by runner.

        Each env of the group contributes an equal part. Without a number, each contributes
        `rollout_fragment_length` steps. A runner that is being started again is not waited for:
        the others take over its part. What a runner that dies meanwhile had sampled is lost; it
        is named in `runner_faults`.

        Args:
            num_env_steps: Of all together; exactly, or in complete_episodes mode at least.
            num_episodes: Of all together, exactly; each whole.
            timeout: Seconds after which what is there is returned. `late` names envs that were
                awaited, `late_runners` runners that have not answered at all. Nothing is lost:
                what a late runner was asked for comes with the next call, and is counted there.
                None: no limit but `sample_timeout` per runner.
            force_reset: Give up all running episodes and begin new ones.
            explore: None: as configured.

        Raises:
            ValueError: Both numbers, or a negative one.
            RemoteError: A runner's `sample`, or its `set_weights`, raised; what others have
                sampled comes with the next call.
            RestartLimitError: No runner is left.

        Ctrl-C takes nothing away: what runners were asked for comes with the next call.
        """
        quota = Quota.of(num_env_steps, num_episodes)
        seconds, force_reset = _seconds(timeout), bool(force_reset)
        explore = None if explore is None else bool(explore)
        deadline = None if seconds is None else time.monotonic() + seconds
        return hand_out(
            lambda: self._sample(quota, deadline, force_reset=force_reset, explore=explore),
            self._kept.append,
            self._was_raised,
        )

    def _sample(
        self, quota: Quota, deadline: float | None, *, force_reset: bool, explore: bool | None
    ) -> GroupSample:
        self._begin()
        if self._kept:
            return self._kept.pop()
        rounds = self._rounds
        self._wait_for_someone(deadline)
        self._raise_if_none_left()
        actors = rounds.ready()
        owed = [rounds.states[actor.index].owed for actor in actors]
        counts = [actor.num_envs for actor in actors]
        quotas = split_quota(quota, counts, owed, turn=self._num_samples)
        asked = {
            actor.index: part
            for actor, part in zip(actors, quotas, strict=True)
            if part is not None
        }
        slots = rounds.joint.slots(asked)
        for actor in actors:
            if actor.index in asked:
                rounds.ask_sample(
                    actor,
                    asked[actor.index],
                    timeout=_allowed(deadline),
                    force_reset=force_reset,
                    explore=explore,
                    slot=slots.get(actor.index),
                )
        self._num_samples += 1
        self._wait(lambda: bool(rounds.errors) or not rounds.sampling(), deadline)
        self._raise_errors()
        return self._collect(rounds.sampling(), asked)

    def sample_async(
        self,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        timeout: float | None = None,
        force_reset: bool = False,
        explore: bool | None = None,
    ) -> tuple[int, ...]:
        """Ask each runner for a sample that has nothing to do, and return at once.

        Arguments are those of `sample`, of each runner; at `timeout` it delivers what it has.

        Returns:
            Who was asked: not those that sample already, wait to be collected, or do not run.

        Raises:
            ValueError, RemoteError, RestartLimitError: As `sample`.
        """
        quota = Quota.of(num_env_steps, num_episodes)
        timeout, force_reset = _seconds(timeout), bool(force_reset)
        explore = None if explore is None else bool(explore)

        def ask() -> tuple[int, ...]:
            self._begin()
            self._raise_if_none_left()
            self._is_asked = True
            return tuple(
                actor.index
                for actor in self._rounds.ready()
                if self._rounds.states[actor.index].owed is None
                and self._rounds.ask_sample(
                    actor, quota, timeout=timeout, force_reset=force_reset, explore=explore
                )
            )

        return hand_out(ask, lambda _: None, self._was_raised)

    def collect(self, min_runners: int = 1, timeout: float | None = None) -> GroupSample:
        """Wait until `min_runners` have delivered, and return what is there.

        Returns early when nobody is at work any more, because of faults. Where nobody could be
        asked, as all were being started again, it waits for one and returns no rows: ask again.

        Args:
            min_runners: From 1 to the number of runners; fewer where fewer were asked.
            timeout: Seconds; `late_runners` then names who is still at work.

        Raises:
            NoAsyncCallError: `sample_async` was not called.
            ValueError, RemoteError: As `sample`.
        """
        check_number("min_runners", min_runners, whole=True, least=1, most=self.num_runners)
        seconds = _seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        return hand_out(
            lambda: self._collect_some(min_runners, deadline), self._kept.append, self._was_raised
        )

    def _collect_some(self, min_runners: int, deadline: float | None) -> GroupSample:
        self._begin()
        if self._kept:
            return self._kept.pop()
        rounds = self._rounds
        if not rounds.sampling() and not rounds.delivered() and not rounds.faults:
            if not self._is_asked:
                text = "Calling `collect` without any prior `sample_async`."
                raise NoAsyncCallError(text, "collect")
            self._wait_for_someone(deadline)
        enough = self._wait(
            lambda: (
                bool(rounds.errors)
                or len(rounds.delivered()) >= min_runners
                or not rounds.sampling()
            ),
            deadline,
        )
        self._raise_errors()
        return self._collect(() if enough else rounds.sampling())

    def get_metrics(self) -> dict[str, Any]:
        """Return statistics of all samples that were handed out since the last call.

        As `EnvRunner.get_metrics`; the timers are means over all runners' iterations, and what is
        told of connectors is the mean over runners.
        """
        connectors = ConnectorTimes().read({}) | mean_over_runners(self._connectors.values())
        return {**self.metrics.read(), **self._mean_timers(), **connectors}

    # --- weights and functions ---------------------------------------------------------------

    @uninterrupted_call
    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id: those that were set last, else a runner's.

        Policies that no runner has any more are left out.

        Raises:
            ConfigError: `policy_ids` are no ids, or there is no such policy.
            RestartLimitError: No runner is left to be asked.
            TimeoutError: None of them answers; each has `timeouts.call`.
        """
        self._assert_open()
        known = list(self._rounds.present_versions())
        names = chosen_ids(policy_ids, known)
        found = self._versioned_weights([name for name in names if name in known])
        if policy_ids is not None and len(found) < len(names):
            check_known(names, self._rounds.present_versions())
            check_known(names, found)
        return {name: weights for name, (weights, _) in found.items()}

    def _versioned_weights(self, names: Sequence[str]) -> dict[str, tuple[Weights, int]]:
        """Return weights, and the version of each, of those that were set or that a runner has."""
        found = {name: self._rounds.weights[name] for name in names if name in self._rounds.weights}
        missing = [name for name in names if name not in found]
        silent: set[tuple[int, int]] = set()  # lives: who died, or may hang
        while missing:
            self._wait_for_someone(None)
            self._raise_if_none_left()
            able = [
                actor
                for actor in self._rounds.ready()
                if self._rounds.states[actor.index].may_have(missing)
            ]
            if not able:
                break
            busy = self._rounds.sampling()
            _, _, index, life = min(
                ((a.index, a.incarnation) in silent, a.index in busy, a.index, a.incarnation)
                for a in able
            )
            if (index, life) in silent:
                raise TimeoutError("no runner told its weights within `timeouts.call`")
            if answer := self.foreach(_weights_of, missing, runners=[index]):
                found |= answer[index]
                missing = [name for name in missing if name not in found]
            else:
                silent.add((index, life))
        # Copies, and writable ones, also of what has come in a message.
        return {name: copy.deepcopy(found[name]) for name in names if name in found}

    @uninterrupted_call
    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Have all runners use weights, by policy id, from their next fragments on.

        Waits for nobody: a runner that samples goes on, and takes them before it samples again.
        Each row says by `policy_version` which weights chose its action.

        Args:
            weights: Copied.
            version: None: per policy, the one after the present.

        Raises:
            ConfigError: There is no such policy, or it is in policy workers. Nothing was sent.
            EncodeError: They cannot be pickled, or are larger than a message. Nothing was sent.
        """
        self._assert_open()
        check_weights(weights, version)
        check_are_here(weights, self._worker_group.elsewhere())
        self._rounds.take_events(0.0)
        self._rounds.set_weights(weights, None if version is None else int(version))

    @uninterrupted_call
    def foreach(
        self,
        function: Callable[..., Any],
        *args: Any,
        runners: Sequence[int] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Call `function(runner, *args, **kwargs)` in each runner's process.

        A runner that samples does it afterwards. What it changes in a runner is gone with that
        runner's life: a policy that it adds is not in the next one, and one that it removes is.
        Weights of a policy that a runner does not have are left out there. The function goes to the
        runner by cloudpickle, over the pipe that it has inherited; so does what it returns, where
        MessagePack has no form for it. Arrays in the results are read-only.

        Args:
            function: Any function; `runner` is the `EnvRunner`, or what `make_runner` made.
            *args: Its further arguments.
            runners: Which; None: all that run.
            timeout: Seconds; None: `timeouts.call`.
            **kwargs: Its keyword arguments.

        Returns:
            Results by index of the runner, without those that do not run, died, or were late.

        Raises:
            ConfigError: `function` cannot be called.
            ValueError: There is no such runner.
            RemoteError: It raised in a runner; of several the one with the lowest index is told.
            EncodeError: Something cannot be pickled.
        """
        self._assert_open()
        if not callable(function):
            raise ConfigError(f"function must be callable, not {brief(function)}")
        seconds = _seconds(timeout, over=0)
        chosen = self._choose(runners)
        limit = self.settings.timeouts.call if seconds is None else seconds
        request = Apply(function=Tree(function), args=Tree(args), kwargs=Tree(kwargs))
        ticket = self._rounds.ask_all(chosen, request, limit)
        self._wait_for(ticket, limit)
        if ticket.errors:
            raise ticket.errors[min(ticket.errors)]
        return dict(sorted(ticket.values.items()))

    # --- about it ----------------------------------------------------------------------------

    @property
    def num_runners(self) -> int:
        """Runners, also those that were given up."""
        return len(self._worker_group.actors)

    @property
    def num_envs(self) -> int:
        """Envs of all runners."""
        return self._worker_group.num_envs

    @property
    def policy_versions(self) -> dict[str, int]:
        """Which weights each policy has, or will have before its next fragment."""
        return self._rounds.present_versions()

    def runner_pids(self) -> list[int]:
        """Return the process ids of the runners that have a process."""
        return [actor.pid for actor in self._worker_group.actors if actor.pid is not None]

    def get_spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the envs have them."""
        return self._worker_group.spaces()

    def statistics(self) -> WorkerGroupStatistics:
        """Return counts of processes since the start."""
        return self._worker_group.statistics()

    @uninterrupted_call
    def assert_healthy(self) -> None:
        """Raise if it cannot sample with all of its envs; runners that restart will be back.

        Raises:
            ClosedEnvironmentError: It was stopped.
            RestartLimitError: Runners, or envs of runners, were given up; they are named.
        """
        self._assert_open()
        self._rounds.take_events(0.0)
        lost = [actor.index for actor in self._rounds.lost()]
        if lost:
            raise RestartLimitError(
                f"runners {lost} of {self.num_runners} failed too often and were given up; the "
                "log and `runner_faults` of samples say why"
            )
        envs = sorted(set().union(*self._lost_envs.values()))
        if envs:
            raise RestartLimitError(
                f"envs {envs} of {self.num_envs} failed too often and were given up; the log and "
                "`faults` of samples say why"
            )

    @uninterrupted_call
    def probe(self, timeout: float = 5.0) -> list[RunnerStatus]:
        """Look after all runners; those that have nothing to do are asked for a sign of life.

        Args:
            timeout: Seconds to wait for it.
        """
        self._assert_open()
        seconds = _seconds(timeout, over=0)
        self._rounds.take_events(0.0)
        busy = set(self._rounds.sampling())
        idle = [actor for actor in self._rounds.ready() if actor.index not in busy]
        ticket = self._rounds.ask_all(idle, RollCall(), seconds)
        self._wait_for(ticket, seconds)
        # Also one that could not be asked, of whose end nobody has been told yet.
        silent = {actor.index for actor in idle} - ticket.values.keys()
        return [self._status(actor, silent) for actor in self._worker_group.actors]

    @uninterrupted_call
    def restart(self, runner: int, reason: str = "it was asked to restart") -> None:
        """Kill a runner, whatever it does, and start it again, if that is not too often.

        It is told in `runner_faults`, and counts as a failure. Returns at once.

        Raises:
            ValueError: There is no such runner.
        """
        self._assert_open()
        self._check_runners(as_ids("runner", [runner]))
        actor = self._worker_group.actors[runner]
        if actor.pid is not None:
            self._worker_group.kill(actor, FaultCause.REQUEST, reason)

    @uninterrupted_call
    def get_state(self) -> dict[str, Any]:
        """Return weights, their versions, connectors' merged states and counts of a lifetime.

        Policies in policy workers are left out: `PolicyWorkers` has their weights.

        Who takes it over uses no id of an episode, or of a sample, a second time.
        """
        elsewhere = self._worker_group.elsewhere()
        self._assert_open()
        weights = self._versioned_weights(
            [name for name in self._rounds.present_versions() if name not in elsewhere]
        )
        next_eps_id, num_samples = self._rounds.ids_reached
        return {
            "weights": {name: values for name, (values, _) in weights.items()},
            "policy_versions": {name: version for name, (_, version) in weights.items()},
            "connectors": copy.deepcopy(self._rounds.connector_states),
            "metrics": self.metrics.get_state(),
            "num_samples": num_samples,
            "next_eps_id": next_eps_id,
        }

    @uninterrupted_call
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this group or another; episodes go on.

        They keep their ids, as in `EnvRunner.set_state`. Samples under way come as they were asked,
        with what connectors have learnt in them: collect these before.

        Raises:
            ConfigError: It has a policy that is not here, or is in policy workers, or lacks a
                connector that is here. Nothing was set.
            Exception: What a connector, or the metrics, raise that do not take their part, or what
                weights raise that cannot be copied, or sent. Nothing was set.
        """
        self._assert_open()
        check_state(state, "weights", "policy_versions", "connectors", "metrics")
        check_state(state, "num_samples", "next_eps_id")
        rounds = self._rounds
        rounds.take_events(0.0)
        weights, connectors = state["weights"], state["connectors"]
        check_known(weights, rounds.versions)
        if missing := sorted(rounds.connector_states.keys() - connectors.keys()):
            raise ConfigError(f"the state has nothing of the connectors {missing}")
        check_are_here(weights, self._worker_group.elsewhere())
        for name, values in weights.items():
            check_kind(f"weights of {name!r}", values, Mapping, example="policy.get_weights()")
        versions = checked_versions(state["policy_versions"], weights)
        ids = checked_ids(state)
        rounds.check_connectors(connectors)
        weights = copy.deepcopy(dict(weights))
        rounds.check_weights(weights)
        connectors = copy.deepcopy({name: connectors[name] for name in rounds.connector_states})
        self.metrics.set_state(state["metrics"])  # all of it or nothing
        rounds.go_on_from(*ids)
        rounds.set_connectors(connectors)
        rounds.set_weights(weights, versions)

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; called by another thread than samples."""
        counts, levels = figures_of(self._worker_group.statistics())
        counts |= self.metrics.get_state()
        return PartFigures(
            name=name,
            kind=type(self).__name__,
            counts=counts,
            levels=levels,
            processes=[
                actor.figures(busy=self._rounds.states[actor.index].is_sampling)
                for actor in self._worker_group.actors
            ],
            faults=self._worker_group.recent_ends(),
            restarts=self._worker_group.config.restart_policy is not None,
        )

    def stop(self, *, terminate: bool = False) -> None:
        """Have all runners close their envs and leave; kill those that do not. Idempotent.

        Args:
            terminate: Do not ask, kill. Otherwise they have `timeouts.close`.
        """
        self.closed = True
        try:
            self._worker_group.close(terminate=terminate)
        finally:
            unshow(self)
        self._finalizer.detach()
        if hasattr(self, "_rounds"):  # else no runner came up
            self._rounds.let_go()

    def __enter__(self) -> EnvRunnerGroup:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.stop(terminate=exc_type is not None)

    # --- private -----------------------------------------------------------------------------

    def _collect(self, late: Sequence[int], asked: Asked | None = None) -> GroupSample:
        """Return what was delivered, and, if that is all that was asked, sample like it again."""
        rounds = self._rounds
        parts, faults = rounds.parts(), tuple(rounds.faults)
        try:
            sample = join(parts, late, faults, rounds.joint.join)
        except ValueError:  # nor will they fit the next time
            self._take(parts, asked)
            raise
        self._take(parts, asked)
        return sample

    def _take(self, parts: Sequence[RunnerPart], asked: Asked | None) -> None:
        rounds = self._rounds
        rounds.take(parts)
        if asked is not None and [part.runner for part in parts] == list(asked):
            rounds.joint.learn(asked, {part.runner: part.locations for part in parts})
        for part in parts:
            self._note(part)
        for fault in rounds.faults:
            self._lost_envs.pop(fault.runner, None)
        self._is_asked = bool(rounds.faults)
        rounds.faults.clear()

    def _note(self, part: RunnerPart) -> None:
        """Count what a runner tells."""
        report = part.report
        self.metrics.add_delta(report.metrics)
        self._timers[part.runner] = (report.timers, report.iterations)
        self._connectors[part.runner] = report.connector_metrics
        given_up = {fault.env_id for fault in report.faults if fault.given_up}
        if given_up:
            self._lost_envs.setdefault(part.runner, set()).update(given_up)

    def _mean_timers(self) -> dict[str, float]:
        total = sum(iterations for _, iterations in self._timers.values())
        if not total:
            return PerfTimers().read()
        return {
            name: sum(means[name] * count for means, count in self._timers.values()) / total
            for name in PerfTimers().read()
        }

    def _begin(self) -> None:
        """Begin a call: take what has come, and raise what has to be."""
        self._assert_open()
        self._rounds.take_events(0.0)
        self._raise_errors()

    def _wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until something holds; return whether it did before the deadline.

        Who was away, or stopped, until then takes what has come meanwhile first.
        """
        while not done():
            left = LONGEST_WAIT if deadline is None else deadline - time.monotonic()
            try:
                self._rounds.take_events(min(max(left, 0.0), LONGEST_WAIT))
            except EnvbusError:
                self._assert_open()  # it was stopped, by a signal's handler
                raise
            if left <= 0:
                return done()
        return True

    def _wait_for_someone(self, deadline: float | None) -> None:
        """Wait until a runner can be asked, or none is left; tell at times who is waited for."""
        rounds, pause = self._rounds, PROGRESS_AFTER
        begun = time.monotonic()
        while True:
            until = time.monotonic() + pause
            until = until if deadline is None else min(until, deadline)
            if self._wait(lambda: bool(rounds.ready()) or not self._any_left(), until):
                return
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            starting = ", ".join(
                f"runner {actor.index} (life {actor.incarnation + 1})"
                for actor in self._worker_group.actors
                if actor.state is not ActorState.LOST
            )
            logger.warning(
                "no runner is there since %.0f s; being started again: %s", now - begun, starting
            )
            pause = min(2.0 * pause, _MOST_PAUSE)

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait(lambda: not ticket.open, deadline)

    def _raise_errors(self) -> None:
        """Raise an error if there is one, until it `_was_raised`."""
        if self._rounds.errors:
            raise self._rounds.errors[0]

    def _was_raised(self, error: BaseException) -> None:
        """The caller gets this; if it is what was to be raised, and not Ctrl-C, it was told."""
        if self._rounds.errors and self._rounds.errors[0] is error:
            del self._rounds.errors[0]

    def _any_left(self) -> bool:
        return len(self._rounds.lost()) < self.num_runners

    def _raise_if_none_left(self) -> None:
        if not self._any_left():
            self.assert_healthy()

    def _choose(self, runners: Sequence[int] | None) -> list[RunnerProcess]:
        chosen = range(self.num_runners) if runners is None else as_ids("runners", runners)
        self._check_runners(chosen)
        self._rounds.take_events(0.0)
        return [actor for actor in self._rounds.ready() if actor.index in chosen]

    def _check_runners(self, runners: Iterable[int]) -> None:
        for index in runners:
            if not 0 <= index < self.num_runners:
                last = self.num_runners - 1
                raise ValueError(f"unknown runner {index}; there are runners 0 to {last}")

    def _status(self, actor: RunnerProcess, silent: set[int]) -> RunnerStatus:
        known = self._rounds.states[actor.index]
        state: Literal["ready", "sampling", "silent", "starting", "lost"]
        if actor.state is ActorState.LOST:
            state = "lost"
        elif actor.state is not ActorState.READY:
            state = "starting"
        elif known.is_sampling:
            state = "sampling"
        else:
            state = "silent" if actor.index in silent else "ready"
        return RunnerStatus(
            state=state,
            incarnation=actor.incarnation,
            pid=actor.pid or 0,
            sampling_for=time.monotonic() - known.asked_at if known.is_sampling else 0.0,
        )

    def _assert_open(self) -> None:
        if self.closed or self._worker_group.closed:
            raise ClosedEnvironmentError("Trying to operate on `EnvRunnerGroup`, after `stop()`.")


def _weights_of(runner: BaseEnvRunner, policy_ids: list[str]) -> dict[str, tuple[Weights, int]]:
    """Return weights of policies that a runner has, and the version of each."""
    found = runner.policies
    return {name: versioned_weights(found[name]) for name in policy_ids if name in found}


def _check_parts(
    envs: object,
    policies: object,
    make_policies: object,
    make_runner: object,
) -> None:
    """See that runners are given what they are made of.

    Raises:
        ConfigError: Something is missing, or too much.
    """
    if make_runner is not None and not callable(make_runner):
        raise ConfigError(f"make_runner must be a class or a function, not {brief(make_runner)}")
    if envs is None:
        if make_runner is None:
            raise ConfigError("give envs; or make_runner, for runners that make envs themselves")
        if policies is not None or make_policies is not None:
            raise ConfigError(
                "runners that make their own envs make their policies, too: leave policies and "
                "make_policies out, or give envs"
            )
    elif (policies is None) == (make_policies is None):
        raise ConfigError("give policies or make_policies")


def _all_of(handle: PolicyHandle) -> Policies:
    if len(handle.policy_ids) == 1:
        return handle.policy()
    return {policy_id: handle.policy(policy_id) for policy_id in handle.policy_ids}


def _seconds(timeout: float | None, over: float = -math.inf) -> float | None:
    """Return a time-out that requests can have; None: without end.

    Raises:
        ConfigError: It is no number, or not `over` that.
    """
    check_number("timeout", timeout, over=over, optional=True)
    return None if timeout is None else float(min(timeout, _LONGEST))


def _allowed(deadline: float | None) -> float | None:
    """Return how long runners may take, so that what they have is there at the deadline."""
    if deadline is None:
        return None
    left = max(deadline - time.monotonic(), 0.0)
    return left - min(left * _RETURN_PART, _RETURN_SECONDS)
