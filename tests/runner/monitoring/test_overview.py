"""Rows of runs, and what comes first."""

from __future__ import annotations

import msgspec
import pytest

from envbus.runner.monitoring.figures import PartFigures, fault_figures
from envbus.runner.monitoring.observer import ObservedRun
from envbus.runner.monitoring.overview import (
    COLUMNS,
    OverviewRow,
    RowKey,
    as_data,
    hung_processes,
    overview_of,
)
from envbus.runner.monitoring.runs import Usage
from tests.runner.monitoring_scenes import PART, actor, figures, observed


def names(runs: list[ObservedRun], wanted: str = "") -> list[str]:
    """Return the first cells of all rows."""
    return [row.cells()[0] for row in overview_of(runs, wanted=wanted).rows]


def cells(row: OverviewRow) -> dict[str, str]:
    """Return what is not empty, by its title."""
    titles = [title for title, _ in COLUMNS]
    return {title: text for title, text in zip(titles, row.cells(), strict=True) if text}


def test_rows_are_runs_with_their_parts_and_their_processes() -> None:
    run = observed(actor(0), actor(1, incarnation=3), rates={0: 1500.0, 1: 1500.0})
    run.usage = {7: Usage(0.25, 50 * 2**20), 1000: Usage(1.0, 2**31)}
    of_run, of_part, first, second = overview_of([run]).rows
    assert cells(of_run) == {
        "process": "python train.py",
        "env steps/s": "3,000",
        "CPU": "25%",
        "memory": "50 MiB",
        "pid": "7",
    }
    assert cells(of_part) == {
        "process": "  ActorPool-1",
        "state": "2/2 ready",
        "envs": "4",
        "env steps/s": "3,000",
        "restarts": "3",
    }
    assert cells(first) == {
        "process": "    actor-0",
        "state": "ready",
        "envs": "0-1",
        "env steps/s": "1,500",
        "restarts": "0",
        "CPU": "100%",
        "memory": "2,048 MiB",
        "pid": "1000",
    }
    assert cells(second)["restarts"] == "3"
    assert [row.key for row in (of_run, of_part, first)] == [
        RowKey(7),
        RowKey(7, PART),
        RowKey(7, PART, "actor-0"),
    ]


def test_the_hung_come_first_then_who_is_not_ready_then_the_slowest() -> None:
    actors = [actor(0), actor(1), actor(2, state="down", pid=None), actor(3), actor(4), actor(5)]
    run = observed(
        *actors,
        rates={0: 900.0, 1: 1000.0, 3: 10.0, 4: 0.0, 5: 0.0},
        stalled={0: 0.9, 4: 3.0, 5: 60.0},
    )
    assert [name.strip() for name in names([run])[2:]] == [
        "actor-5",
        "actor-4",
        "actor-2",
        "actor-3",
        "actor-0",
        "actor-1",
    ]


def test_who_is_about_as_fast_stays_in_place() -> None:
    run = observed(actor(0), actor(1), rates={0: 1010.0, 1: 1000.0})
    assert [name.strip() for name in names([run])[2:]] == ["actor-0", "actor-1"]


def test_steps_are_compared_by_env() -> None:
    few, many = actor(0, envs=(0, 1)), actor(1, envs=(1, 101))
    run = observed(few, many, rates={0: 100.0, 1: 1000.0})
    assert [name.strip() for name in names([run])[2:]] == ["actor-1", "actor-0"]


def test_a_process_that_hangs_says_where() -> None:
    run = observed(actor(0), actor(1), stalled={0: 12.34, 1: 0.5})
    seen = overview_of([run], {1000: "sims/walker.py:88 in step", 1001: "old"})
    _, part, hung, fine = seen.rows
    assert cells(hung)["state"] == "hung at sims/walker.py:88 in step"
    assert cells(hung)["stalled s"] == "12.3"
    assert (hung.is_hung, hung.is_well) == (True, False)
    assert cells(fine)["state"] == "ready"
    assert fine.is_well
    assert cells(part)["state"] == "2/2 ready, 1 hung"
    assert seen.hung == 1


def test_a_run_with_something_that_hangs_comes_first() -> None:
    fine = observed(actor(0), pid=7)
    hanging = observed(actor(0), pid=8, owner=8, stalled={0: 2.0})
    rows = overview_of([fine, hanging]).rows
    assert [row.pid for row in rows if not row.key.part] == [8, 7]


def test_a_run_stands_below_the_one_that_has_started_it() -> None:
    group = observed(pid=7)
    first = observed(actor(0), pid=8, owner=7)
    second = observed(actor(0), pid=9, owner=7, stalled={0: 5.0})
    rows = overview_of([group, first, second]).rows
    assert [(row.key.run, row.depth) for row in rows if not row.key.part] == [
        (7, 0),
        (9, 1),
        (8, 1),
    ]
    assert rows[-1].depth == 3


