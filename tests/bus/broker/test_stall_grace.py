from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.broker.stall_grace import AWAY, GRACE, StallGrace


def look(stall_grace: StallGrace, begun: float, waited: float = 0.0, late: float = 0.0) -> float:
    """Look as a broker does; return when that ends."""
    now = begun + waited + late
    stall_grace.looks(begun, waited, now)
    stall_grace.leaves(now)
    return now


def test_who_looks_all_the_time_judges_at_once() -> None:
    stall_grace = StallGrace()
    now = look(stall_grace, 10.0)
    now = look(stall_grace, now, waited=5.0)
    assert stall_grace.wake_at(15.0) == 15.0
    assert stall_grace.may_judge(15.0, now)


def test_nothing_is_judged_before_it_is_due() -> None:
    stall_grace = StallGrace()
    now = look(stall_grace, 10.0)
    assert not stall_grace.may_judge(now + 0.01, now)
    assert not stall_grace.may_judge(None, now)


def test_who_was_away_looks_on_for_a_moment_first() -> None:
    stall_grace = StallGrace()
    look(stall_grace, 10.0)
    now = look(stall_grace, 20.0)
    assert not stall_grace.may_judge(15.0, now)
    assert stall_grace.wake_at(15.0) == now + GRACE
    now = look(stall_grace, now, waited=GRACE)
    assert stall_grace.may_judge(15.0, now)
    assert stall_grace.wake_at(30.0) == 30.0


def test_who_was_stopped_while_waiting_was_away() -> None:
    stall_grace = StallGrace()
    look(stall_grace, 10.0)
    now = look(stall_grace, 10.0, waited=1.0, late=AWAY * 2)
    assert not stall_grace.may_judge(11.0, now)


def test_a_wait_that_ends_early_or_a_little_late_is_no_absence() -> None:
    stall_grace = StallGrace()
    look(stall_grace, 10.0)
    now = look(stall_grace, 10.0, waited=1.0, late=AWAY / 2)
    assert stall_grace.may_judge(11.0, now)
    now = look(stall_grace, now, waited=5.0, late=-4.0)
    assert stall_grace.may_judge(now, now)


def test_each_absence_has_its_own_grace() -> None:
    stall_grace = StallGrace()
    look(stall_grace, 10.0)
    now = look(stall_grace, 20.0)
    assert not stall_grace.may_judge(15.0, now)
    assert not stall_grace.may_judge(None, now)  # the answer came
    now = look(stall_grace, now + 50.0)
    assert not stall_grace.may_judge(60.0, now)


@given(st.floats(0.0, 100.0))
def test_who_looks_now_and_then_is_told_by_the_second_look(pause: float) -> None:
    stall_grace = StallGrace()
    now = look(stall_grace, 10.0)
    judged = 0
    for _ in range(2):
        now = look(stall_grace, now + max(pause, GRACE))
        judged += stall_grace.may_judge(10.0, now)
    assert judged >= 1
