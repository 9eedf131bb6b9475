"""What the page is told of a look."""

from __future__ import annotations

import msgspec
import pytest

from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.dashboard.frames import MOST_POINTS, Frames, details_of, find_process
from envbus.runner.monitoring.figures import fault_figures
from tests.runner.dashboard.looks import crash, observed, part_of


def durations(*seconds: float) -> dict[int, int]:
    """Return the buckets of durations."""
    latency = LatencyHistogram()
    for duration in seconds:
        latency.add(duration)
    return latency.counts()


def test_totals_are_sums_over_all_runs() -> None:
    counts = {"env_steps": 900.0, "faults.crash": 2, "faults.error": 1, "restarts": 2}
    first = observed(part_of(2, counts=counts), rates={("BusVectorEnv-1", "env_steps"): 300.0})
    second = observed(
        part_of(0, "ExternalEnvBridge-1", counts={"actions": 50, "faulty": 4}),
        pid=8,
        rates={("ExternalEnvBridge-1", "actions"): 40.0},
        answers=False,
    )
    second.usage = first.usage = {**first.usage, **second.usage}
    totals = Frames().make([first, second], 100.0).totals
    assert totals == {
        **{"runs": 2, "silent": 1, "steps": 340.0, "ready": 2, "processes": 2},
        **{"faults": 7, "restarts": 2, "cpu": 2.0, "memory": 4 * 2**20},
    }


def test_a_process_is_counted_once_that_is_the_run_itself() -> None:
    part = part_of(1)
    itself = msgspec.structs.replace(part.processes[0], pid=7)
    run = observed(msgspec.structs.replace(part, processes=[itself]))
    assert Frames().make([run], 100.0).totals["cpu"] == 0.5


def test_a_process_that_is_gone_is_shown_before_its_owner_hears_of_it() -> None:
    run = observed(part_of(2))
    del run.usage[1001]
    states = [row[4] for row in Frames().make([run], 100.0).processes]
    assert states == ["ready", "gone"]


def test_the_time_line_has_the_latest_faults_of_all_parts_in_order() -> None:
    runs = [
        observed(part_of(1, faults=[crash(float(at)) for at in range(1, 300, 2)])),
        observed(part_of(1, faults=[crash(float(at)) for at in range(0, 300, 2)]), pid=8),
    ]
    told = Frames().make(runs, 300.0).faults
    assert [fault[0] for fault in told] == [float(at) for at in range(100, 300)]
    assert told[-1] == [299.0, 7, "BusVectorEnv-1", "crash", "actor-0", -1, "exit code 1"]


def test_a_message_of_any_length_is_cut() -> None:
    run = observed(part_of(1, faults=[crash(1.0, "x" * 10_000)]))
    ((*_, message),) = Frames().make([run], 2.0).faults
    assert len(message) == 500


def test_latencies_are_those_since_the_look_before() -> None:
    frames = Frames()
    slow, quick = [1.0] * 100, [0.01] * 50
    assert bridge_point(frames, durations(*slow), 1.0) == [None, None]
    assert bridge_point(frames, durations(*slow, *quick), 2.0) == pytest.approx([0.01] * 2, 0.02)
    assert bridge_point(frames, durations(*slow, *quick), 3.0) == [None, None]


def bridge_point(frames: Frames, counts: dict[int, int], at: float) -> list[float | None]:
    """Return what is plotted of a bridge's `get_action`."""
    part = part_of(0, "ExternalEnvBridge-1", latencies={"get_action": counts})
    return frames.make([observed(part)], at).point[4:]


def test_plots_show_ten_minutes_and_a_gap_where_nobody_has_looked() -> None:
    frames = Frames()
    for at in range(700):
        frames.make([], float(at))
    assert len(frames.points) == MOST_POINTS
    frames.make([], 900.0)
    assert [list(point) for point in list(frames.points)[-2:]] == [
        [700.0, None, None, None, None, None],
        [900.0, 0.0, 0.0, 0.0, None, None],
    ]


def test_plots_go_on_when_the_clock_was_put_back() -> None:
    frames = Frames()
    for at in (100.0, 101.0, 102.0, 101.5, 102.5, 102.5):
        frames.make([], at)
    assert [point[0] for point in frames.points] == [100.0, 101.0, 101.5, 102.5]


def test_details_of_a_process_have_its_faults_only_and_those_of_a_part_its_counts() -> None:
    faults = [crash(1.0), crash(2.0, process="actor-1"), fault_figures(3.0, "error", "actor-1", "")]
    run = observed(
        part_of(2, faults=faults, counts={"restarts": 2}, levels={"envs": 4}),
        rates={("BusVectorEnv-1", "restarts"): 0.5},
    )
    found = find_process([run], 7, "BusVectorEnv-1", "actor-1")
    assert found is not None
    told = details_of(*found)
    assert [fault[0] for fault in told["faults"]] == [2.0, 3.0]
    assert (told["pid"], told["state"], told["first"], told["end"]) == (1001, "ready", 2, 4)
    found = find_process([run], 7, "BusVectorEnv-1", "")
    assert found is not None
    told = details_of(*found)
    assert len(told["faults"]) == 3
    assert told["counts"] == {"restarts": [2, 0.5]}
    assert told["levels"] == {"envs": 4}
    assert find_process([run], 7, "BusVectorEnv-1", "actor-2") is None
    assert find_process([run], 8, "BusVectorEnv-1", "actor-1") is None
