from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.policies.connectors import ClipRewards, Pipeline
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import (
    EndlessEpisodes,
    EnvQuotas,
    Quota,
    RunnerConfig,
    split_quota,
    worker_index,
)
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.sampling_scenes import zeros

ALL = np.ones(4, np.bool_)


def quotas(config: RunnerConfig | None = None, live: Any = ALL, **asked: Any) -> list[int]:
    return EnvQuotas.of(config or RunnerConfig(), live, **asked).amounts.tolist()


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
    asked = EnvQuotas.of(RunnerConfig(), ALL, num_episodes=2)
    assert (asked.unit, asked.complete) == ("episodes", True)


def test_what_is_counted_follows_the_config() -> None:
    config = RunnerConfig(count_steps_by="agent_steps", batch_mode="complete_episodes")
    asked = EnvQuotas.of(config, ALL)
    assert (asked.unit, asked.complete) == ("agent_steps", True)


def test_no_env_left_is_no_error_here() -> None:
    assert quotas(live=~ALL, num_env_steps=3) == [0] * 4


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


def test_stragglers_are_those_that_enough_others_do_not_wait_for() -> None:
    for fraction, stragglers in ((1.0, 0), (0.75, 1), (0.7, 1), (0.5, 2), (0.01, 3)):
        assert EnvQuotas.of(RunnerConfig(enough_envs=fraction), ALL).stragglers == stragglers
    asked = EnvQuotas.of(RunnerConfig(enough_envs=0.5), ALL, num_env_steps=2)
    assert asked.stragglers == 1  # of the two that were asked for anything
    quotas = EnvQuotas.of(RunnerConfig(enough_envs=0.5), ALL)
    assert [quotas.to_wait_for(unmet, 4) for unmet in (4, 3, 2, 1)] == [2, 1, 0, 0]
    assert quotas.to_wait_for(4, 1) == 1
    with pytest.raises(ConfigError, match="enough_envs must be over 0 and at most 1, not 0"):
        RunnerConfig(enough_envs=0.0)
    with pytest.raises(ConfigError, match="groups that take turns wait"):
        RunnerConfig(enough_envs=0.5, pipelined=True)


# --- quotas -------------------------------------------------------------------------------------


def amounts(quotas: list[Quota | None]) -> list[int]:
    return [0 if quota is None else quota.amount for quota in quotas]


def test_each_env_contributes_an_equal_part_wherever_it_is() -> None:
    quotas = split_quota(Quota("env_steps", 120), [1, 3, 2], [None] * 3, turn=0)
    assert amounts(quotas) == [20, 60, 40]
    assert {quota.unit for quota in quotas if quota} == {"env_steps"}


@pytest.mark.parametrize("turn", range(7))
def test_a_number_that_does_not_divide_is_met_exactly_and_goes_round(turn: int) -> None:
    quotas = split_quota(Quota("episodes", 5), [2, 2], [None, None], turn=turn)
    assert sum(amounts(quotas)) == 5
    assert amounts(quotas) == ([3, 2] if turn % 4 in (0, 1) else [2, 3])


def test_without_a_number_each_takes_a_fragment_unless_it_owes_one() -> None:
    assert split_quota(Quota(), [4, 4], [None, None], turn=0) == [Quota(), Quota()]
    assert split_quota(Quota(), [4, 4], [Quota(), None], turn=0) == [None, Quota()]


def test_who_owes_is_not_asked_and_what_it_owes_counts() -> None:
    owed = [Quota("env_steps", 50), None, None]
    quotas = split_quota(Quota("env_steps", 100), [1, 1, 1], owed, turn=0)
    assert quotas[0] is None
    assert amounts(quotas) == [0, 25, 25]
    assert amounts(split_quota(Quota("env_steps", 40), [1, 1, 1], owed, turn=0)) == [0, 0, 0]
    # Episodes and fragments that are owed do not count as steps.
    owed = [Quota("episodes", 50), None, None]
    assert amounts(split_quota(Quota("env_steps", 100), [1, 1, 1], owed, turn=0)) == [0, 50, 50]


