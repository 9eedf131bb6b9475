from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.cli.stepping import Progress
from envbus.runner.cli.tuning import (
    Cost,
    Trial,
    TuneConfig,
    best_of,
    numbers_to_try,
    run_tuning,
    timeouts_of_cost,
)
from envbus.runner.workers.config import Timeouts
from tests.waiting import pass_time


class WaitingEnv(gymnasium.Env[Any, Any]):
    """Computes nothing, and waits for what is elsewhere."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        pass_time(0.02)
        return np.zeros(2, np.float32), 1.0, False, False, {}


def cost(*, step_ms: float = 1.0, step_cpu_ms: float = 1.0) -> Cost:
    return Cost(
        reset_ms=0.0,
        reset_cpu_ms=0.0,
        step_ms=step_ms,
        step_cpu_ms=step_cpu_ms,
        observation_bytes=16,
        memory_mb=40.0,
    )


def trial(num_actors: int, rate: float) -> Trial:
    return Trial(
        num_actors=num_actors,
        envs_per_actor=1,
        env_steps_per_second=rate,
        latency_p50_ms=1.0,
        cores_used=1.0,
        memory_mb=40.0,
    )


@pytest.mark.parametrize(
    ("num_envs", "cores", "of_env", "numbers"),
    [
        (64, 2, cost(), [1, 2, 4]),
        (64, 8, cost(), [1, 4, 8, 16]),
        (3, 8, cost(), [1, 3]),
        (1, 2, cost(), [1]),
        (64, 2, cost(step_ms=10), [1, 2, 4, 8, 16, 32, 64]),
        (6, 2, cost(step_ms=10), [1, 2, 4, 6]),
        (1000, 64, cost(step_ms=10), [1, 32, 64, 128]),
        (64, 2, cost(step_ms=1000), [8, 16, 32, 64]),
        (64, 2, cost(step_ms=1000, step_cpu_ms=1000), [4]),
    ],
)
def test_more_actors_than_cores_are_tried_where_the_env_waits(
    num_envs: int, cores: int, of_env: Cost, numbers: list[int]
) -> None:
    assert numbers_to_try(num_envs, cores, of_env) == numbers


def test_fewer_actors_are_taken_where_more_gain_next_to_nothing() -> None:
    assert best_of([trial(1, 96.0), trial(2, 100.0), trial(4, 90.0)]) == 1
    assert best_of([trial(1, 90.0), trial(2, 97.0), trial(4, 100.0)]) == 2
    assert best_of([]) is None


@pytest.mark.slow
def test_an_env_that_waits_is_tried_with_an_actor_of_its_own() -> None:
    reports: list[Progress] = []
    result = run_tuning(
        TuneConfig(env=f"{__name__}:WaitingEnv", num_envs=4, seconds=0.3), reports.append
    )
    assert result.cost is not None
    assert result.cost.waits > 0.5
    assert result.cost.observation_bytes == 8
    assert [one.num_actors for one in result.trials][-1] == 4
    assert all(one.memory_mb > 1 for one in result.trials)
    best = result.num_actors
    assert best == best_of(result.trials)
    assert result.line == f'make_vec("{__name__}:WaitingEnv", 4, num_actors={best})'
    assert [report.backend for report in reports][-1] == "4 actors"


def test_ctrl_c_keeps_what_was_found() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.backend != "1 actor":
            raise KeyboardInterrupt

    result = run_tuning(TuneConfig(env="CartPole-v1", num_envs=2, seconds=0.3), interrupt)
    assert result.interrupted
    assert [one.num_actors for one in result.trials] == [1]
    assert result.num_actors == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "number of envs must be at least 1"),
        ({"seconds": 0.0}, "seconds must be over 0"),
        ({"seconds": math.nan}, "seconds must be a number"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneConfig(env="CartPole-v1", **options)


def test_measuring_an_env_has_its_seconds_and_what_its_last_episode_takes_besides() -> None:
    usual, given = Timeouts(), timeouts_of_cost(seconds=70.0)
    assert usual.reset is not None
    assert given.call is not None
    assert given.call > 70.0 + usual.reset
    assert given.reset == usual.reset
