from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from envbus.runner.chaos.audit import NOT_MIXED, Audit, Violation
from envbus.runner.chaos.leaks import ResourceSample
from envbus.runner.chaos.messages import KindReport, Result
from envbus.runner.chaos.report import print_chaos
from envbus.runner.chaos.result import ChaosResult, Leftovers, Observed, judge
from envbus.runner.chaos.schedule import FaultKind

MB = 1_000_000
CONFIG = {"num_envs": 3, "num_actors": 2}
LEFT = Leftovers(processes=[], socket_files=[], shared_files=[], shared_by_us=[])
#: Two recycled actors, of one and two envs.
AUDITS = [Audit([], 1), Audit([], 1), Audit([], 1)]


def a_sample(seconds: float = 0.0, **changes: Any) -> ResourceSample:
    found = ResourceSample(
        seconds=seconds,
        driver_memory=50 * MB,
        driver_descriptors=28,
        driver_memory_files=4,
        server_memory=40 * MB,
        server_descriptors=13,
        processes=3,
        zombies=0,
        shared_files=[],
    )
    return replace(found, **changes)


def a_result(**changes: Any) -> Result:
    kinds = {kind.name: KindReport() for kind in FaultKind}
    kinds["KILL"] = KindReport(injected=2, faults={"crash": 2}, told=[0.1, 0.3], recovered=[0.2])
    found = Result(
        seconds=10.0,
        env_steps=5000,
        kinds=kinds,
        unexplained=[],
        unnoticed=[],
        counted={"crash": 2},
        actor_restarts=1,
        env_restarts=0,
        recycled=2,
        settled=True,
    )
    return replace(found, **changes)


def observed(**changes: Any) -> Observed:
    found = Observed(
        result=a_result(),
        failure="",
        samples=[a_sample(second) for second in range(121)],
        at_start=a_sample(),
        at_end=a_sample(120.0),
        stood_still=0.0,
        left=LEFT,
    )
    return replace(found, **changes)


def judged(**changes: Any) -> ChaosResult:
    return judge(CONFIG, observed(), observed(**changes), AUDITS)


def printed(result: ChaosResult) -> str:
    stream = io.StringIO()
    print_chaos(Console(file=stream, width=120), result)
    return stream.getvalue()


def test_a_run_in_which_all_promises_are_kept_has_no_violation() -> None:
    result = judged()
    assert (result.violations, result.remarks) == ([], [])
    assert (result.recovered.p50, result.told.n) == (0.2, 2)
    assert (result.env_steps_per_second, result.calm_env_steps_per_second) == (500.0, 500.0)
    assert "no violation" in printed(result)


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "the driver hung": lambda: {"result": None, "failure": "the driver hung: stacks"},
    "left behind: process sleep 1": lambda: {"left": replace(LEFT, processes=["sleep 1"])},
    "left behind: socket file bus": lambda: {"left": replace(LEFT, socket_files=["bus"])},
    "left behind: shared memory psm": lambda: {
        "left": replace(LEFT, shared_files=["psm"], shared_by_us=["other", "psm"])
    },
    "did not come back": lambda: {"result": a_result(settled=False)},
    "for which nothing was broken": lambda: {
        "result": a_result(unexplained=["env 1, crash: gone"], counted={"crash": 3})
    },
    "nothing was reported of": lambda: {"result": a_result(unnoticed=["env 2: os._exit"])},
    "2 faults were told, and 5 counted": lambda: {"result": a_result(counted={"crash": 5})},
    "driver descriptors: 28 at the start, 30": lambda: {"at_end": a_sample(driver_descriptors=30)},
    "processes: 3 at the start, 4": lambda: {"at_end": a_sample(processes=4)},
    "1 actors were recycled, and 3 lives": lambda: {"result": a_result(recycled=1)},
    "2 zombies": lambda: {"at_end": a_sample(zombies=2)},
    "driver_memory grows by 3,000,000.0": lambda: {
        "samples": [a_sample(s, driver_memory=50 * MB + s * MB // 20) for s in range(121)]
    },
    "server_descriptors grows by 60.0": lambda: {
        "samples": [a_sample(s, server_descriptors=s) for s in range(121)]
    },
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_breaks_a_promise_is_a_violation_and_is_printed(text: str) -> None:
    result = judged(**BROKEN[text]())
    (violation,) = result.violations
    assert text in violation
    assert f"VIOLATION: {violation}" in printed(result)


def test_what_the_audit_and_the_calm_run_found_counts() -> None:
    calm = observed(result=a_result(settled=False))
    violation = Violation(1, NOT_MIXED, "it was")
    audits = [Audit([violation], 1), *AUDITS[1:]]
    assert judge(CONFIG, calm, observed(), audits).violations == [
        str(violation),
        "calm run: envs did not come back at the end",
    ]


def test_a_step_that_was_late_by_itself_is_a_remark() -> None:
    late = a_result(unexplained=["env 1, timeout: late"], counted={"crash": 2, "timeout": 1})
    result = judged(result=late)
    assert result.violations == []
    assert "env 1, timeout: late" in result.remarks[0]


def test_shared_memory_of_another_program_is_a_remark() -> None:
    result = judged(left=replace(LEFT, shared_files=["sem.other"]))
    assert result.violations == []
    assert "sem.other" in result.remarks[0]


def test_a_machine_that_stood_still_is_a_remark() -> None:
    assert judged(stood_still=31.5).remarks == ["chaos run: all stood still for 31.5 s"]


def test_memory_of_a_short_run_is_not_judged() -> None:
    samples = [a_sample(s, driver_memory=s * MB) for s in range(30)]
    result = judged(samples=samples)
    assert result.growths["driver_memory"].per_minute is None
    assert result.violations == []
