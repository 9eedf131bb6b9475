from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from envbus.runner.policies import FunctionPolicy, parse_policy
from envbus.runner.stepping import Limits, Progress, Stepping


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
