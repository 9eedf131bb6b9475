"""End to end, with this interpreter in the place of isolated environments."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Schedule
from envbus.bench.report.tables import render_details, render_summary
from envbus.bench.report.targets import check
from envbus.bench.requests.cases import CASES, WAYS, RequestCase, Way
from envbus.bench.requests.comparison import measure_requests

SCHEDULE = Schedule(rounds=1, seconds=0.05, warm_up=0.02, starts=1)


@pytest.fixture
def here() -> Environments:
    return Environments(shared_python=sys.executable)


def quiet(_: str) -> None:
    """Say nothing."""


def test_a_case_travels_on_a_command_line() -> None:
    for case in (case for cases in CASES.values() for case in cases):
        assert RequestCase.of(case.to_json()) == case


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES["bus"][1::-1], ids=["large", "small"])
def test_each_carrier_of_the_bus_carries_small_and_large_answers(
    case: RequestCase, here: Environments
) -> None:
    record = measure_requests("bus", SCHEDULE, here, quiet, cases=[case])
    measured = [(row["case"], row["way"]) for row in record["rows"]]
    assert measured == [(case.name, way.name) for way in WAYS["bus"]]
    for row in record["rows"]:
        assert row["p50_us"]["median"] > 0
        assert row["per_second"]["median"] > 0
    assert "pyzmq" in record["versions"]["bus"]


@pytest.mark.slow
def test_each_way_to_a_policy_gets_actions(here: Environments) -> None:
    cases = (CASES["policy"][0], CASES["policy"][2])
    record = measure_requests("policy", SCHEDULE, here, quiet, cases=cases)
    measured = [(row["case"], row["way"]) for row in record["rows"]]
    assert measured == [(case.name, way.name) for case in cases for way in WAYS["policy"]]
    assert all(row["p50_us"]["median"] > 0 for row in record["rows"])


@pytest.mark.slow
def test_each_way_to_the_bridge_that_needs_no_other_library_is_measured(here: Environments) -> None:
    (case,) = [case for case in CASES["bridge"] if case.network]
    case = replace(case, measured=("latency", "rate"), num_episodes=20, num_clients=4)
    ways = [way for way in WAYS["bridge"] if way.library == "serving"]
    before = dict(os.environ)
    record = measure_requests("bridge", SCHEDULE, here, quiet, cases=[case], ways=ways)
    assert os.environ == before  # one thread is for the processes that are measured
    assert [row["way"] for row in record["rows"]] == [way.name for way in ways]
    for way, row in zip(ways, record["rows"], strict=True):
        assert row["p50_us"]["median"] <= row["p99_us"]["median"]
        assert ("per_second" in row) == way.rated
    assert "| 4 floats, MLP | envbus, WebSocket |" in render_summary({"bridge": record})
    assert any(verdict.measured is not None for verdict in check(record))


@pytest.mark.slow
def test_a_server_or_a_client_that_fails_is_a_row_with_its_reason(here: Environments) -> None:
    ways = [
        Way("pyzmq", "serving", "pyzmq"),
        Way("no such client", "serving", "pyzmq"),
        Way("envbus", "serving", "no such server"),
    ]
    cases = CASES["bridge"][:1]
    record = measure_requests("bridge", SCHEDULE, here, quiet, cases=cases, ways=ways)
    outcomes = [(row["way"], row.get("reason")) for row in record["rows"]]
    assert outcomes == [
        ("pyzmq", None),
        ("no such client", "KeyError: 'no such client'"),
        ("envbus", "KeyError: 'no such server'"),
    ]
    text = render_details({"bridge": record})
    assert "- envbus, 4 floats: KeyError: 'no such server'" in text
    assert "| 4 floats | envbus | - | - | - |" in text


def test_a_library_that_is_not_installed_costs_no_more_than_its_rows(tmp_path: Path) -> None:
    kept: list[int] = []
    record = measure_requests(
        "bridge",
        SCHEDULE,
        Environments(tmp_path),
        quiet,
        lambda record: kept.append(len(record["rows"])),
    )
    assert {row["status"] for row in record["rows"]} == {"failed"}
    assert "not installed: run `envbus bench install grpc`" in [
        row["reason"] for row in record["rows"]
    ]
    assert kept == [8, 16, 22]  # after each case
