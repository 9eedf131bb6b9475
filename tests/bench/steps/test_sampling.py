from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bench.adapters.networks import NumpyNet, num_inputs, view
from envbus.bench.adapters.sampling.collecting import parts_within
from envbus.bench.adapters.workloads import TeamEnv
from envbus.bench.harness.environments import LIBRARIES, Environments
from envbus.bench.harness.record import Schedule
from envbus.bench.report.tables import conditions, render_details, render_summary
from envbus.bench.report.targets import check
from envbus.bench.steps.cases import parse_case
from envbus.bench.steps.sample_variants import PIPELINING, SAMPLE_CASES, SAMPLE_VARIANTS
from envbus.bench.steps.vector import measure_cases
from tests.bench.results import record, vector_row


def sample_row(workload: str, num_envs: int, variant: str, rate: float) -> dict[str, Any]:
    return vector_row(workload, num_envs, variant, rate, SAMPLE_VARIANTS)


ROWS = [
    sample_row("cartpole", 64, "envbus_numpy", 120.0),
    sample_row("cartpole", 64, "envbus_torch", 90.0),
    sample_row("cartpole", 64, "sb3_rollouts_dummy", 60.0),
    sample_row("cartpole", 64, "rllib_sync", 20.0),
    sample_row("jitter", 16, "envbus_numpy", 70.0),
    sample_row("jitter", 16, "envbus_run_ahead", 85.0),
    sample_row("jitter", 16, "envbus_run_ahead_torch", 91.0),
    sample_row("jitter", 16, "rllib_async", 10.0),
    sample_row("jitter", 16, "envbus_enough", 95.0),
    sample_row("jitter", 16, "envbus_group_async", 92.0),
    sample_row("jitter", 16, "independent", 100.0),
    sample_row("team", 16, "envbus_numpy", 40.0),
    sample_row("team", 16, "rllib_sync", 10.0),
    sample_row("burn", 16, "lockstep_1", 10.0),
    sample_row("burn", 16, "pipelined_1", 18.0),
]


def test_the_targets_of_sampling_are_checked_within_one_result() -> None:
    verdicts = {v.target: (v.measured, v.met) for v in check(record("sample", ROWS))}
    assert verdicts == {
        "sample, cartpole:64: envbus_numpy, times RLlib's runner": (6.0, True),
        "sample, cartpole:64: envbus_torch, times RLlib's runner": (4.5, False),
        "sample, cartpole:64: envbus_torch, times the fastest other library (sb3_rollouts_dummy)": (
            1.5,
            True,
        ),
        "sample, jitter:16: envbus_numpy, times RLlib's runner": (7.0, True),
        "sample, jitter:16: envbus_run_ahead, times RLlib's runner": (8.5, True),
        "sample, jitter:16: envbus_run_ahead_torch, times RLlib's runner": (9.1, True),
        "sample, jitter:16: envbus_numpy, part of what independent envs reach": (0.7, False),
        "sample, jitter:16: envbus_run_ahead, part of what independent envs reach": (0.85, False),
        "sample, jitter:16: envbus_run_ahead_torch, part of what independent envs reach": (
            0.91,
            True,
        ),
        "sample, jitter:16: envbus_enough, part of what independent envs reach": (0.95, True),
        "sample, jitter:16: envbus_group_of_all, part of what independent envs reach": (None, None),
        "sample, jitter:16: envbus_group_async, part of what independent envs reach": (0.92, True),
        "sample, jitter:16: envbus_group_async, times RLlib's runner": (9.2, True),
        "sample, jitter:16: envbus_group_async_torch, part of what independent envs reach": (
            None,
            None,
        ),
        "sample, team:16: envbus_numpy, times RLlib's runner": (4.0, True),
        "sample, burn:16: pipelined_1, times lockstep_1": (1.8, True),
    }


