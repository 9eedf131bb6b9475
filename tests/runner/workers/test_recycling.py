from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.bus.errors import ConfigError
from envbus.runner.workers.recycling import RecycleAfter, Recycling

NUM_ACTORS = 3


def running(num_actors: int, **limits: Any) -> Recycling:
    recycling = Recycling(RecycleAfter(**limits), num_actors)
    for index in range(num_actors):
        recycling.begin(index, 0.0)
    return recycling


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "needs one of"),
        ({"max_hold": 5.0}, "needs one of"),
        ({"episodes": 0}, "episodes must be over 0"),
        ({"steps": -1}, "steps must be over 0"),
        ({"rss_mb": math.nan}, "rss_mb must be a number"),
        ({"seconds": math.inf}, "seconds must be over 0 and finite"),
        ({"steps": 5, "max_hold": 0.0}, "max_hold must be over 0"),
    ],
)
def test_unusable_limits_are_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RecycleAfter(**limits)


def test_nobody_has_the_turn_before_a_limit_is_reached() -> None:
    recycling = running(1, episodes=2, steps=10)
    assert recycling.turn(0.0) is None
    recycling.count(0, 9, 1)
    assert recycling.turn(1.0) is None
    recycling.count(0, 1, 0)
    assert recycling.turn(1.0) == 0


@pytest.mark.parametrize(
    ("limit", "amounts"), [("episodes", (0, 2)), ("steps", (2, 0))], ids=["episodes", "steps"]
)
def test_each_count_has_its_limit(limit: str, amounts: tuple[int, int]) -> None:
    recycling = running(1, **{limit: 2})
    recycling.count(0, *amounts)
    assert recycling.turn(0.0) == 0


def test_memory_counts_as_it_is_and_is_not_spread() -> None:
    recycling = running(2, rss_mb=100.0)
    assert recycling.weighs
    recycling.weigh(0, 99.0)
    assert recycling.turn(0.0) is None
    recycling.weigh(0, 100.0)
    assert recycling.turn(0.0) == 0
    assert not running(1, steps=1).weighs


def test_the_first_round_is_spread_evenly_and_so_are_all_others() -> None:
    recycling = running(4, seconds=100.0)
    seen = []
    for now in range(1000):
        index = recycling.turn(float(now))
        if index is not None:
            seen.append((now, index))
            recycling.leave(index)
            recycling.begin(index, float(now))
    assert seen == [(25 * number, (number - 1) % 4) for number in range(1, 40)]


def test_nobody_has_a_turn_while_another_one_leaves_and_starts_again() -> None:
    recycling = running(2, steps=1)
    recycling.count(0, 5, 0)
    recycling.count(1, 5, 0)
    assert recycling.turn(0.0) == 0
    recycling.leave(0)
    assert recycling.turn(100.0) is None
    assert recycling.hold_ends_at() == math.inf
    recycling.begin(0, 101.0)
    assert recycling.turn(101.0) == 1


def test_who_does_not_come_to_an_end_passes_the_turn_and_pauses() -> None:
    recycling = running(2, steps=1, max_hold=10.0)
    recycling.count(0, 5, 0)
    recycling.count(1, 5, 0)
    assert recycling.turn(0.0) == 0
    assert recycling.hold_ends_at() == 10.0
    recycling.pass_turn(10.0)
    assert recycling.turn(10.0) == 1
    recycling.leave(1)
    recycling.begin(1, 11.0)
    assert recycling.turn(99.0) is None
    assert recycling.turn(100.0) == 0


def test_all_that_are_due_are_told_each_in_its_turn() -> None:
    recycling = running(3, steps=1)
    for index in range(3):
        recycling.count(index, 5, 0)
    assert recycling.due(0.0) == [0, 1, 2]
    recycling.leave(1)
    assert recycling.due(0.0) == []
    recycling.begin(1, 0.0)
    assert recycling.due(0.0) == [2, 0]


