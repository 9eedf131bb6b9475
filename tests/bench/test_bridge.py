from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envbus.bench import bridge, bridge_servers
from envbus.bench.bridge import Way, measure_bridge
from envbus.bench.cases import Schedule
from envbus.bench.environments import Environments
from envbus.bench.report import render_details, render_summary
from envbus.bench.targets import check

SCHEDULE = Schedule(rounds=1, seconds=0.05, warm_up=0.02, starts=1)


@pytest.mark.slow
def test_each_way_that_needs_no_other_library_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bridge_servers.BridgeCase("4 floats, MLP", (4,), "float32", ("latency", "rate"), True)
    monkeypatch.setattr(bridge, "CASES", (case,))
    ways = {name: way for name, way in bridge.WAYS.items() if name not in ("http", "grpc")}
    monkeypatch.setattr(bridge, "WAYS", ways)
    monkeypatch.setattr(bridge, "NUM_EPISODES", 20)
    monkeypatch.setattr(bridge, "NUM_CLIENTS", 4)
    here = Environments(shared_python=sys.executable)
    record = measure_bridge(SCHEDULE, here, lambda _: None)
    assert [row["way"] for row in record["rows"]] == list(ways)
    for row in record["rows"]:
        assert row["p50_us"]["median"] <= row["p99_us"]["median"]
    assert "per_second" in record["rows"][1]
    assert "| 4 floats, MLP | envbus, WebSocket |" in render_summary({"bridge": record})
    assert any(verdict.measured is not None for verdict in check(record))


@pytest.mark.slow
def test_a_server_or_a_client_that_fails_is_a_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {
        "pyzmq": Way("serving", "pyzmq"),
        "no such client": Way("serving", "pyzmq"),
        "envbus": Way("serving", "no such server"),
    }
    monkeypatch.setattr(bridge, "CASES", (bridge_servers.case_named("4 floats"),))
    monkeypatch.setattr(bridge, "WAYS", ways)
    here = Environments(shared_python=sys.executable)
    record = measure_bridge(SCHEDULE, here, lambda _: None)
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
    record = measure_bridge(
        SCHEDULE,
        Environments(tmp_path),
        lambda _: None,
        lambda record: kept.append(len(record["rows"])),
    )
    assert {row["status"] for row in record["rows"]} == {"failed"}
    assert "not installed: run `envbus bench install grpc`" in [
        row["reason"] for row in record["rows"]
    ]
    assert kept == [7, 14, 19]  # after each case
