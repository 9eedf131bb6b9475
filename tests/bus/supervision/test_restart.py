from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from envbus.bus.errors import ConfigError
from envbus.bus.supervision.restart import (
    ChildState,
    Exit,
    Restart,
    RestartPolicy,
    SupervisedLife,
)


def ready_child(policy: RestartPolicy) -> SupervisedLife:
    child = SupervisedLife(policy)
    child.on_ready(0.0)
    return child


def crash(child: SupervisedLife, now: float) -> float | None:
    """The child ends at `now`; if it is started again, it is ready in the same moment."""
    delay = child.on_exit(Exit.CRASH, now)
    if child.state is ChildState.BACKING_OFF:
        child.on_started_again()
        child.on_ready(now)
    assert delay is not None or child.state is ChildState.GIVEN_UP
    return delay


def start_in_vain(child: SupervisedLife, now: float) -> float | None:
    """The child ends at `now`; if it is started again, it is not ready before its next end."""
    delay = child.on_exit(Exit.CRASH, now)
    if child.state is ChildState.BACKING_OFF:
        child.on_started_again()
    assert delay is not None or child.state is ChildState.GIVEN_UP
    return delay


def test_it_backs_off_then_gives_up() -> None:
    child = ready_child(RestartPolicy(max_restarts=3, window=5.0, backoff=0.5))
    assert crash(child, now=1.0) == 0.0
    assert crash(child, now=2.0) == 0.5
    assert crash(child, now=3.0) == 1.0
    assert crash(child, now=4.0) is None
    assert (child.state, child.incarnation) == (ChildState.GIVEN_UP, 3)


def test_a_life_that_has_worked_for_the_window_clears_count_and_pause() -> None:
    child = ready_child(RestartPolicy(max_restarts=2, window=5.0, backoff=0.5))
    crash(child, now=1.0)
    crash(child, now=2.0)
    assert crash(child, now=7.0) == 0.0
    assert crash(child, now=8.0) == 0.5
    assert crash(child, now=9.0) is None
    assert child.restarts == 4


def test_by_default_what_is_killed_each_quarter_of_a_minute_comes_back_at_once_for_days() -> None:
    child = ready_child(RestartPolicy())
    for kill in range(1, 4 * 60 * 24 * 3):
        assert crash(child, now=15.0 * kill) == 0.0


@pytest.mark.parametrize("seconds_to_start", [0.1, 1.0, 60.0, 3600.0])
def test_by_default_what_fails_at_each_start_is_given_up_after_ten_restarts(
    seconds_to_start: float,
) -> None:
    child = SupervisedLife(RestartPolicy(jitter=0.0))
    now, paused = 0.0, 0.0
    for _ in range(10):
        now += seconds_to_start
        delay = start_in_vain(child, now)
        assert delay is not None
        now += delay
        paused += delay
    assert paused == pytest.approx(11.1)
    assert start_in_vain(child, now + seconds_to_start) is None


def test_one_that_works_for_the_longest_pause_comes_back_at_once_however_long_the_window() -> None:
    child = ready_child(RestartPolicy(max_restarts=100, window=1e6, max_backoff=5.0))
    for kill in range(1, 101):
        assert crash(child, now=5.0 * kill) == 0.0
    assert crash(child, now=505.0) is None


@pytest.mark.parametrize("policy", [RestartPolicy.always(), RestartPolicy(max_restarts=None)])
def test_always_never_gives_up_and_pauses_for_two_seconds_at_most(policy: RestartPolicy) -> None:
    child = SupervisedLife(policy)
    pauses = [start_in_vain(child, float(life)) for life in range(5000)]
    assert pauses[-1] == 2.0


def test_a_thousand_restarts_are_as_many() -> None:
    child = SupervisedLife(RestartPolicy(max_restarts=1000))
    delays = [start_in_vain(child, float(life)) for life in range(1001)]
    assert delays[-1] is None
    assert child.restarts == child.in_a_row == 1000


def test_the_time_in_which_it_hang_is_no_work() -> None:
    child = ready_child(RestartPolicy(max_restarts=1))
    for delay in (0.0, None):
        assert child.on_exit(Exit.HANG, 65.0, idle=60.0) == delay
        if child.state is ChildState.BACKING_OFF:
            child.on_started_again()
            child.on_ready(0.0)


def test_one_that_is_renewed_after_work_has_nothing_against_it() -> None:
    child = ready_child(RestartPolicy(max_restarts=1, window=5.0))
    crash(child, now=1.0)
    child.on_renewed(now=6.0)
    assert start_in_vain(child, 7.0) == 0.0


def test_a_start_that_fails_counts_like_a_crash() -> None:
    child = SupervisedLife(RestartPolicy(max_restarts=1))
    assert child.on_exit(Exit.CRASH, 0.0) == 0.0
    child.on_started_again()
    assert child.on_exit(Exit.CRASH, 1e9) is None


