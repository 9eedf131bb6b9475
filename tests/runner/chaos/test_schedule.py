from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.chaos.schedule import QUIET_END, FaultKind, make_schedule


@given(st.integers(0, 10**6), st.floats(5.0, 100.0), st.integers(1, 64))
def test_a_schedule_repeats_by_its_seed(seed: int, seconds: float, num_envs: int) -> None:
    first = make_schedule(seed, seconds, num_envs, step_timeout=1.0)
    assert first == make_schedule(seed, seconds, num_envs, step_timeout=1.0)
    assert first != make_schedule(seed + 1, seconds, num_envs, step_timeout=1.0)


@given(st.integers(0, 10**6), st.floats(5.0, 100.0), st.integers(1, 64))
def test_it_is_in_order_names_envs_that_exist_and_ends_in_time(
    seed: int, seconds: float, num_envs: int
) -> None:
    schedule = make_schedule(seed, seconds, num_envs, step_timeout=1.0)
    times = [injection.at for injection in schedule]
    assert times == sorted(times)
    assert max(times) <= seconds - QUIET_END
    assert {injection.env_id for injection in schedule} <= set(range(num_envs))


@pytest.mark.parametrize("seed", range(20))
def test_a_run_of_a_quarter_minute_has_each_kind(seed: int) -> None:
    schedule = make_schedule(seed, 15.0, 8, step_timeout=1.0)
    assert {injection.kind for injection in schedule} == set(FaultKind)


def test_no_kind_is_much_more_frequent_than_another() -> None:
    counts = Counter(i.kind for i in make_schedule(0, 600.0, 8, step_timeout=1.0))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_slow_steps_lie_on_their_side_of_the_deadline() -> None:
    for injection in make_schedule(0, 600.0, 8, step_timeout=2.0):
        if injection.kind is FaultKind.SLOW:
            assert injection.amount > 2.0
        if injection.kind in (FaultKind.NEARLY_SLOW, FaultKind.PAUSE):
            assert injection.amount < 2.0
