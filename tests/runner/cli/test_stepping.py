from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.runner.cli.stepping import EpisodeCounts, Limits, Progress, Stepping
from envbus.runner.policies.policy import FunctionPolicy, parse_policy


def cart_poles(count: int) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * count)


def run(count: int, limits: Limits, **options: Any) -> tuple[Stepping, list[Progress]]:
    reports: list[Progress] = []
    stepping = Stepping("sync", parse_policy("random"), reports.append, **options)
    envs = cart_poles(count)
    stepping.run(envs, limits, seed=1)
    envs.close()
    return stepping, reports


def test_it_stops_at_the_first_vector_step_that_reaches_the_steps() -> None:
    stepping, _ = run(4, Limits(steps=101))
    measured = stepping.measured()
    assert 101 <= measured.env_steps < 101 + 4
    assert measured.vector_steps >= 26


def test_it_stops_after_the_seconds() -> None:
    stepping, _ = run(1, Limits(seconds=0.05))
    assert 0.05 <= stepping.measured().seconds < 5.0


def test_the_same_seed_gives_the_same_episodes() -> None:
    first = run(4, Limits(steps=500))[0].measured()
    second = run(4, Limits(steps=500))[0].measured()
    assert (first.episodes, first.mean_return) == (second.episodes, second.mean_return)
    assert first.episodes > 5


def test_rates_and_latencies_follow_from_what_was_counted() -> None:
    measured = run(2, Limits(steps=50))[0].measured()
    assert measured.env_steps_per_second == pytest.approx(measured.env_steps / measured.seconds)
    assert measured.latency_p50_ms is not None
    assert measured.latency_p99_ms is not None
    assert 0 < measured.latency_p50_ms <= measured.latency_p99_ms
    assert measured.latency_p50_ms < measured.seconds * 1e3
    assert measured.mean_return == measured.mean_length
    assert measured.restarts is None


def test_half_time_comes_once_and_is_reported() -> None:
    calls: list[int] = []

    def kill() -> int:
        calls.append(1)
        return 77

    _, reports = run(2, Limits(steps=60), at_half_time=kill, restarts=lambda: len(calls))
    assert calls == [1]
    (killed,) = [report for report in reports if report.killed is not None]
    assert (killed.killed, killed.restarts) == (77, 1)
    assert 0.5 <= killed.fraction < 0.6


def test_before_the_first_step_nothing_was_counted() -> None:
    measured = Stepping("sync", parse_policy("zero"), lambda _: None).measured()
    assert (measured.env_steps, measured.env_steps_per_second) == (0, 0.0)
    assert measured.latency_p50_ms is None


def test_what_was_counted_can_be_read_after_an_exception() -> None:
    left = [1, 2]

    def act(observations: Any) -> Any:
        left.pop()
        return np.zeros(len(observations), np.int64)

    stepping = Stepping("sync", lambda *_: FunctionPolicy(act), lambda _: None)
    envs = cart_poles(2)
    with pytest.raises(IndexError):
        stepping.run(envs, Limits(steps=1000), seed=0)
    envs.close()
    assert stepping.measured().vector_steps == 2


def flags(*values: int) -> Any:
    return np.array(values, np.bool_)


def told(counts: EpisodeCounts) -> tuple[int, float, int, int]:
    return counts.episodes, counts.returns, counts.length, counts.lost


def test_an_actor_that_dies_during_a_reset_loses_no_episode_twice() -> None:
    counts = EpisodeCounts(2, AutoresetMode.NEXT_STEP)
    counts.update(np.ones(2), flags(1, 0), flags(0, 0))
    counts.update(np.zeros(2), flags(0, 0), flags(1, 1), lost=flags(1, 1))
    assert told(counts) == (1, 1.0, 1, 1)
    counts.update(np.full(2, 9.0), flags(0, 0), flags(0, 0))  # resets both
    counts.update(np.array([1.0, 2.0]), flags(1, 1), flags(0, 0))
    assert told(counts) == (3, 4.0, 3, 1)


def test_a_lost_episode_counts_as_lost_only() -> None:
    counts = EpisodeCounts(2, AutoresetMode.SAME_STEP)
    counts.update(np.full(2, 5.0), flags(0, 0), flags(0, 0))
    counts.update(np.array([0.0, 1.0]), flags(0, 1), flags(1, 0), lost=flags(1, 0))
    assert told(counts) == (1, 6.0, 2, 1)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_counts_of_episodes_are_those_that_gymnasium_records(mode: AutoresetMode) -> None:
    def factory() -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    envs = SyncVectorEnv([factory] * 4, autoreset_mode=mode)
    envs.action_space.seed(3)
    envs.reset(seed=3)
    counts = EpisodeCounts(4, mode)
    episodes, returns, length = 0, 0.0, 0
    for _ in range(200):
        _, reward, terminated, truncated, infos = envs.step(envs.action_space.sample())
        counts.update(reward, terminated, truncated)
        ended = infos.get("final_info", infos) if mode is AutoresetMode.SAME_STEP else infos
        if "episode" in ended:
            rows = ended["_episode"]
            episodes += int(np.count_nonzero(rows))
            returns += float(ended["episode"]["r"][rows].sum())
            length += int(ended["episode"]["l"][rows].sum())
        assert told(counts) == (episodes, returns, length, 0)
    envs.close()
    assert episodes > 10
