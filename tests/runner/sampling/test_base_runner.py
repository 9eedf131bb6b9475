from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.env_runner import EnvRunner


class Bare(BaseEnvRunner):
    """Has what must be written, and nothing else."""

    def sample(self, *args: Any, **limits: Any) -> Sample:
        self.metrics.add_steps(env_steps=2, agent_steps=2)
        return Sample({}, 2)

    def get_spaces(self) -> dict[Any, Any]:
        env = gymnasium.make("CartPole-v1")
        return {"default_policy": (env.observation_space, env.action_space)}

    def assert_healthy(self) -> None:
        """Always."""


class Trained(Bare):
    """Has a policy, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.policy = MlpPolicy(*self.get_spaces()["default_policy"], seed=seed)

    @property
    def policies(self) -> dict[str, Any]:
        return {"default_policy": self.policy}


def test_what_need_not_be_written_has_a_default() -> None:
    runner = Bare()
    assert runner.config.worker_index == RunnerConfig().worker_index
    assert (runner.ping(), runner.policies, runner.get_policy_spaces()) == ("pong", {}, {})
    runner.sample()
    assert runner.get_metrics()["num_env_steps_sampled"] == 2
    state = runner.get_state()
    other = Bare()
    other.set_state(state)
    assert other.get_metrics()["num_env_steps_sampled_lifetime"] == 2
    runner.go_on_from(7, 1)
    runner.go_on_from(3, 4)
    assert runner.ids_reached() == (7, 4)


def test_a_class_must_say_how_it_samples() -> None:
    base: Any = BaseEnvRunner
    with pytest.raises(TypeError, match="abstract"):
        base()
    for make in (Bare().make_env, Bare().make_module):
        with pytest.raises(ConfigError, match="Bare has no make_"):
            make()
    with pytest.raises(ConfigError, match="config must be RunnerConfig"):
        Bare(**{"config": {"seed": 3}})


def test_weights_and_states_are_those_of_its_policies() -> None:
    one, other = Trained(1), Trained(2)
    assert one.get_policy_spaces() == one.get_spaces()
    other.set_weights(one.get_weights(), version=5)
    assert other.policy.policy_version == 5
    third = Trained(3)
    third.set_state(other.get_state())
    assert third.policy.policy_version == 5
    for name, value in one.get_weights()["default_policy"].items():
        assert np.array_equal(third.get_weights()["default_policy"][name], value)


def test_its_end_closes_the_env_and_may_come_again() -> None:
    class Closing:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    runner, env = Bare(), Closing()
    runner.env = env
    runner.stop()
    runner.stop()
    assert (env.closed, runner.env) == (1, None)


def test_an_env_runner_is_one() -> None:
    assert issubclass(EnvRunner, BaseEnvRunner)
