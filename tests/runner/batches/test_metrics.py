from __future__ import annotations

from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import (
    MOST_MEDIA,
    PERF_TIMERS,
    EpisodeResult,
    PerfTimers,
    RecentResults,
    SampleMetrics,
)


def result(**changes: Any) -> EpisodeResult:
    return EpisodeResult(
        **{
            "eps_id": 1,
            "env_id": 0,
            "incarnation": 0,
            "episode_return": 3.0,
            "length": 10,
            "agent_returns": {"a": 1.0, "b": 2.0},
            "agent_steps": {"a": 10, "b": 5},
            "agent_policies": {"a": "p0", "b": "p0"},
            "terminated": True,
            "truncated": False,
            "faulty": False,
            "fragments": 0,
            "unrecorded_reward": 0.0,
            "custom_metrics": {},
            **changes,
        }
    )


def test_before_the_first_sample_there_are_zeros_and_empty_dicts() -> None:
    read = SampleMetrics().read()
    assert {name: value for name, value in read.items() if value not in (0, {}, [])} == {}
    assert read["num_env_steps_sampled_lifetime"] == 0
    assert read["agent_episode_returns_mean"] == {}
    assert "episode_return_mean" not in read


def test_returns_and_lengths_have_mean_min_and_max_also_per_agent_and_policy() -> None:
    metrics = SampleMetrics()
    metrics.add_episode(result(custom_metrics={"coins": 1.0}))
    metrics.add_episode(
        result(
            episode_return=7.0,
            length=20,
            agent_returns={"a": 7.0},
            agent_steps={"a": 20},
            agent_policies={"a": "p1"},
            custom_metrics={"coins": 3.0},
        )
    )
    read = metrics.read()
    assert [read[f"episode_return_{name}"] for name in ("mean", "min", "max")] == [5.0, 3.0, 7.0]
    assert [read[f"episode_len_{name}"] for name in ("mean", "min", "max")] == [15.0, 10.0, 20.0]
    assert read["agent_episode_returns_mean"] == {"a": 4.0, "b": 2.0}
    assert read["module_episode_returns_mean"] == {"p0": 1.5, "p1": 7.0}
    assert read["module_episode_returns_max"] == {"p0": 2.0, "p1": 7.0}
    assert read["custom_metrics"] == {"coins_mean": 2.0, "coins_min": 1.0, "coins_max": 3.0}
    assert read["num_episodes"] == 2


def test_reading_clears_all_but_the_lifetime() -> None:
    metrics = SampleMetrics()
    metrics.add_steps(env_steps=16, agent_steps=32)
    metrics.add_episode(result())
    metrics.add_restart()
    metrics.read()
    metrics.add_steps(env_steps=4, agent_steps=8)
    read = metrics.read()
    assert (read["num_env_steps_sampled"], read["num_env_steps_sampled_lifetime"]) == (4, 20)
    assert (read["num_agent_steps_sampled"], read["num_agent_steps_sampled_lifetime"]) == (8, 40)
    assert (read["num_episodes"], read["num_episodes_lifetime"]) == (0, 1)
    assert (read["num_env_restarts"], read["num_env_restarts_lifetime"]) == (0, 1)
    assert "episode_return_mean" not in read


def test_of_episodes_that_nobody_reads_the_latest_are_kept_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envbus.runner.batches.metrics.MOST_RESULTS", 3)
    metrics, other = SampleMetrics(), SampleMetrics()
    for number in range(10):
        metrics.add_episode(result(eps_id=number, length=number, faulty=number > 8, fragments=1))
    other.add_delta(metrics.collect_delta())
    read = other.read()
    assert (read["episode_len_min"], read["episode_len_max"]) == (7.0, 8.0)
    assert (read["num_episodes"], read["num_faulty_episodes"]) == (9, 1)
    assert read["faulty_eps_ids"] == [9]
    assert metrics.collect_delta().results == []


def test_rows_are_counted_by_policy_and_go_over_to_another() -> None:
    metrics, other = SampleMetrics(), SampleMetrics()
    assert metrics.read()["num_module_steps_sampled"] == {}
    metrics.add_steps(env_steps=2, agent_steps=5, module_steps={"p0": 2, "a/b": 3})
    other.add_delta(metrics.collect_delta())
    other.add_steps(env_steps=1, agent_steps=1, module_steps={"p0": 1})
    read = other.read()
    assert read["num_module_steps_sampled"] == {"p0": 3, "a/b": 3}
    assert other.read()["num_module_steps_sampled"] == {}
    again = SampleMetrics()
    again.set_state(other.get_state())
    assert again.read()["num_module_steps_sampled_lifetime"] == {"p0": 3, "a/b": 3}


def test_the_lifetime_goes_over_to_another() -> None:
    metrics = SampleMetrics()
    metrics.add_steps(env_steps=16, agent_steps=32)
    other = SampleMetrics()
    other.set_state({**metrics.get_state(), "unknown": 1})
    assert other.read()["num_env_steps_sampled_lifetime"] == 16


def test_faulty_episodes_are_counted_left_out_and_named_if_rows_had_left() -> None:
    metrics = SampleMetrics()
    metrics.add_episode(result(eps_id=8, faulty=True, fragments=0))
    metrics.add_episode(result(eps_id=9, faulty=True, fragments=2))
    metrics.add_dropped_rows(12)
    read = metrics.read()
    assert (read["num_faulty_episodes"], read["num_episodes"]) == (2, 0)
    assert read["faulty_eps_ids"] == [9]
    assert read["num_dropped_rows"] == 12
    assert "episode_return_mean" not in read
    assert metrics.read()["faulty_eps_ids"] == []


