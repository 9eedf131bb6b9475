"""A runner's process: makes its envs and its runner, and answers the group.

Leaves out how it joins the bus (`actors/process/joining.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Final

from envbus.actors.process.joining import host
from envbus.actors.spaces import spaces
from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.peer.worker import Handlers, describe
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe
from envbus.bus.wire.messages import Tree
from envbus.runner.group.protocol import (
    Applied,
    Apply,
    EnvsMade,
    Here,
    MakeEnvs,
    MakeRunner,
    Pushed,
    PushWeights,
    Report,
    RollCall,
    RunnerMade,
    RunnerSpec,
    Taken,
    TakeSample,
)
from envbus.runner.group.sample_memory import SampleMemory
from envbus.runner.policies.policy_map import set_elsewhere
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.config import Sample
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.workers.config import check_kind

__all__ = ["ENTRY", "HostedRunner", "main"]

#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"


def main(pipe: Pipe) -> None:
    """Serve the group at the other end of `pipe` until it says to stop."""

    def send_fd(fd: int) -> int:
        number = pipe.next_number()
        pipe.send_fd(number, fd)
        return number

    def receive_fd(number: int) -> int:
        return pipe.receive_fd(number, HANDOVER_TIMEOUT)

    host(pipe, lambda _: HostedRunner(SampleMemory(send_fd, receive_fd)), service="runner")


class HostedRunner:
    """One runner and a handler per request type. Requests are answered one after the other.

    So weights that come while a sample is taken hold from the next one on.
    """

    #: A reply that cannot be sent fails its request.
    amend = None

    def __init__(self, memory: SampleMemory) -> None:
        self._memory = memory
        self.handlers: Handlers = {
            MakeEnvs: self.make_envs,
            MakeRunner: self.make_runner,
            PushWeights: self.push_weights,
            TakeSample: self.take_sample,
            Apply: self.apply,
            RollCall: self.answer,
        }
        self._parts: RunnerSpec | None = None
        self._pool: ActorPool | None = None
        self._made: BaseEnvRunner | None = None

    def make_envs(self, request: MakeEnvs) -> EnvsMade:
        """Make the pool.

        Raises:
            Exception: What the factory, or an env's constructor, raises.
        """
        parts: RunnerSpec = request.parts.value
        self._parts = parts
        if parts.envs is None:
            return EnvsMade(num_envs=parts.num_envs)
        if callable(parts.envs):
            pool = parts.envs(request.index)
            check_kind("what envs(index) returns", pool, ActorPool, example="ActorPool([...])")
            self._pool = pool
        else:
            self._pool = ActorPool(parts.envs, **parts.pool_settings)
        return EnvsMade(num_envs=self._pool.num_envs)

    def make_runner(self, request: MakeRunner) -> RunnerMade:
        """Make the runner.

        Raises:
            ConfigError: As `EnvRunner`; or there are no policies, or what was made is no runner.
        """
        assert self._parts is not None
        parts, pool = self._parts, self._pool
        config = dataclasses.replace(
            parts.config, seed=request.seed, worker_index=request.worker_index
        )
        runner: BaseEnvRunner
        if pool is None:
            assert parts.make_runner is not None
            runner = parts.make_runner(config)
        else:
            policies = parts.policies
            if parts.make_policies is not None:
                policies = parts.make_policies(pool, request.worker_index)
                if policies is None:
                    raise ConfigError("make_policies has returned None; does it lack a `return`?")
            assert policies is not None
            make = parts.make_runner or EnvRunner
            runner = make(pool, policies, config, make_column=self._memory.make)
        check_kind("what make_runner returns", runner, BaseEnvRunner, example="an EnvRunner")
        self._made = runner
        plain = {
            agent_id: [spaces.to_plain(space) for space in both]
            for agent_id, both in runner.get_spaces().items()
        }
        return RunnerMade(
            spaces=Tree(plain),
            policy_versions=self._versions(),
            elsewhere=set_elsewhere(runner.policies),
        )

    def push_weights(self, request: PushWeights) -> Pushed:
        """Set weights, each of its own version, of policies that are here."""
        refused, pushed = {}, request.weights.value
        absent = sorted(pushed.keys() - self._runner.policies.keys())
        for policy_id, (weights, version) in pushed.items():
            if policy_id in absent:
                continue
            try:
                self._runner.set_weights({policy_id: weights}, version)
            except Exception as exc:  # a policy's own code; the others get theirs
                refused[policy_id] = describe(exc)
        return Pushed(refused=refused, absent=absent)

    def take_sample(self, request: TakeSample) -> Taken:
        """Sample, and tell what happened meanwhile."""
        runner = self._runner
        connectors = runner.config.connectors()
        if request.connectors is not None:
            for name, state in request.connectors.value.items():
                connectors[name].sync(state)
        for name, update in request.updates.items():
            connectors[name].update = update
        runner.go_on_from(*request.ids)
        self._memory.enter(request.slot, request.held)
        sample = runner.sample(
            num_env_steps=request.num_env_steps,
            num_episodes=request.num_episodes,
            timeout=request.timeout,
            force_reset=request.force_reset,
            explore=request.explore,
        )
        if not isinstance(sample, Sample):
            raise TypeError(
                f"{type(runner).__qualname__}.sample returned {brief(sample)}; a group joins what "
                "is a Sample, and has anything else by foreach(lambda runner: runner.sample())"
            )
        report = Report(
            late=sample.late,
            faults=sample.faults,
            metrics=runner.metrics.collect_delta(),
            num_episodes=len(sample.episodes),
            timers=runner.timers.read(),
            iterations=runner.timers.iterations,
            connectors={name: one.collect_delta() for name, one in connectors.items()},
            connector_metrics=runner.connector_times.read(connectors),
        )
        rows: dict[str, Any] = {
            policy_id: batch.columns for policy_id, batch in sample.policy_batches.items()
        }
        placed = self._memory.place(rows)
        return Taken(
            rows=Tree(placed.tree),
            locations=placed.locations,
            passed=placed.passed,
            size=placed.size,
            env_steps=sample.env_steps,
            report=Tree(report),
            policy_versions=self._versions(),
            ids=runner.ids_reached(),
        )

    def apply(self, request: Apply) -> Applied:
        """Call a function with the runner."""
        value = request.function.value(self._runner, *request.args.value, **request.kwargs.value)
        return Applied(value=Tree(value), policy_versions=self._versions())

    def answer(self, request: RollCall) -> Here:
        """Give a sign of life.

        Raises:
            Exception: What the runner's `ping` raises.
        """
        del request
        self._runner.ping()
        return Here()

    def close(self) -> None:
        """Stop the runner, or what there is of it."""
        with contextlib.ExitStack() as all_parts:
            all_parts.callback(self._memory.close)
            if self._pool is not None:  # of a runner of the user's own, which may leave it open
                all_parts.callback(self._pool.close)
            if self._made is not None:
                all_parts.callback(self._made.stop)

    @property
    def _runner(self) -> BaseEnvRunner:
        assert self._made is not None
        return self._made

    def _versions(self) -> dict[str, int]:
        return {name: one.policy_version for name, one in self._runner.policies.items()}
