from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.recovery import Incarnations, Recovery
from envbus.runner.engine.seeding import restart_seed

ONE, PAIR = range(0, 1), range(1, 3)
POLICY = RestartPolicy(max_restarts=2, window=100.0, backoff=1.0)


def recovery_of(policy: RestartPolicy = POLICY) -> Recovery:
    return Recovery([ONE, PAIR], policy)


def test_the_first_failure_is_made_good_at_once() -> None:
    recovery = recovery_of()
    assert not recovery
    assert recovery.due(0.0) == []
    assert recovery.failed(ONE, "boom", 5.0) is None
    assert recovery
    assert recovery.wake_at() == -math.inf
    assert recovery.due(5.0) == [ONE]
    assert recovery.due(5.0) == []
    assert recovery.wake_at() is None
    assert recovery  # until it is known to work
    recovery.works(ONE, 5.0)
    assert not recovery
    assert recovery.restarts() == 1


def test_a_second_failure_waits() -> None:
    recovery = recovery_of()
    for _ in range(2):
        recovery.failed(PAIR, "boom", 5.0)
        due = recovery.due(5.0)
        recovery.works(due[0] if due else (), 5.0)
    assert recovery.wake_at() == 6.0
    assert recovery.due(5.9) == []
    assert recovery.due(6.0) == [PAIR]


def test_what_came_back_with_its_actor_before_its_pause_was_over_has_worked_since() -> None:
    recovery = recovery_of()
    recovery.failed(ONE, "boom", 0.0)
    recovery.due(0.0)
    recovery.works(ONE, 0.0)
    recovery.failed(ONE, "boom", 0.0)
    recovery.works(ONE, 0.5)
    assert recovery.due(1.0) == []
    assert recovery.failed(ONE, "boom", 200.0) is None
    assert recovery.due(200.0) == [ONE]


def test_an_env_that_fails_too_often_is_given_up_with_the_number_of_restarts() -> None:
    recovery = recovery_of()
    outcomes = []
    for now in (0.0, 10.0, 20.0):
        outcomes.append(recovery.failed(ONE, "boom", now))
        recovery.due(now + 5.0)
        recovery.works(ONE, now + 5.0)
    assert outcomes[:2] == [None, None]
    assert "failed again after 2 restarts in a row" in str(outcomes[2])
    assert not recovery
    assert recovery.wake_at() is None
    assert recovery.failed(ONE, "again", 30.0) == outcomes[2]
    assert not recovery


def test_without_any_restart_the_first_failure_is_the_last() -> None:
    recovery = recovery_of(RestartPolicy(max_restarts=0))
    assert "0 restarts" in str(recovery.failed(ONE, "boom", 0.0))
    assert recovery.due(math.inf) == []


def test_an_env_that_has_worked_for_the_window_is_forgiven_and_made_anew_at_once() -> None:
    recovery = recovery_of()
    for step in range(20):
        assert recovery.failed(ONE, "boom", step * 110.0) is None
        assert recovery.due(step * 110.0) == [ONE]
        recovery.works(ONE, step * 110.0 + 10.0)
    assert recovery.restarts() == 20


def test_each_unit_has_its_own_budget() -> None:
    recovery = recovery_of(RestartPolicy(max_restarts=1))
    assert recovery.failed(ONE, "boom", 0.0) is None
    assert recovery.failed(PAIR, "boom", 0.0) is None
    assert sorted(unit.start for unit in recovery.due(0.0)) == [0, 1]
    assert "1 restarts" in str(recovery.failed(ONE, "boom", 1.0))


def test_envs_of_one_vector_env_are_one_unit() -> None:
    recovery = recovery_of()
    assert [recovery.unit_of(i) for i in range(3)] == [ONE, PAIR, PAIR]


def test_an_env_that_came_back_with_its_actor_is_not_made_anew_again() -> None:
    recovery = recovery_of()
    recovery.failed(PAIR, "boom", 0.0)
    recovery.works([2], 0.0)
    assert not recovery
    assert recovery.due(math.inf) == []
    recovery.failed(PAIR, "boom", 1.0)  # waits
    recovery.works(PAIR, 1.0)
    assert recovery.due(math.inf) == []


class RecoveryMachine(RuleBasedStateMachine):
    """Envs fail, are made anew, and come back with their actors, in any order."""

    UNITS = (range(0, 1), range(1, 2), range(2, 5))

    def __init__(self) -> None:
        super().__init__()
        self.policy = RestartPolicy(max_restarts=3, window=50.0, backoff=1.0, max_backoff=4.0)
        self.recovery = Recovery(list(self.UNITS), self.policy)
        self.now = 0.0
        #: Failed and not told as due since.
        self.owed: set[int] = set()
        #: Told as due, and not known to work.
        self.in_work: set[int] = set()
        self.given_up: set[int] = set()

    @rule(unit=st.sampled_from(UNITS))
    def fail(self, unit: range) -> None:
        if unit.start in self.owed:  # nobody steps an env that is known to have failed
            return
        self.in_work.discard(unit.start)
        how_often = self.recovery.failed(unit, "boom", self.now)
        assert unit.start not in self.given_up or how_often is not None, "given up is for good"
        if how_often is None:
            self.owed.add(unit.start)
        else:
            self.given_up.add(unit.start)

    @rule()
    def make_anew(self) -> None:
        starts = [unit.start for unit in self.recovery.due(self.now)]
        assert len(set(starts)) == len(starts), "due twice"
        assert set(starts) <= self.owed, "due without a failure"
        self.owed -= set(starts)
        self.in_work |= set(starts)

    @rule(unit=st.sampled_from(UNITS))
    def work_again(self, unit: range) -> None:
        self.recovery.works(unit, self.now)
        self.owed.discard(unit.start)
        self.in_work.discard(unit.start)

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def whoever_failed_is_due_at_a_known_time(self) -> None:
        assert bool(self.recovery) == bool(self.owed | self.in_work)
        wake_at = self.recovery.wake_at()
        if self.owed:
            assert wake_at is not None
            assert wake_at <= self.now + self.policy.max_backoff

    def teardown(self) -> None:
        self.now += 1000.0
        self.make_anew()
        assert not self.owed, "failed, and never due"


TestRecoveryMachine = RecoveryMachine.TestCase


def test_lives_are_counted_and_seeded_from_seed_env_and_number() -> None:
    incarnations = Incarnations(3)
    assert incarnations.seeds([0, 1]) is None
    incarnations.remember(0, 7)
    incarnations.remember(1, 7)
    incarnations.begin([0, 1, 2])
    incarnations.begin([1])
    assert incarnations.numbers.tolist() == [1, 2, 1]
    assert incarnations.seeds([0, 1, 2]) == [restart_seed(7, 0, 1), restart_seed(7, 1, 2), None]
    assert len({restart_seed(7, 0, 1), restart_seed(7, 1, 2), 7}) == 3
    incarnations.remember(0, None)  # a reset without a seed
    assert incarnations.seeds([0]) == [restart_seed(7, 0, 1)]
    assert incarnations.seeds([2]) is None
