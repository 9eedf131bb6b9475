from __future__ import annotations

import math
from typing import Any

import psutil
import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.cli.job import JobConfig, run_job
from envbus.runner.cli.stepping import Progress


def test_a_job_steps_the_envs_in_actors_and_tells_what_happened() -> None:
    result = run_job(JobConfig(env="CartPole-v1", num_envs=4, num_actors=2, steps=2000, seed=0))
    (measured,) = result.measured
    assert (result.num_envs, result.actors, result.interrupted) == (4, 2, False)
    assert (measured.backend, measured.restarts, measured.lost_episodes) == ("envbus", 0, 0)
    assert 2000 <= measured.env_steps < 2004
    assert measured.episodes > 50
    assert measured.mean_return is not None
    assert 10 < measured.mean_return < 50


def test_the_same_seed_gives_the_same_episodes_with_any_number_of_actors() -> None:
    outcomes = []
    for actors in (1, 3):
        config = JobConfig(env="CartPole-v1", num_envs=3, num_actors=actors, steps=900, seed=5)
        (measured,) = run_job(config).measured
        outcomes.append((measured.env_steps, measured.episodes, measured.mean_return))
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
def test_an_actor_killed_half_way_comes_back() -> None:
    reports: list[Progress] = []
    config = JobConfig(env="Pendulum-v1", num_envs=4, num_actors=2, seconds=3, kill_one=True)
    result = run_job(config, reports.append)
    (measured,) = result.measured
    assert result.killed in [report.killed for report in reports]
    assert result.killed is not None
    assert not psutil.pid_exists(result.killed)
    assert measured.restarts == 1
    assert measured.lost_episodes in (1, 2)  # one of the two may be between two episodes


@pytest.mark.slow
def test_a_comparison_puts_the_vector_envs_of_gymnasium_beside() -> None:
    reports: list[Progress] = []
    config = JobConfig(env="CartPole-v1", num_envs=4, seconds=0.5, seed=3, compare=True)
    result = run_job(config, reports.append)
    assert [m.backend for m in result.measured] == ["envbus", "AsyncVectorEnv", "SyncVectorEnv"]
    assert result.not_measured == {}
    assert {report.backend for report in reports} == {m.backend for m in result.measured}
    for measured in result.measured:
        assert measured.env_steps > 0
        assert measured.seconds >= 0.5


@pytest.mark.slow
def test_what_gymnasium_cannot_step_is_told_and_no_failure() -> None:
    target = f"{__name__}:two_cart_poles"
    result = run_job(JobConfig(env=target, num_envs=1, steps=20, compare=True))
    assert [measured.backend for measured in result.measured] == ["envbus"]
    assert set(result.not_measured) == {"AsyncVectorEnv", "SyncVectorEnv"}


def test_an_unknown_env_is_a_mistake_in_the_call_and_leaves_no_actor() -> None:
    with pytest.raises(ConfigError, match=r"cannot make 'Nope-v0'.*Nope.* doesn't exist"):
        run_job(JobConfig(env="Nope-v0", steps=1))


def test_ctrl_c_keeps_what_was_counted() -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    result = run_job(JobConfig(env="CartPole-v1", num_envs=2, seconds=30), interrupt)
    assert result.interrupted
    assert result.measured[0].env_steps > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs an end"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"seconds": 0.0}, "seconds must be over 0"),
        ({"seconds": math.inf}, "seconds must be over 0 and finite"),
        ({"seconds": math.nan}, "seconds must be a number"),
        ({"steps": 1, "num_envs": 0}, "number of envs must be at least 1"),
        ({"steps": 1, "num_envs": 2, "num_actors": 3}, "number of actors must be from 1"),
        ({"steps": 1, "num_actors": 0}, "number of actors must be from 1"),
        ({"steps": 1, "seed": -1}, "seed must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(env="CartPole-v1", **options)


def two_cart_poles() -> Any:
    import gymnasium
    from gymnasium.vector import SyncVectorEnv

    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
