from __future__ import annotations

import pytest

from envbus.runner.chaos.schedule import FaultKind, Injection
from envbus.runner.chaos.tracking import Tracker


@pytest.fixture
def tracker() -> Tracker:
    return Tracker(pause=2.0, patience=10.0)


def injection(kind: FaultKind, env_id: int = 0, amount: float = 0.5) -> Injection:
    return Injection(0.0, kind, env_id, amount)


def test_a_fault_is_that_of_the_injection_before_it(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.KILL), [1], 100.0)
    tracker.failed(0, "crash", "ended", 100.25)
    tracker.failed(1, "crash", "ended", 100.25)
    tracker.works(1, 100.5)
    tracker.works(0, 100.75)
    report = tracker.kinds["KILL"]
    assert (report.injected, report.faults) == (1, {"crash": 2})
    assert (report.told, report.recovered) == ([0.25, 0.25], [0.5, 0.75])
    assert (tracker.faults, tracker.unexplained, tracker.unnoticed()) == (2, [], [])


def test_faults_on_the_way_back_count_and_the_first_one_is_timed(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.RAISE_INIT), [], 0.0)
    for now in (1.0, 20.0):
        tracker.failed(0, "error", "no env", now)
    tracker.works(0, 30.0)
    report = tracker.kinds["RAISE_INIT"]
    assert (report.faults, report.told, report.recovered) == ({"error": 2}, [1.0], [30.0])


def test_a_fault_without_an_injection_is_told_with_where_its_process_was(tracker: Tracker) -> None:
    tracker.failed(3, "timeout", "late\nstack" + "\nframe" * 100, 1.0)
    assert tracker.unexplained == ["env 3, timeout: late\nstack" + "\nframe" * 4]


def test_what_does_no_harm_explains_faults_for_a_while(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.PAUSE, amount=1.0), [], 0.0)
    tracker.failed(0, "timeout", "late", 10.0)
    tracker.works(0, 10.5)
    tracker.failed(0, "timeout", "late", 11.5)
    assert tracker.kinds["PAUSE"].faults == {"timeout": 1}
    assert len(tracker.unexplained) == 1


def test_an_env_is_free_when_it_works_again_or_nothing_came_of_it(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.KILL), [], 0.0)
    assert not tracker.is_free(0, 1000.0)
    tracker.failed(0, "crash", "ended", 1000.0)
    assert not tracker.is_free(0, 2000.0)
    tracker.works(0, 2000.0)
    assert tracker.is_free(0, 2000.0)
    tracker.injected(injection(FaultKind.NEARLY_SLOW, amount=1.0), [], 0.0)
    assert not tracker.is_free(0, 2.5)
    assert tracker.is_free(0, 3.5)


def test_what_reaches_an_env_on_its_way_back_explains_its_next_fault(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.RAISE_STEP), [], 0.0)
    tracker.failed(0, "error", "raised", 1.0)
    tracker.injected(injection(FaultKind.EXIT, env_id=1), [0], 2.0)
    tracker.works(0, 3.0)
    tracker.failed(0, "crash", "ended", 4.0)
    tracker.works(0, 5.0)
    assert tracker.unexplained == []
    assert tracker.kinds["EXIT"].recovered == [3.0]


def test_a_slow_step_that_is_answered_while_the_driver_is_away_need_not_fail(
    tracker: Tracker,
) -> None:
    tracker.injected(injection(FaultKind.SLOW), [1], 0.0)
    tracker.injected(injection(FaultKind.KILL, env_id=2), [], 0.0)
    for env_id in range(3):
        tracker.answered(env_id)
    assert tracker.unnoticed() == ["env 2: kill -9 of an actor"]
    assert tracker.is_free(0, 0.0)


def test_what_reaches_an_env_in_a_slow_step_that_is_answered_explains_its_next_fault(
    tracker: Tracker,
) -> None:
    tracker.injected(injection(FaultKind.SLOW), [], 0.0)
    tracker.injected(injection(FaultKind.KILL, env_id=1), [0], 0.1)
    tracker.answered(0)
    tracker.failed(0, "crash", "killed", 0.2)
    assert tracker.unexplained == []
    assert tracker.kinds["KILL"].faults == {"crash": 1}


def test_what_had_to_fail_and_did_not_is_told(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.EXIT, env_id=2), [1], 0.0)
    tracker.injected(injection(FaultKind.LEAK, env_id=3), [], 0.0)
    assert tracker.unnoticed() == ["env 2: os._exit in step"]


def test_what_hit_an_actor_that_left_to_be_recycled_need_not_be_told(tracker: Tracker) -> None:
    tracker.injected(injection(FaultKind.STOP, env_id=2), [3], 1.0)
    tracker.recycled(2)
    tracker.recycled(3)
    assert tracker.unnoticed() == []
    assert tracker.is_free(2, 1.0)


def test_what_could_not_be_done_is_counted(tracker: Tracker) -> None:
    tracker.passed_over(FaultKind.STOP)
    assert tracker.kinds["STOP"].passed_over == 1