def test_all_may_owe_and_nothing_may_be_wanted() -> None:
    assert split_quota(Quota("env_steps", 9), [1], [Quota("env_steps", 1)], turn=0) == [None]
    assert split_quota(Quota("env_steps", 0), [2, 2], [None, None], turn=0) == [None, None]


def test_a_quota_is_of_one_kind_and_not_negative() -> None:
    assert Quota.of(None, None) == Quota()
    assert (Quota.of(3, None).num_env_steps, Quota.of(3, None).num_episodes) == (3, None)
    assert (Quota.of(None, 3).num_env_steps, Quota.of(None, 3).num_episodes) == (None, 3)
    with pytest.raises(ValueError, match="not both"):
        Quota.of(1, 1)
    with pytest.raises(ValueError, match="num_episodes must be at least 0, not -1"):
        Quota.of(None, -1)


def test_no_two_lives_of_any_runners_have_one_worker_index() -> None:
    indices = [worker_index(7, i, life, 3) for i in range(3) for life in range(10)]
    assert len(set(indices)) == len(indices)
    assert min(indices) == 7


# --- how many envs to wait for ---------------------------------------------------------------


def test_with_a_batch_wait_one_env_stands_for_all() -> None:
    assert RunnerConfig().envs_to_wait_for(8) == 1
    assert RunnerConfig(min_envs=3).envs_to_wait_for(8) == 3
    assert RunnerConfig(batch_wait=0.0).envs_to_wait_for(8) == 8
    assert RunnerConfig(batch_wait=0.1, min_envs=3).envs_to_wait_for(8) == 3


def test_a_batch_wait_that_cannot_be_is_refused() -> None:
    odds: dict[Any, str] = {-0.1: "must be at least 0", "1": "must be a number"}
    for odd, reason in odds.items():
        with pytest.raises(ConfigError, match=f"batch_wait {reason}"):
            RunnerConfig(batch_wait=odd)
    with pytest.raises(ConfigError, match="batch_wait: groups that take turns"):
        RunnerConfig(batch_wait=0.1, pipelined=True)


def test_connectors_of_all_three_kinds_have_names_and_are_looked_at() -> None:
    clip = ClipRewards()
    config = RunnerConfig(reward_connector={"a": clip, "b": clip, "c": Pipeline([ClipRewards(2)])})
    assert list(config.connectors()) == ["reward/a", "reward/c/0:ClipRewards"]
    found = config.connector("reward", "b")
    assert isinstance(found, Pipeline)
    assert found.connectors == {"0:ClipRewards": clip}
    assert config.connector("reward", "d") is None
    odd: Any = np.clip
    with pytest.raises(ConfigError, match=r"reward_connector must be Connector, ClipRewards\(\)"):
        RunnerConfig(reward_connector=odd)


# --- episodes without an end ----------------------------------------------------------------


def test_one_look_in_a_thousand_iterations() -> None:
    endless = EndlessEpisodes(RunnerConfig())
    assert [number for number in range(1, 2500) if endless.is_due()] == [1000, 2000]


@pytest.mark.parametrize(("fragment", "limit"), [(200, 10_000), (5_000, 50_000)])
def test_the_longest_is_told_of_once(
    caplog: pytest.LogCaptureFixture, fragment: int, limit: int
) -> None:
    endless = EndlessEpisodes(RunnerConfig(rollout_fragment_length=fragment))
    endless.look({})
    endless.look({3: limit, 4: 1})
    assert not caplog.records
    endless.look({3: 1, 7: limit + 1, 9: 2})
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"env 7: its episode goes on after {limit + 1} steps"
    ]
    assert not any(endless.is_due() for _ in range(3000))


@pytest.mark.slow
@pytest.mark.parametrize("vectorized", [True, False])
def test_a_sample_of_whole_episodes_tells_of_one_without_an_end(
    caplog: pytest.LogCaptureFixture, vectorized: bool
) -> None:
    envs = [functools.partial(CountingEnv, length) for length in (11_500, 10)]
    pool = ActorPool(envs, num_actors=0, autoreset_mode="Disabled")

    with EnvRunner(pool, zeros, RunnerConfig(vectorized=vectorized)) as runner:
        assert len(runner.sample(num_episodes=2).episodes) == 2
    assert [record.getMessage()[:32] for record in caplog.records] == [
        "env 0: its episode goes on after"
    ]
