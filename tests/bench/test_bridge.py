from __future__ import annotations

import sys

import pytest

from envbus.bench import bridge, bridge_servers
from envbus.bench.bridge import measure_bridge
from envbus.bench.cases import Schedule
from envbus.bench.environments import Environments
from envbus.bench.report import render_summary
from envbus.bench.targets import check


@pytest.mark.slow
def test_each_way_that_needs_no_other_library_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bridge_servers.BridgeCase("4 floats, MLP", (4,), "float32", ("latency", "rate"), True)
    monkeypatch.setattr(bridge, "CASES", (case,))
    ways = {name: way for name, way in bridge.WAYS.items() if name not in ("http", "grpc")}
    monkeypatch.setattr(bridge, "WAYS", ways)
    monkeypatch.setattr(bridge, "NUM_EPISODES", 20)
    monkeypatch.setattr(bridge, "NUM_CLIENTS", 4)
    schedule = Schedule(rounds=1, seconds=0.05, warm_up=0.02, starts=1)
    record = measure_bridge(schedule, Environments(shared_python=sys.executable), lambda _: None)
    assert [row["way"] for row in record["rows"]] == list(ways)
    for row in record["rows"]:
        assert row["p50_us"]["median"] <= row["p99_us"]["median"]
    assert "per_second" in record["rows"][1]
    assert "| 4 floats, MLP | envbus, WebSocket |" in render_summary({"bridge": record})
    assert any(verdict.measured is not None for verdict in check(record))