def test_zero_restarts_means_never() -> None:
    assert ready_child(RestartPolicy(max_restarts=0)).on_exit(Exit.CRASH, 0.0) is None


def test_giving_up_names_count_window_and_what_to_change() -> None:
    text = RestartPolicy(max_restarts=3, window=7.0).exhausted(3)
    for part in ("after 3 restarts", "7 s", "max_restarts=3", "RestartPolicy.always()"):
        assert part in text


def test_the_pause_has_a_cap() -> None:
    policy = RestartPolicy(max_restarts=2000, window=1e6, backoff=1.0, max_backoff=3.0)
    assert [policy.delay(recent) for recent in (0, 1, 2, 3, 1999)] == [0.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("random", "delay"), [(0.0, 1.0), (0.5, 1.25)])
def test_jitter_makes_the_pause_longer(random: float, delay: float) -> None:
    child = SupervisedLife(RestartPolicy(backoff=1.0, jitter=0.5), random=lambda: random)
    start_in_vain(child, -1.0)
    assert child.on_exit(Exit.CRASH, 0.0) == delay


@pytest.mark.parametrize(
    ("restart", "reason", "restarted"),
    [
        (Restart.PERMANENT, Exit.NORMAL, True),
        (Restart.TRANSIENT, Exit.NORMAL, False),
        (Restart.TRANSIENT, Exit.HANG, True),
        (Restart.TRANSIENT, Exit.MEMORY_LIMIT, True),
        (Restart.TEMPORARY, Exit.CRASH, False),
    ],
)
def test_restart_kind_meets_exit_reason(restart: Restart, reason: Exit, restarted: bool) -> None:
    delay = ready_child(RestartPolicy(restart=restart)).on_exit(reason, 0.0)
    assert (delay is not None) is restarted


def test_an_illegal_event_changes_nothing() -> None:
    child = ready_child(RestartPolicy())
    with pytest.raises(AssertionError, match="ready"):
        child.on_ready(1.0)
    assert child.state is ChildState.READY


def test_a_stopped_child_stays_so() -> None:
    child = ready_child(RestartPolicy())
    child.on_exit(Exit.NORMAL, 0.0)
    with pytest.raises(AssertionError, match="stopped"):
        child.on_exit(Exit.CRASH, 0.0)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_restarts": -1}, "max_restarts"),
        ({"window": 0.0}, "window"),
        ({"window": float("nan")}, "window"),
        ({"backoff": -0.1}, "backoff"),
        ({"backoff": 9.0, "max_backoff": 1.0}, "backoff"),
        ({"jitter": 1.1}, "jitter"),
        ({"max_restarts": 2.5}, "None for no limit"),
        ({"max_restarts": "many"}, "None for no limit"),
        ({"window": float("inf")}, r"RestartPolicy\.always\(\)"),
        ({"window": None}, "window"),
        ({"backoff": "soon"}, "backoff"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RestartPolicy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("restart", "chosen"),
    [
        (True, RestartPolicy()),
        (RestartPolicy.always(), RestartPolicy.always()),
        (False, None),
    ],
)
def test_restart_is_yes_or_no_or_a_policy(
    restart: bool | RestartPolicy, chosen: RestartPolicy | None
) -> None:
    assert RestartPolicy.chosen(restart) == chosen


@pytest.mark.parametrize("wrong", [{"max_restarts": 3}, None, 5, "yes"])
def test_what_is_neither_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="must be True, False or a RestartPolicy"):
        RestartPolicy.chosen(wrong)


@given(
    max_restarts=st.integers(0, 6),
    window=st.floats(0.1, 30.0),
    lives=st.lists(
        st.tuples(st.one_of(st.none(), st.floats(0.0, 60.0)), st.floats(0.0, 9.0)), max_size=40
    ),
)
def test_it_gives_up_after_as_many_short_lives_as_allowed_in_a_row_and_never_before(
    max_restarts: int, window: float, lives: list[tuple[float | None, float]]
) -> None:
    """Each life: seconds from its start to its hello and on to its end; None: no hello."""
    child = SupervisedLife(RestartPolicy(max_restarts=max_restarts, window=window))
    now, in_a_row = 0.0, 0
    for starting, worked in lives:
        now += starting or 0.0
        ready_at = now
        if starting is not None:
            child.on_ready(now)
        now += worked
        if starting is not None and now - ready_at >= window:
            in_a_row = 0
        delay = child.on_exit(Exit.CRASH, now)
        if in_a_row == max_restarts:
            assert (delay, child.state) == (None, ChildState.GIVEN_UP)
            assert child.in_a_row == max_restarts
            return
        in_a_row += 1
        assert delay is not None
        assert delay <= child.policy.max_backoff
        if starting is not None and now - ready_at >= child.policy.max_backoff:
            assert delay == 0.0
        now += delay
        child.on_started_again()