def test_a_death_ends_the_turn_and_the_new_life_begins_at_zero() -> None:
    recycling = running(2, steps=10)
    recycling.count(0, 10, 0)
    assert recycling.turn(0.0) == 0
    recycling.end(0)
    assert recycling.turn(0.0) is None
    recycling.begin(0, 1.0)
    recycling.count(0, 9, 0)
    assert recycling.turn(1.0) is None
    recycling.count(0, 1, 0)
    assert recycling.turn(1.0) == 0


def test_an_actor_that_left_and_cannot_come_back_holds_up_nobody() -> None:
    recycling = running(2, steps=1)
    recycling.count(0, 5, 0)
    recycling.count(1, 5, 0)
    recycling.leave(0)
    recycling.end(0)
    assert recycling.turn(1.0) == 1


class Actors(RuleBasedStateMachine):
    """Actors that work, die, are exchanged or not, in any order."""

    AFTER = RecycleAfter(episodes=3, steps=10, rss_mb=50.0, seconds=100.0, max_hold=5.0)
    INDEX = st.integers(0, NUM_ACTORS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.recycling = Recycling(self.AFTER, NUM_ACTORS)
        self.up = [False] * NUM_ACTORS
        self.leaving: int | None = None
        self.steps = [0] * NUM_ACTORS
        self.heavy = [False] * NUM_ACTORS
        self.since = [0.0] * NUM_ACTORS
        self.passed_at = [-math.inf] * NUM_ACTORS

    def full(self, index: int) -> bool:
        """Whether a whole limit, the most that anybody may use, is reached."""
        old = self.now - self.since[index] >= 100.0
        return self.up[index] and (self.steps[index] >= 10 or self.heavy[index] or old)

    @rule(index=INDEX)
    def begin(self, index: int) -> None:
        if not self.up[index] or self.leaving == index:
            self.recycling.begin(index, self.now)
            self.up[index], self.steps[index], self.since[index] = True, 0, self.now
            self.heavy[index], self.passed_at[index] = False, -math.inf
            self.leaving = None if self.leaving == index else self.leaving

    @rule(index=INDEX)
    def die(self, index: int) -> None:
        self.recycling.end(index)
        self.up[index] = False
        self.leaving = None if self.leaving == index else self.leaving

    @rule(index=INDEX, steps=st.integers(1, 4))
    def work(self, index: int, steps: int) -> None:
        if self.up[index] and self.leaving != index:
            self.recycling.count(index, steps, 0)
            self.steps[index] += steps

    @rule(index=INDEX, heavy=st.booleans())
    def weigh(self, index: int, heavy: bool) -> None:
        if self.up[index]:
            self.recycling.weigh(index, 60.0 if heavy else 40.0)
            self.heavy[index] = heavy

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.recycling.turn(self.now) is not None)
    @rule()
    def leave(self) -> None:
        index = self.recycling.turn(self.now)
        assert index is not None
        self.recycling.leave(index)
        self.leaving = index

    @precondition(lambda self: self.recycling.turn(self.now) is not None)
    @rule()
    def give_up(self) -> None:
        index = self.recycling.turn(self.now)
        assert index is not None
        self.recycling.pass_turn(self.now)
        self.passed_at[index] = self.now

    @invariant()
    def one_at_a_time_and_only_who_works(self) -> None:
        turn = self.recycling.turn(self.now)
        if self.leaving is not None:
            assert turn is None
        elif turn is not None:
            assert self.up[turn]
            assert self.recycling.hold_ends_at() <= self.now + self.AFTER.max_hold
        else:  # nobody who is over a limit is forgotten, but for one that pauses
            pauses = 9.0 * 60.0 * 50  # longer than any here
            waiting = [i for i in range(NUM_ACTORS) if self.full(i)]
            assert all(self.now - self.passed_at[i] < pauses for i in waiting)


TestActors = Actors.TestCase
