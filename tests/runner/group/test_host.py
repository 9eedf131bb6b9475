from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Tree
from envbus.runner.group.host import HostedRunner
from envbus.runner.group.protocol import MakeEnvs, MakeRunner, RunnerSpec
from envbus.runner.group.sample_memory import SampleMemory
from envbus.runner.pool.pool import ActorPool
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
