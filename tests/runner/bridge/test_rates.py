from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.bridge.rates import RateLimit

#: Seconds between two calls.
PAUSES = st.lists(st.floats(0.0, 3.0), max_size=200)
RATES = st.floats(0.1, 50.0)


@given(PAUSES, RATES)
def test_in_no_second_there_are_more_than_twice_the_rate_and_one_is_always_allowed(
    pauses: list[float], rate: float
) -> None:
    """Those of one second at once, and those that come within that second."""
    limit, now, recent = RateLimit(rate), 0.0, deque[float]()
    for pause in pauses:
        now += pause
        if limit.take("a", now) == 0.0:
            recent.append(now)
        while recent and recent[0] <= now - 1.0:
            recent.popleft()
        assert len(recent) <= 2 * max(rate, 1.0) + 1


@given(PAUSES, RATES)
def test_who_comes_again_when_it_was_told_to_is_served(pauses: list[float], rate: float) -> None:
    limit, now = RateLimit(rate), 0.0
    for pause in pauses:
        now += pause
        wait = limit.take("a", now)
        assert 0.0 <= wait <= 1.0 / rate + 1e-6
        if wait:
            now += wait
            assert limit.take("a", now) == 0.0


@given(PAUSES, RATES)
def test_over_time_the_rate_is_kept(pauses: list[float], rate: float) -> None:
    limit, now, taken = RateLimit(rate), 0.0, 0
    for pause in pauses:
        now += pause
        taken += limit.take("a", now) == 0.0
    assert taken <= max(rate, 1.0) + now * rate + 1


@given(st.lists(st.sampled_from("abc"), max_size=100), RATES)
def test_what_one_takes_is_nobody_elses(calls: list[str], rate: float) -> None:
    together = RateLimit(rate)
    alone = {who: RateLimit(rate) for who in "abc"}
    for number, who in enumerate(calls):
        assert together.take(who, 0.01 * number) == alone[who].take(who, 0.01 * number)


def test_a_second_s_worth_may_come_at_once() -> None:
    limit = RateLimit(10.0)
    assert [limit.take("a", 5.0) for _ in range(10)] == [0.0] * 10
    assert limit.take("a", 5.0) == pytest.approx(0.1)
    assert limit.take("a", 5.1) == 0.0


def test_those_who_left_long_ago_are_forgotten() -> None:
    limit = RateLimit(1.0)
    for number in range(10_000):
        limit.take(f"{number}", 10.0 * number)
    assert len(limit) < 3000