def test_an_episode_in_which_nobody_acted_is_counted_apart() -> None:
    metrics = SampleMetrics()
    metrics.add_episode(result(agent_steps={}, agent_returns={}))
    read = metrics.read()
    assert (read["num_episodes_without_actions"], read["num_episodes"]) == (1, 0)
    assert "episode_len_mean" not in read


def test_timers_can_be_read_before_the_first_iteration() -> None:
    names = [
        "mean_raw_obs_processing_ms",
        "mean_inference_ms",
        "mean_action_processing_ms",
        "mean_env_wait_ms",
        "mean_env_render_ms",
    ]
    assert PerfTimers().read() == dict.fromkeys(names, 0.0)
    assert PerfTimers(ema_coef=0.1).read() == dict.fromkeys(names, 0.0)


def test_the_mean_is_per_iteration_and_in_milliseconds() -> None:
    timers = PerfTimers()
    for seconds in (0.001, 0.003):
        timers.add("inference", seconds)
        timers.add("inference", seconds)  # two policies
        timers.end_iteration()
    timers.add("inference", 5.0)  # of an iteration that is not over
    assert timers.read()["mean_inference_ms"] == pytest.approx(4.0)
    assert timers.read()["mean_env_wait_ms"] == 0.0


def test_the_moving_average_follows_its_formula_from_the_first_value_on() -> None:
    timers = PerfTimers(ema_coef=0.25)
    for seconds in (0.008, 0.004):
        timers.add("env_wait", seconds)
        timers.end_iteration()
    assert timers.read()["mean_env_wait_ms"] == pytest.approx(0.75 * 8 + 0.25 * 4)


@pytest.mark.parametrize("coef", [0.0, -1.0, 1.5])
def test_a_coefficient_out_of_range_is_refused(coef: float) -> None:
    with pytest.raises(ConfigError, match="ema_coef must be over 0 and at most 1 or None"):
        PerfTimers(coef)


def test_an_unknown_timer_is_a_bug() -> None:
    assert "inference" in PERF_TIMERS
    with pytest.raises(KeyError):
        PerfTimers().add("coffee", 1.0)


def test_what_others_have_counted_is_added_once() -> None:
    here, there = SampleMetrics(), SampleMetrics()
    for metrics in (here, there):
        metrics.add_steps(env_steps=10, agent_steps=15)
        metrics.add_episode(result(eps_id=id(metrics)))
    there.add_restart()
    here.add_delta(there.collect_delta())
    here.add_delta(there.collect_delta())
    read = here.read()
    assert (read["num_env_steps_sampled"], read["num_episodes"]) == (20, 2)
    assert read["num_env_restarts_lifetime"] == 1
    assert there.read()["num_episodes"] == 0
    assert there.read()["num_env_steps_sampled_lifetime"] == 10


def test_lists_of_numbers_are_joined_and_media_are_listed() -> None:
    metrics = SampleMetrics()
    metrics.add_episode(result(hist_data={"speed": [1.0, 2.0]}, media={"video": "a.mp4"}))
    metrics.add_episode(result(hist_data={"speed": [3.0], "hits": [0.0]}))
    metrics.add_episode(result(media={"video": "b.mp4"}))
    metrics.add_episode(result(faulty=True, hist_data={"speed": [9.0]}, media={"video": "c.mp4"}))
    read = metrics.read()
    assert read["hist_data"] == {"speed": [1.0, 2.0, 3.0], "hits": [0.0]}
    assert read["episode_media"] == {"video": ["a.mp4", "b.mp4"]}
    read = metrics.read()
    assert (read["hist_data"], read["episode_media"]) == ({}, {})


def test_of_many_episodes_the_latest_keep_their_media() -> None:
    recent = RecentResults()
    for number in range(MOST_MEDIA + 20):
        recent.append(result(eps_id=2 * number, media={"number": number}))
        recent.append(result(eps_id=2 * number + 1))
    taken = recent.take()
    assert [one.eps_id for one in taken] == [*range(2 * MOST_MEDIA + 40)]
    kept = [one.media["number"] for one in taken if one.media]
    assert kept == [*range(20, MOST_MEDIA + 20)]
    assert recent.take() == []
    recent.append(result(media={"number": 1}))
    assert len(recent.take()[0].media) == 1


def test_media_leave_with_their_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbus.runner.batches.metrics.MOST_RESULTS", 5)
    monkeypatch.setattr("envbus.runner.batches.metrics.MOST_MEDIA", 2)
    recent = RecentResults()
    for number in range(4):
        recent.append(result(media={"number": number}))
        for _ in range(5):
            recent.append(result())
    for number in range(3):
        recent.append(result(media={"number": number}))
    assert [one.media for one in recent.take()] == [{}, {}, {}, {"number": 1}, {"number": 2}]


def test_another_adds_lists_and_media_too() -> None:
    one, other = SampleMetrics(), SampleMetrics()
    one.add_episode(result(hist_data={"speed": [1.0]}, media={"video": "a.mp4"}))
    other.add_delta(one.collect_delta())
    read = other.read()
    assert (read["hist_data"], read["episode_media"]) == (
        {"speed": [1.0]},
        {"video": ["a.mp4"]},
    )


def test_env_steps_are_counted_over_the_whole_life() -> None:
    metrics = SampleMetrics()
    metrics.add_steps(env_steps=3, agent_steps=6)
    metrics.read()
    metrics.add_steps(env_steps=4, agent_steps=6)
    assert metrics.env_steps == 7
