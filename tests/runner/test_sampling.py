from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.sampling import Demand, RunnerConfig

ALL = np.ones(4, np.bool_)


def quotas(config: RunnerConfig | None = None, live: Any = ALL, **asked: Any) -> list[int]:
    return Demand.of(config or RunnerConfig(), live, **asked).quotas.tolist()


def test_each_env_contributes_a_fragment() -> None:
    config = RunnerConfig(rollout_fragment_length=7)
    assert quotas(config) == [7] * 4
    assert quotas(config, np.array([True, False, True, True])) == [7, 0, 7, 7]


def test_a_number_is_shared_out_exactly_and_the_rest_goes_round() -> None:
    assert quotas(num_env_steps=10) == [3, 3, 2, 2]
    assert quotas(num_env_steps=10, turn=1) == [2, 3, 3, 2]
    assert quotas(num_episodes=5, live=np.array([True, False, True, True])) == [2, 0, 2, 1]
    assert quotas(num_env_steps=0) == [0] * 4


def test_those_that_step_already_get_one_more_first() -> None:
    assert quotas(num_env_steps=1, first=np.array([False, False, True, False])) == [0, 0, 1, 0]


def test_episodes_are_whole_whatever_the_mode() -> None:
    asked = Demand.of(RunnerConfig(), ALL, num_episodes=2)
    assert (asked.unit, asked.complete) == ("episodes", True)


def test_what_is_counted_follows_the_config() -> None:
    config = RunnerConfig(count_steps_by="agent_steps", batch_mode="complete_episodes")
    asked = Demand.of(config, ALL)
    assert (asked.unit, asked.complete) == ("agent_steps", True)


def test_no_env_left_is_no_error_here() -> None:
    assert quotas(live=~ALL, num_env_steps=3) == [0] * 4


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_env_steps": 1, "num_episodes": 1}, "not both"),
        ({"num_env_steps": -1}, "must not be negative, got -1"),
    ],
)
def test_impossible_demands_are_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quotas(**asked)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_fragment_length": 0},
        {"min_envs": 0},
        {"batch_mode": "whole"},
        {"count_steps_by": "steps"},
        {"faulty_episodes": "keep"},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        RunnerConfig(**settings)


def test_runners_with_other_indices_have_other_ids() -> None:
    assert len({RunnerConfig(worker_index=i).unique(5) for i in range(3)}) == 3


def test_r_20_stragglers_are_those_that_enough_others_do_not_wait_for() -> None:
    for fraction, stragglers in ((1.0, 0), (0.75, 1), (0.7, 1), (0.5, 2), (0.01, 3)):
        assert Demand.of(RunnerConfig(enough_envs=fraction), ALL).stragglers == stragglers
    asked = Demand.of(RunnerConfig(enough_envs=0.5), ALL, num_env_steps=2)
    assert asked.stragglers == 1  # of the two that were asked for anything
    demand = Demand.of(RunnerConfig(enough_envs=0.5), ALL)
    assert [demand.to_wait_for(unmet, 4) for unmet in (4, 3, 2, 1)] == [2, 1, 0, 0]
    assert demand.to_wait_for(4, 1) == 1
    with pytest.raises(ConfigError, match=r"enough_envs must be in \(0, 1\], not 0"):
        RunnerConfig(enough_envs=0.0)
    with pytest.raises(ConfigError, match="groups that take turns wait"):
        RunnerConfig(enough_envs=0.5, pipelined=True)
