from __future__ import annotations

import errno
import io

import msgspec
from rich.console import Console

from envbus.runner.bridge.vocabulary import BridgeStatistics
from envbus.runner.cli.serve_table import ServerTable, rows_of
from envbus.runner.serving.models import ModelCounts
from envbus.runner.serving.server import Snapshot

FIRST = Snapshot(
    seconds=10.0,
    bridge=BridgeStatistics(clients_now=2, episodes_now=3, ended=4, actions=100),
    recorded=0,
    recorded_rows=0,
    batches=10,
    rows=100,
    largest_batch=20,
    errors={},
    latency={500: 100},
)
SECOND = msgspec.structs.replace(
    FIRST,
    seconds=12.0,
    bridge=msgspec.structs.replace(FIRST.bridge, actions=1100, lost_clients_now=1),
    batches=20,
    rows=1100,
    recorded=7,
    recorded_rows=70,
    errors={"policy": 3},
    latency={500: 100, 600: 1000},
)


def cells(now: Snapshot, before: Snapshot | None) -> dict[str, tuple[str, str]]:
    return {name: (recent, total) for name, recent, total in rows_of(now, before)}


def test_what_happened_since_the_last_picture_stands_beside_the_whole() -> None:
    rows = cells(SECOND, FIRST)
    assert rows["clients"][0] == "2 + 1 gone"
    assert rows["actions/s"] == ("500", "92")
    assert rows["rows per call"] == ("100.0", "55.0")
    assert float(rows["latency p50 (ms)"][0]) > 5 * float(cells(FIRST, None)["latency p50 (ms)"][1])
    assert rows["recorded"][1] == "7 episodes, 70 rows"
    assert rows["errors: policy"] == ("3", "3")


def test_each_model_has_its_version_and_its_answers() -> None:
    model = ModelCounts(version=3, answers=1200, loads=4, failed_loads=0)
    now = msgspec.structs.replace(FIRST, models={"a.onnx": model})
    assert cells(now, None)["model a.onnx"] == ("version 3", "1,200 answers")


def test_nothing_yet_is_told_as_such() -> None:
    nothing = msgspec.structs.replace(
        FIRST, bridge=BridgeStatistics(), batches=0, latency={}, seconds=0.0
    )
    rows = cells(nothing, None)
    assert rows["latency p99 (ms)"] == ("-", "-")
    assert rows["actions/s"] == ("-", "-")


def test_off_a_terminal_there_are_plain_lines_now_and_then() -> None:
    out = io.StringIO()
    with ServerTable(Console(file=out, width=300)) as table:
        assert table.is_due(0.0)
        table.show(FIRST)
        assert not table.is_due(12.0)
        table.show(SECOND, "draining")
        table.summarize(SECOND)
    lines = out.getvalue().splitlines()
    assert "2 clients  3 episodes (4 ended)" in lines[0]
    assert "3 errors  (draining)" in lines[1]
    assert any("1,100" in line for line in lines[2:])


class FullDisk(io.StringIO):
    """Takes text when there is room."""

    has_room = False

    def flush(self) -> None:
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_find_no_room_end_nothing_and_lines_come_again_when_there_is_room() -> None:
    out = FullDisk()
    table = ServerTable(Console(file=out, width=300))
    table.show(FIRST)
    assert not table.is_due(FIRST.seconds)
    out.has_room = True
    table.show(SECOND)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["10.0", "12.0"]


def test_on_a_terminal_there_is_a_table_that_is_drawn_anew() -> None:
    out = io.StringIO()
    with ServerTable(Console(file=out, width=100, force_terminal=True)) as table:
        table.show(FIRST)
        table.show(SECOND)
    assert "since the start" in out.getvalue()
