"""Training with several vector envs in turn."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from envbus.bench.harness.environments import LIBRARIES, Environments
from envbus.bench.harness.record import QUICK
from envbus.bench.report.tables import render_summary
from envbus.bench.report.targets import check
from envbus.bench.training.cases import CASES, TrainingCase
from envbus.bench.training.measure import measure_training

HERE = Environments(shared_python=sys.executable)


def test_each_case_has_an_environment_and_a_name() -> None:
    for name, case in CASES.items():
        assert case.environment in LIBRARIES
        assert case.name == name


def test_a_way_that_fails_is_in_the_table_with_the_reason() -> None:
    case = TrainingCase("nobody", "Nobody's PPO", "CartPole-v1", 2, 100, ways=("envbus",))
    said: list[str] = []
    record = measure_training([case], 3, QUICK, HERE, said.append)
    (row,) = record["rows"]
    assert "No module named" in row["failure"]
    assert len(said) == 1  # it is not tried again
    assert "failed: " in render_summary({"training": record})


def test_the_table_has_seconds_and_returns_of_all_ways() -> None:
    case = CASES["cleanrl:CartPole-v1:16"]
    record = measure_training([], 1, QUICK, HERE, str)
    spread = {"min": 1.0, "q1": 1.0, "median": 2.0, "q3": 3.0, "max": 3.0, "n": 3}
    for way in case.ways:
        record["rows"].append(
            {
                "label": case.label,
                "env": case.env,
                "num_envs": case.num_envs,
                "steps": case.steps,
                "way": way,
                "seconds": spread,
                "returns": [100.0, 200.0, 300.0],
            }
        )
    table = render_summary({"training": record})
    assert table.count("2.0 (1.0 to 3.0); 200 (100 to 300)") == 2
    assert "| - |" in table  # CleanRL has no vector env in one process
    speed, returns = check(record)
    assert (speed.measured, speed.met) == (1.0, True)
    assert (returns.measured, returns.met) == (100.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("way", CASES["sb3:CartPole-v1:64"].ways)
def test_stable_baselines3_trains_in_each_way(way: str) -> None:
    pytest.importorskip("stable_baselines3")
    short = replace(CASES["sb3:CartPole-v1:64"], num_envs=4, steps=4096, ways=(way,))
    record = measure_training([short], 1, QUICK, HERE, str)
    (row,) = record["rows"]
    assert row["returns"][0] > 5.0, row
