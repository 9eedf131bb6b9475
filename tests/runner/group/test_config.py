from __future__ import annotations

from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.group.config import GroupConfig, counts_of, envs_of


def test_envs_are_shared_out_evenly_and_cores_too() -> None:
    parts = envs_of(3, list("abcdefgh"), GroupConfig(), cores=6)
    assert [part for part, _ in parts] == [["a", "b"], ["c", "d", "e"], ["f", "g", "h"]]
    assert [settings for _, settings in parts] == [{"num_actors": 2}] * 3
    assert envs_of(2, ["a", "b", "c"], GroupConfig(), cores=1)[1][1] == {"num_actors": 1}
    assert envs_of(
        1, ["a", "b"], GroupConfig(pool_settings={"num_actors": 1, "local_links": False}), cores=9
    ) == [(["a", "b"], {"num_actors": 1, "local_links": False})]


def test_a_function_makes_the_pool_of_each_runner() -> None:
    def make(index: int) -> Any:
        raise NotImplementedError

    assert envs_of(2, make, GroupConfig(), cores=2) == [(make, {})] * 2
    with pytest.raises(ConfigError, match="sequence"):
        envs_of(2, make, GroupConfig(pool_settings={"num_actors": 1}), cores=2)


def test_a_function_of_an_env_s_index_counts_through_all_runners() -> None:
    parts = envs_of(2, lambda index: index, GroupConfig(), cores=2, num_envs=5)
    assert [[make() for make in part] for part, _ in parts] == [[0, 1], [2, 3, 4]]


def test_runners_that_make_their_own_envs_count_for_one_or_for_as_many_as_is_said() -> None:
    assert counts_of(3, None) == [1, 1, 1]
    assert counts_of(3, 8) == [2, 3, 3]
    with pytest.raises(ConfigError, match="not enough for 3"):
        counts_of(3, 2)
    with pytest.raises(ConfigError, match="num_runners"):
        counts_of(0, None)


@pytest.mark.parametrize("number", [0, -1, True])
def test_there_is_at_least_one_runner_with_an_env(number: int) -> None:
    with pytest.raises(ConfigError, match="num_runners"):
        envs_of(number, ["a"], GroupConfig(), cores=1)
    with pytest.raises(ConfigError, match="not enough for 3"):
        envs_of(3, ["a", "b"], GroupConfig(), cores=1)


def test_a_sample_timeout_is_positive() -> None:
    with pytest.raises(ConfigError, match="sample_timeout"):
        GroupConfig(sample_timeout=0.0)
