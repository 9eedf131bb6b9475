from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from envbus.bus.errors import ConfigError
from envbus.bus.restart import (
    Child,
    ChildState,
    Exit,
    GiveUp,
    Restart,
    RestartPolicy,
    StartAfter,
)


def ready_child(policy: RestartPolicy) -> Child:
    child = Child(policy)
    child.on_ready()
    return child


def crash(child: Child, now: float) -> list[StartAfter | GiveUp]:
    effects = child.on_exit(Exit.CRASH, now)
    if child.state is ChildState.BACKING_OFF:
        child.on_started_again()
        child.on_ready()
    return effects


def test_it_backs_off_then_gives_up() -> None:
    child = ready_child(RestartPolicy(max_restarts=3, window=5.0, backoff=0.5))
    assert crash(child, now=10.0) == [StartAfter(0.0)]
    assert crash(child, now=11.0) == [StartAfter(0.5)]
    assert crash(child, now=12.0) == [StartAfter(1.0)]
    assert crash(child, now=13.0) == [GiveUp(3)]
    assert (child.state, child.incarnation) == (ChildState.GIVEN_UP, 3)


def test_old_crashes_are_forgiven() -> None:
    child = ready_child(RestartPolicy(max_restarts=2, window=5.0, backoff=0.5))
    crash(child, now=10.0)
    crash(child, now=11.0)
    assert crash(child, now=15.5) == [StartAfter(0.5)]  # 10.0 has left the window
    assert child.restarts == 3


def test_a_start_that_fails_counts_like_a_crash() -> None:
    child = Child(RestartPolicy(max_restarts=1))
    assert child.on_exit(Exit.CRASH, 0.0) == [StartAfter(0.0)]
    child.on_started_again()
    assert child.on_exit(Exit.CRASH, 0.2) == [GiveUp(1)]


def test_zero_restarts_means_never() -> None:
    assert ready_child(RestartPolicy(max_restarts=0)).on_exit(Exit.CRASH, 0.0) == [GiveUp(0)]


def test_the_pause_has_a_cap() -> None:
    policy = RestartPolicy(max_restarts=2000, window=1e6, backoff=1.0, max_backoff=3.0)
    assert [policy.delay(recent) for recent in (0, 1, 2, 3, 1999)] == [0.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("random", "delay"), [(0.0, 1.0), (0.5, 1.25)])
def test_jitter_makes_the_pause_longer(random: float, delay: float) -> None:
    child = Child(RestartPolicy(backoff=1.0, jitter=0.5), random=lambda: random)
    crash(child, -1.0)
    assert child.on_exit(Exit.CRASH, 0.0) == [StartAfter(delay)]


@pytest.mark.parametrize(
    ("restart", "reason", "restarted"),
    [
        (Restart.PERMANENT, Exit.NORMAL, True),
        (Restart.TRANSIENT, Exit.NORMAL, False),
        (Restart.TRANSIENT, Exit.LEASE_EXPIRED, True),
        (Restart.TRANSIENT, Exit.HANG, True),
        (Restart.TRANSIENT, Exit.MEMORY_LIMIT, True),
        (Restart.TEMPORARY, Exit.CRASH, False),
    ],
)
def test_restart_kind_meets_exit_reason(restart: Restart, reason: Exit, restarted: bool) -> None:
    assert bool(ready_child(RestartPolicy(restart=restart)).on_exit(reason, 0.0)) is restarted


def test_an_illegal_event_changes_nothing() -> None:
    child = ready_child(RestartPolicy())
    with pytest.raises(AssertionError, match="ready"):
        child.on_ready()
    assert child.state is ChildState.READY


def test_a_stopped_child_stays_so() -> None:
    child = ready_child(RestartPolicy())
    child.on_stop()
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
        ({"max_restarts": 3, "backoff": 2.0, "window": 5.0}, "for ever"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RestartPolicy(**settings)  # type: ignore[arg-type]


@given(
    max_restarts=st.integers(0, 6),
    gaps=st.lists(st.floats(0.0, 30.0), max_size=40),
)
def test_no_window_holds_more_restarts_than_allowed(max_restarts: int, gaps: list[float]) -> None:
    child = ready_child(RestartPolicy(max_restarts=max_restarts))
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        if isinstance(crash(child, now)[0], GiveUp):
            break
        times.append(now)
    for end in times:
        assert sum(end - 60.0 < at <= end for at in times) <= max_restarts
