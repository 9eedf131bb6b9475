"""`EnvRunnerGroup`: several `EnvRunner`s, each in a process of its own, sampled as one.

Leaves out what else is done with runners (`group/upkeep.py`), their processes
(`group/runner_process.py`), what they are asked (`group/rounds.py`), how much each is asked for
(`group/shares.py`), and how samples become one (`group/joining.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import NoAsyncCallError

from envbus.bus.errors import ConfigError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.config import check_kind
from envbus.runner.episode import DEFAULT_POLICY_ID
from envbus.runner.group.config import GroupConfig, envs_of
from envbus.runner.group.joining import GroupSample, RunnerPart, join
from envbus.runner.group.joint_memory import Asked
from envbus.runner.group.protocol import AnyEnvs, MakePolicies, Parts
from envbus.runner.group.shares import Share, share_out
from envbus.runner.group.upkeep import Upkeep
from envbus.runner.links import usable_cores
from envbus.runner.metrics import PerfTimers
from envbus.runner.policy_map import Policies
from envbus.runner.remote_policy import PolicyHandle, RemotePolicy
from envbus.runner.sampling import RunnerConfig

__all__ = ["EnvRunnerGroup"]

#: Of a time-out, what is left for the way back of what runners have by then: this part, and at
#: most as many seconds.
_RETURN_PART, _RETURN_SECONDS = 0.1, 1.0


class EnvRunnerGroup(Upkeep, StaysHere):
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
            the runner) -> ActorPool` that is called in the runner's process.
        policies: As `EnvRunner` takes them; each runner gets a copy. Copies of one that draws
            random numbers from a seed all draw the same ones: use `make_policies` for it. Those of
            `PolicyWorkers` (`workers.policy()`, or the handle for all) are asked by all runners.
        config: Of each runner, which gets its own part of the seeds: env i of the group is reset
            with `seed + i`. `worker_index` is that of runner 0's first life; each further life of
            a runner takes one more.
        make_policies: Instead of `policies`: `(pool, worker index) -> policies`, called in the
            runner's process. No other runner, and no other life of it, has that index.
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
        envs: AnyEnvs,
        policies: Policies | PolicyHandle | None = None,
        config: RunnerConfig | None = None,
        *,
        make_policies: MakePolicies | None = None,
        settings: GroupConfig | None = None,
    ) -> None:
        if (policies is None) == (make_policies is None):
            raise ConfigError("give policies or make_policies")
        if isinstance(policies, PolicyHandle):
            policies = _all_of(policies)
        if config is not None:
            example = "RunnerConfig(rollout_fragment_length=128)"
            check_kind("config", config, RunnerConfig, example=example)
        if settings is not None:
            check_kind("settings", settings, GroupConfig, example="GroupConfig(sample_timeout=60)")
        config, settings = config or RunnerConfig(), settings or GroupConfig()
        parts = [
            Parts(part, pool, policies, make_policies, config)
            for part, pool in envs_of(num_runners, envs, settings, cores=usable_cores())
        ]
        super().__init__(parts, config, settings, _remote_ids(policies))
        #: Of each runner's present life: means in ms, of how many iterations.
        self._timers: dict[int, tuple[dict[str, float], int]] = {}
        self._num_samples = 0
        #: What Ctrl-C kept from the caller of `sample`, or `collect`.
        self._kept: list[GroupSample] = []

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
        share = Share.of(num_env_steps, num_episodes)
        check_number("timeout", timeout, optional=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        return hand_out(
            lambda: self._sample(share, deadline, force_reset=force_reset, explore=explore),
            self._kept.append,
        )

    def _sample(
        self, share: Share, deadline: float | None, *, force_reset: bool, explore: bool | None
    ) -> GroupSample:
        self._begin()
        if self._kept:
            return self._kept.pop()
        rounds = self._rounds
        self._wait_for_someone(deadline)
        self._raise_if_none_left()
        actors = rounds.ready()
        owed = [rounds.standings[actor.index].owed for actor in actors]
        counts = [actor.num_envs for actor in actors]
        shares = share_out(share, counts, owed, turn=self._num_samples)
        asked = {
            actor.index: part
            for actor, part in zip(actors, shares, strict=True)
            if part is not None
        }
        rooms = rounds.joint.rooms(asked)
        for actor in actors:
            if actor.index in asked:
                rounds.ask_sample(
                    actor,
                    asked[actor.index],
                    timeout=_allowed(deadline),
                    force_reset=force_reset,
                    explore=explore,
                    room=rooms.get(actor.index),
                )
        self._num_samples += 1
        self._wait(lambda: bool(rounds.errors) or not rounds.sampling(), deadline)
        self._raise_errors()
        return self._collect(rounds.sampling(), asked)

    @uninterrupted_call
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

        Args:
            num_env_steps: Of each runner; as the rest as in `sample`.
            num_episodes: Likewise.
            timeout: Seconds after which a runner delivers what it has.
            force_reset: As in `sample`.
            explore: As in `sample`.

        Returns:
            Who was asked: not those that sample already, wait to be collected, or do not run.

        Raises:
            ValueError, RemoteError, RestartLimitError: As `sample`.
        """
        share = Share.of(num_env_steps, num_episodes)
        self._begin()
        self._raise_if_none_left()
        asked = []
        for actor in self._rounds.ready():
            if self._rounds.standings[actor.index].owed is None and self._rounds.ask_sample(
                actor, share, timeout=timeout, force_reset=force_reset, explore=explore
            ):
                asked.append(actor.index)
        return tuple(asked)

    def collect(self, min_runners: int = 1, timeout: float | None = None) -> GroupSample:
        """Wait until `min_runners` have delivered, and return what is there.

        Returns early when nobody is at work any more, because of faults.

        Args:
            min_runners: From 1 to the number of runners; fewer where fewer were asked.
            timeout: Seconds; `late_runners` then names who is still at work.

        Raises:
            NoAsyncCallError: Nobody was asked.
            ValueError, RemoteError: As `sample`.
        """
        check_number("min_runners", min_runners, whole=True)
        check_number("timeout", timeout, optional=True)
        if not 1 <= min_runners <= self.num_runners:
            raise ValueError(f"min_runners must be from 1 to {self.num_runners}, not {min_runners}")
        deadline = None if timeout is None else time.monotonic() + timeout
        return hand_out(lambda: self._collect_some(min_runners, deadline), self._kept.append)

    def _collect_some(self, min_runners: int, deadline: float | None) -> GroupSample:
        self._begin()
        if self._kept:
            return self._kept.pop()
        rounds = self._rounds
        if not rounds.sampling() and not rounds.delivered() and not rounds.faults:
            raise NoAsyncCallError("Calling `collect` without any prior `sample_async`.", "collect")
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

        As `EnvRunner.get_metrics`; the timers are means over all runners' iterations.
        """
        return {**self.metrics.read(), **self._mean_timers()}

    # --- private -----------------------------------------------------------------------------

    def _collect(self, late: Sequence[int], asked: Asked | None = None) -> GroupSample:
        """Return what was delivered, and, if that is all that was asked, sample like it again."""
        rounds = self._rounds
        parts = rounds.take(rounds.delivered())
        if asked is not None and [part.runner for part in parts] == list(asked):
            rounds.joint.learn(asked, {part.runner: part.places for part in parts})
        for part in parts:
            self._note(part)
        faults = tuple(rounds.faults)
        rounds.faults.clear()
        for fault in faults:
            self._lost_envs.pop(fault.runner, None)
        return join(parts, late, faults, rounds.joint.join)

    def _note(self, part: RunnerPart) -> None:
        """Count what a runner tells."""
        report = part.report
        self.metrics.add_delta(report.metrics)
        self._timers[part.runner] = (report.timers, report.iterations)
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


def _all_of(handle: PolicyHandle) -> Policies:
    if len(handle.policy_ids) == 1:
        return handle.policy()
    return {policy_id: handle.policy(policy_id) for policy_id in handle.policy_ids}


def _remote_ids(policies: Policies | None) -> frozenset[str]:
    by_id = policies if isinstance(policies, Mapping) else {DEFAULT_POLICY_ID: policies}
    return frozenset(name for name, one in by_id.items() if isinstance(one, RemotePolicy))


def _allowed(deadline: float | None) -> float | None:
    """Return how long runners may take, so that what they have is there at the deadline."""
    if deadline is None:
        return None
    left = max(deadline - time.monotonic(), 0.0)
    return left - min(left * _RETURN_PART, _RETURN_SECONDS)