def test_runs_whose_starter_is_not_seen_are_shown() -> None:
    rows = overview_of([observed(actor(0), pid=8, owner=7), observed(pid=9, owner=7)]).rows
    assert [row.key.run for row in rows if not row.key.part] == [8, 9]


def test_a_run_that_does_not_answer_says_so() -> None:
    run = observed(actor(0))
    run.answers = False
    row = overview_of([run]).rows[0]
    assert row.state == "no answer"
    assert not row.is_well


def test_a_part_without_processes_shows_its_own_count() -> None:
    part = PartFigures(name="ExternalEnvBridge-1", kind="", counts={"actions": 50.0, "ended": 3.0})
    run = ObservedRun(msgspec.structs.replace(figures(), parts=[part]), 7)
    run.rates = {(part.name, "actions"): 25.0, (part.name, "ended"): 1.0}
    assert cells(overview_of([run]).rows[1]) == {
        "process": "  ExternalEnvBridge-1",
        "env steps/s": "25",
    }


@pytest.mark.parametrize("wanted", ["ACTOR-1", "down", "1001"])
def test_a_filter_keeps_rows_with_what_is_above_them(wanted: str) -> None:
    run = observed(actor(0), actor(1, state="down"))
    assert names([run], wanted) == ["python train.py", "  ActorPool-1", "    actor-1"]


def test_a_filter_that_a_run_fits_keeps_all_of_it() -> None:
    runs = [observed(actor(0), pid=7), observed(actor(0), pid=8, owner=8)]
    runs[1].figures = msgspec.structs.replace(runs[1].figures, command="python other.py")
    assert names(runs, "other") == ["python other.py", "  ActorPool-1", "    actor-0"]
    assert names(runs, "nobody") == []


def test_the_headline_counts_all_runs() -> None:
    fault = fault_figures(50.0, "crash", "actor-0", "it ended")
    runs = [
        observed(actor(0), actor(1), rates={0: 1e6, 1: 2e6}, stalled={0: 2.0}, faults=[fault]),
        observed(pid=8, owner=8, counts={"faults.crash": 3.0, "faults.error": 2.0}),
    ]
    seen = overview_of(runs)
    assert seen.headline() == ("runs 2   processes 2 (1 hung)   env steps/s 3,000,000   faults 6")
    assert overview_of([]).headline() == "runs 0   processes 0   env steps/s 0   faults 0"


def test_the_latest_faults_of_all_runs_come_first() -> None:
    runs = [
        observed(pid=pid, faults=[fault_figures(at, "crash", "actor-0", "") for at in times])
        for pid, times in ((7, [10.0, 30.0]), (8, [20.0]))
    ]
    assert [(pid, fault.at) for pid, _, fault in overview_of(runs).latest] == [
        (7, 30.0),
        (8, 20.0),
        (7, 10.0),
    ]


def test_who_hangs_is_known_by_process_id_but_for_the_run_itself() -> None:
    own, gone = actor(1, pid=7), actor(2, pid=None)
    stalled = {0: 1.5, 1: 5.0, 2: 5.0, 3: 1.0}
    assert hung_processes([observed(actor(0), own, gone, actor(3), stalled=stalled)]) == {1000: 1.5}


def test_the_data_of_a_run_are_plain_and_complete() -> None:
    run = observed(actor(0), rates={0: 20.0}, stalled={0: 2.0}, counts={"env_steps": 5.0})
    run.rates = {(PART, "env_steps"): 20.0, ("other", "env_steps"): 1.0}
    run.usage = {1000: Usage(0.5, 1024)}
    (told,) = msgspec.json.decode(msgspec.json.encode(as_data([run], {1000: "a.py:1 in f"})))
    assert (told["pid"], told["owner"], told["answers"]) == (7, 7, True)
    assert told["cpu_cores"] is None
    (part,) = told["parts"]
    assert part["rates"] == {"env_steps": 20.0}
    (process,) = part["processes"]
    assert process == {
        "name": "actor-0",
        "pid": 1000,
        "state": "ready",
        "incarnation": 0,
        "envs": [0, 2],
        "env_steps": 0,
        "busy": False,
        "env_steps_per_second": 20.0,
        "stalled_seconds": 2.0,
        "hung": True,
        "at": "a.py:1 in f",
        "cpu_cores": 0.5,
        "memory_bytes": 1024,
    }


def test_a_long_command_is_cut() -> None:
    run = observed()
    run.figures = msgspec.structs.replace(run.figures, command="x" * 200)
    assert names([run])[0] == "x" * 39 + "…"
