from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.runner.env_runner import EnvRunner
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import EndlessEpisodes, RunnerConfig


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


@pytest.mark.parametrize("vectorized", [True, False])
def test_a_sample_of_whole_episodes_tells_of_one_without_an_end(
    caplog: pytest.LogCaptureFixture, vectorized: bool
) -> None:
    envs = [functools.partial(CountingEnv, length) for length in (11_500, 10)]
    pool = ActorPool(envs, num_actors=0, autoreset_mode="Disabled")

    def zeros(observations: Any) -> Any:
        return np.zeros(len(observations), np.int64)

    with EnvRunner(pool, zeros, RunnerConfig(vectorized=vectorized)) as runner:
        assert len(runner.sample(num_episodes=2).episodes) == 2
    assert [record.getMessage()[:32] for record in caplog.records] == [
        "env 0: its episode goes on after"
    ]