def test_the_table_of_sampling_shows_rows_that_envbus_loses() -> None:
    rows = [*ROWS, sample_row("pixels", 32, "sb3_rollouts_dummy", 50.0)]
    rows.append(sample_row("pixels", 32, "envbus_torch", 40.0))
    text = render_summary({"sample": record("sample", rows)})
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2].startswith("|  | **envbus EnvRunner, torch policy** | 90")
    (first,) = [line for line in lines if line.startswith("| pixels")]
    assert "SB3 collect_rollouts, DummyVecEnv | 50, 1.5 | 50 to 50 | 0.8x |" in first
    details = render_details({"sample": record("sample", rows)})
    assert "one fragment, us: p50 / p99" in details


def test_each_variant_has_a_library_and_a_case() -> None:
    workloads = {case.workload for case in SAMPLE_CASES}
    for variant in SAMPLE_VARIANTS.values():
        assert variant.library in LIBRARIES
        assert set(variant.workloads) <= workloads
    assert set(PIPELINING) | set(PIPELINING.values()) <= SAMPLE_VARIANTS.keys()
    assert parse_case("team:16") in SAMPLE_CASES


def test_rounds_of_envs_that_wait_are_longer_and_the_tables_say_so() -> None:
    schedule = Schedule(rounds=5, seconds=1.0, warm_up=0.5, starts=0, times_as_long={"jitter": 3.0})
    assert (schedule.of("jitter").seconds, schedule.of("jitter").warm_up) == (3.0, 1.5)
    assert schedule.of("burn") == schedule
    measured = record("sample", ROWS)
    assert "rounds of 1 s each; every" in conditions(measured)
    measured["schedule"] = asdict(schedule)
    assert "rounds of 1 s each, of jitter 3 s; every" in conditions(measured)


def test_the_network_sees_every_fourth_pixel() -> None:
    pixels = np.arange(2 * 4 * 84 * 84, dtype=np.uint32).reshape(2, 4, 84, 84)
    seen = view(pixels)
    assert seen.shape == (2, num_inputs(spaces.Box(0, 255, (4, 84, 84), np.uint8)))
    assert seen[1, 22] == pixels[1, 0, 4, 4]
    assert num_inputs(spaces.Box(-1, 1, (4,))) == 4
    actions, logp = NumpyNet(4, 3).act(np.zeros((500, 4), np.float32))
    assert set(actions.tolist()) == {0, 1, 2}
    assert logp == pytest.approx(np.log(1 / 3))


def test_the_team_ends_together() -> None:
    env = TeamEnv()
    env.reset()
    for step in range(1, 101):
        observations, rewards, terminateds, truncateds, _ = env.step({})
        assert (terminateds["__all__"], truncateds["__all__"]) == (False, step == 100)
    assert observations.keys() == rewards.keys() == set(env.possible_agents)


@pytest.mark.slow
def test_collecting_is_measured_by_the_same_harness() -> None:
    before = dict(os.environ)
    schedule = Schedule(rounds=1, seconds=0.01, warm_up=0.0, starts=0)
    names = ["envbus_numpy", "pipelined_1"]
    result = measure_cases(
        "sample",
        [parse_case("cartpole:4"), parse_case("team:2"), parse_case("burn:2")],
        [SAMPLE_VARIANTS[name] for name in names],
        schedule,
        Environments(shared_python=sys.executable).on_one_thread(),
        say=lambda _: None,
    )
    assert result["kind"] == "sample"
    found = {(row["workload"], row["variant"], row["status"]) for row in result["rows"]}
    assert found == {
        ("cartpole", "envbus_numpy", "ok"),
        ("team", "envbus_numpy", "ok"),
        ("burn", "pipelined_1", "ok"),
    }
    assert os.environ == before  # one thread is for the processes that are measured


def test_fragments_count_by_the_part_that_lies_within_the_time() -> None:
    within, before, across, after = (12, 18), (0, 10), (5, 15), (18, 26)
    assert parts_within([within], 10, 20) == 1.0
    assert parts_within([before], 10, 20) == 0.0
    assert parts_within([across], 10, 20) == 0.5
    assert parts_within([within, before, across, after], 10, 20) == 1.75
