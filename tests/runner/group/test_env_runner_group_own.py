"""Groups of runners that are the user's own classes."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import BaseEnvRunner, EnvRunner, EnvRunnerGroup, RunnerConfig, Sample
from envbus.runner.batches import SampleBatch
from tests.runner.group.test_env_runner_group import Steps
from tests.runner.pool_envs import PATIENCE
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True, kw_only=True)
class OwnConfig(RunnerConfig):
    """Settings, and one of its own."""

    length: int = 5


class Own(BaseEnvRunner):
    """Plays an env that it makes itself, by a policy that it makes itself."""

    def __init__(self, config: RunnerConfig) -> None:
        super().__init__(config)
        self.make_env()
        self.make_module()

    def make_env(self) -> None:
        assert isinstance(self.config, OwnConfig)
        self.stop()
        self.env = CountingEnv(self.config.length)

    def make_module(self) -> None:
        self.steps = Steps()

    @property
    def policies(self) -> dict[str, Any]:
        return {"default_policy": self.steps}

    def get_spaces(self) -> dict[Any, Any]:
        return {"default_policy": (self.env.observation_space, self.env.action_space)}

    def assert_healthy(self) -> None:
        """Always."""

    def sample(self, *args: Any, num_env_steps: int | None = None, **limits: Any) -> Sample:
        count = num_env_steps or self.env.length
        observation, _ = self.env.reset(seed=self.config.seed)
        seen, actions = [], []
        for _ in range(count):
            (action,) = self.steps.compute_actions([observation], None).actions
            seen.append(observation)
            actions.append(action)
            observation = self.env.step(action)[0]
        batch = SampleBatch({"obs": np.array(seen), "actions": np.array(actions)})
        self.metrics.add_steps(env_steps=count, agent_steps=count)
        return Sample({"default_policy": batch}, count)


def test_a_group_hosts_runners_of_an_own_class_and_starts_them_again() -> None:
    with EnvRunnerGroup(2, config=OwnConfig(seed=10, length=7), make_runner=Own) as group:
        sample = group.sample(timeout=PATIENCE)
        assert sample.runners == (0, 1)
        batch = sample.single()
        assert batch["obs"][[0, 7], 3].tolist() == [10.0, 11.0]  # each has its own seed
        assert group.sample(num_env_steps=10, timeout=PATIENCE).env_steps == 10
        assert group.get_metrics()["num_env_steps_sampled"] == 24
        assert list(group.get_spaces()) == ["default_policy"]
        group.set_weights({"default_policy": {"number": np.array([4])}})
        assert set(group.sample(timeout=PATIENCE).single()["actions"].tolist()) == {4}
        os.kill(group.runner_pids()[0], signal.SIGKILL)
        wait_until(lambda: group.probe(timeout=PATIENCE)[0].incarnation == 1, "another life")
        wait_until(lambda: group.probe(timeout=PATIENCE)[0].state == "ready", "it to be ready")
        sample = group.sample(timeout=PATIENCE)
        assert set(sample.single()["actions"].tolist()) == {4}  # the group's weights
        assert [fault.runner for fault in sample.runner_faults] == [0]

        def longer(runner: Own) -> Any:
            assert isinstance(runner.config, OwnConfig)
            runner.config = OwnConfig(length=9, worker_index=runner.config.worker_index)
            runner.make_env()
            return runner.env.length, runner.config.worker_index, runner.ping()

        assert group.foreach(longer) == {0: (9, 2, "pong"), 1: (9, 1, "pong")}


class Noting(EnvRunner):
    """An `EnvRunner` that adds a column."""

    def sample(self, *args: Any, **limits: Any) -> Sample:
        sample = super().sample(*args, **limits)
        batch = sample.single()
        batch = batch.with_columns(worker=np.full(len(batch), self.config.worker_index))
        return Sample({"default_policy": batch}, sample.env_steps, episodes=sample.episodes)


@pytest.mark.slow
def test_a_class_that_is_derived_from_env_runner_gets_what_that_takes() -> None:
    envs: Any = functools.partial(CountingEnv)  # of an env's index, which is its length
    with pytest.raises(ConfigError, match="its first argument, 'length', has a default"):
        EnvRunnerGroup(2, envs, Steps(), make_runner=Noting, num_envs=4)
    with EnvRunnerGroup(
        2, lambda index: CountingEnv(index + 1), Steps(), make_runner=Noting, num_envs=4
    ) as group:
        batch = group.sample(num_episodes=4, timeout=PATIENCE).single()
        assert np.bincount(batch["env_id"]).tolist() == [1, 2, 3, 4]
        assert batch["worker"].tolist() == [0] * 3 + [1] * 7


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({}, "give envs; or make_runner"),
        ({"make_runner": Own, "policies": Steps()}, "leave policies and make_policies out"),
        ({"make_runner": 3}, "make_runner must be a class or a function"),
        ({"envs": ["CartPole-v1"], "make_runner": Noting}, "give policies or make_policies"),
    ],
)
def test_what_a_group_is_made_of_must_fit_together(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EnvRunnerGroup(1, **parts)
