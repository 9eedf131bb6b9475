from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Tree
from envbus.runner.group.host import HostedRunner
from envbus.runner.group.protocol import (
    Apply,
    Here,
    MakeEnvs,
    MakeRunner,
    RollCall,
    RunnerSpec,
    TakeSample,
)
from envbus.runner.group.sample_memory import SampleMemory
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.config import RunnerConfig


def hosted_by(
    envs: Callable[[int], Any], make_policies: Callable[[ActorPool, int], Any]
) -> tuple[HostedRunner, MakeEnvs]:
    parts = RunnerSpec(envs, {}, None, make_policies, RunnerConfig())
    return HostedRunner(SampleMemory(lambda fd: fd)), MakeEnvs(index=0, parts=Tree(parts))


def test_a_function_that_returns_no_pool_is_told() -> None:
    hosted, request = hosted_by(lambda _: None, lambda _, __: None)
    with pytest.raises(ConfigError, match=r"what envs\(index\) returns must be ActorPool"):
        hosted.make_envs(request)
    hosted.close()


def test_a_function_that_returns_no_policies_is_told() -> None:
    hosted, request = hosted_by(
        lambda _: ActorPool(["CartPole-v1"], num_actors=0), lambda _, __: None
    )
    assert hosted.make_envs(request).num_envs == 1
    with pytest.raises(ConfigError, match="make_policies has returned None"):
        hosted.make_runner(MakeRunner(seed=None, worker_index=0))
    hosted.close()


class Listing(BaseEnvRunner):
    """Returns what a group cannot join."""

    def sample(self, **limits: Any) -> Any:
        return [limits]

    def get_spaces(self) -> dict[Any, Any]:
        return {}

    def assert_healthy(self) -> None:
        """Always."""


def own(make_runner: Any) -> HostedRunner:
    parts = RunnerSpec(None, {}, None, None, RunnerConfig(), make_runner, 3)
    hosted = HostedRunner(SampleMemory(lambda fd: fd))
    assert hosted.make_envs(MakeEnvs(index=0, parts=Tree(parts))).num_envs == 3
    return hosted


def test_what_a_group_cannot_join_is_told_with_how_to_have_it() -> None:
    hosted = own(Listing)
    made = hosted.make_runner(MakeRunner(seed=4, worker_index=2))
    assert (made.spaces.value, made.policy_versions, made.elsewhere) == ({}, {}, [])
    assert (
        hosted.apply(
            Apply(function=Tree(lambda runner: runner.config.seed), args=Tree(()), kwargs=Tree({}))
        ).value.value
        == 4
    )
    assert isinstance(hosted.answer(RollCall()), Here)
    with pytest.raises(TypeError, match=r"Listing\.sample returned .* foreach"):
        hosted.take_sample(TakeSample(updates={}))
    hosted.close()


def test_what_is_no_runner_is_told() -> None:
    hosted = own(lambda config: config)
    with pytest.raises(ConfigError, match="what make_runner returns must be BaseEnvRunner"):
        hosted.make_runner(MakeRunner(seed=None, worker_index=0))
    hosted.close()
