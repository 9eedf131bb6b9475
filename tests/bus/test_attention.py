from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.attention import AWAY, GRACE, Attention


def look(attention: Attention, begun: float, waited: float = 0.0, late: float = 0.0) -> float:
    """Look as a broker does; return when that ends."""
    now = begun + waited + late
    attention.looks(begun, waited, now)
    attention.leaves(now)
    return now


def test_who_looks_all_the_time_judges_at_once() -> None:
    attention = Attention()
    now = look(attention, 10.0)
    now = look(attention, now, waited=5.0)
    assert attention.wake_at(15.0) == 15.0
    assert attention.may_judge(15.0, now)


def test_nothing_is_judged_before_it_is_due() -> None:
    attention = Attention()
    now = look(attention, 10.0)
    assert not attention.may_judge(now + 0.01, now)
    assert not attention.may_judge(None, now)


def test_who_was_away_looks_on_for_a_moment_first() -> None:
    attention = Attention()
    look(attention, 10.0)
    now = look(attention, 20.0)
    assert not attention.may_judge(15.0, now)
    assert attention.wake_at(15.0) == now + GRACE
    now = look(attention, now, waited=GRACE)
    assert attention.may_judge(15.0, now)
    assert attention.wake_at(30.0) == 30.0


def test_who_was_stopped_while_waiting_was_away() -> None:
    attention = Attention()
    look(attention, 10.0)
    now = look(attention, 10.0, waited=1.0, late=AWAY * 2)
    assert not attention.may_judge(11.0, now)


def test_a_wait_that_ends_early_or_a_little_late_is_no_absence() -> None:
    attention = Attention()
    look(attention, 10.0)
    now = look(attention, 10.0, waited=1.0, late=AWAY / 2)
    assert attention.may_judge(11.0, now)
    now = look(attention, now, waited=5.0, late=-4.0)
    assert attention.may_judge(now, now)


def test_each_absence_has_its_own_grace() -> None:
    attention = Attention()
    look(attention, 10.0)
    now = look(attention, 20.0)
    assert not attention.may_judge(15.0, now)
    assert not attention.may_judge(None, now)  # the answer came
    now = look(attention, now + 50.0)
    assert not attention.may_judge(60.0, now)


@given(st.floats(0.0, 100.0))
def test_who_looks_now_and_then_is_told_by_the_second_look(pause: float) -> None:
    attention = Attention()
    now = look(attention, 10.0)
    judged = 0
    for _ in range(2):
        now = look(attention, now + max(pause, GRACE))
        judged += attention.may_judge(10.0, now)
    assert judged >= 1
