from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from envbus.runner.engine.env_states import EnvState, EnvStates

NUM_ENVS = 4
IDLE, PENDING, READY = EnvState.IDLE, EnvState.PENDING, EnvState.READY
RECOVERING, FRESH = EnvState.RECOVERING, EnvState.FRESH
HELD, LOST = EnvState.HELD, EnvState.LOST


def ready(*env_ids: int) -> EnvStates:
    """Return states in which these envs have answered, in this order."""
    states = EnvStates(NUM_ENVS)
    states.ask(sorted(env_ids))
    states.settle(sorted(env_ids))
    for env_id in env_ids:
        states.offer([env_id])
    return states


class _Broken(list[EnvState]):
    """States of which one is told no more after so many."""

    def __init__(self, states: Iterable[EnvState], left: int) -> None:
        super().__init__(states)
        self.left = left

    def __setitem__(self, index: Any, state: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise InterruptedError
        super().__setitem__(index, state)


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.offer([1, 0, 3]),
        lambda states: states.receive(1),
        lambda states: states.receive(2),
        lambda states: states.put_back([1, 0, 3]),
        lambda states: states.take(2),
        lambda states: states.recover(2),
        lambda states: states.drop(),
    ],
)
def test_who_is_ready_can_be_received_also_after_an_exception_of_a_signals_handler(
    change: Callable[[EnvStates], object], left: int
) -> None:
    states = ready(2)
    states._states = _Broken(states, left)
    with contextlib.suppress(InterruptedError):
        change(states)
    assert set(states.those(READY)) <= set(states.ready)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_an_offer_that_was_broken_off_is_finished(left: int) -> None:
    """Else the request would be told as lost, and the result would stay to be received."""
    states = EnvStates(NUM_ENVS)
    states.ask([0, 1, 2, 3])
    states._states = _Broken(states, left)
    with contextlib.suppress(InterruptedError):
        states.offer([1, 0, 3])
    states.offer_again()
    assert states.those(READY) == [0, 1, 3]
    assert states.those(PENDING) == [2]
    assert states.receive(3) == [1, 0, 3]


def test_who_is_lost_while_an_offer_is_broken_off_cannot_be_received() -> None:
    states = EnvStates(NUM_ENVS)
    states.ask([1])
    states._states = _Broken(states, 1)
    with contextlib.suppress(InterruptedError):
        states.offer([1])
    states.recover(1)
    assert states.num_ready == 0


def test_results_are_received_oldest_first() -> None:
    states = ready(2, 0, 3)
    assert list(states) == [READY, IDLE, READY, READY]
    assert states.receive(2) == [2, 0]
    assert states.num_ready == 1
    assert states.receive(1) == [3]
    assert list(states) == [IDLE] * NUM_ENVS


def test_idle_ones_are_told_from_others() -> None:
    states = ready(2)
    assert not states.are_all_idle()
    assert EnvStates(NUM_ENVS).are_all_idle()
    everybody, idle = [0, 2, 1], [3, 1]
    assert states.idle(everybody) == [0, 1]
    assert states.idle(idle) is idle


def test_a_result_may_be_taken_out_of_turn() -> None:
    states = ready(2, 0, 3)
    states.take(0)
    assert states[0] is IDLE
    assert states.receive(2) == [2, 3]


def test_a_request_that_brought_nothing_leaves_its_env_idle() -> None:
    states = EnvStates(NUM_ENVS)
    states.ask([0, 1])
    assert states.awaited()
    states.settle([0, 1])
    states.offer([1])
    assert list(states) == [IDLE, READY, IDLE, IDLE]
    assert not states.awaited()


@pytest.mark.parametrize(
    ("leave", "state", "awaited"),
    [(EnvStates.recover, RECOVERING, [0]), (EnvStates.lose, LOST, [])],
)
def test_an_env_whose_life_ends_takes_its_result_along(
    leave: Callable[[EnvStates, int], None], state: EnvState, awaited: list[int]
) -> None:
    states = ready(1, 0)
    leave(states, 0)
    assert states[0] is state
    assert states.late() == awaited
    assert states.awaited() == bool(awaited)
    assert states.receive(states.num_ready) == [1]


def test_one_that_recovers_is_awaited_until_its_result_is_there() -> None:
    states = EnvStates(NUM_ENVS)
    states.recover(1)
    assert states.awaited()
    states.freshen([1])
    assert not states.awaited()
    states.ask([1])
    assert states.late() == [1]


def test_those_that_are_pending_are_counted_though_an_exception_came_in_between() -> None:
    class Interrupted(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise KeyboardInterrupt

    states = EnvStates(NUM_ENVS)
    with pytest.raises(KeyboardInterrupt):
        states.ask(Interrupted([0, 1]))
    assert states.num_pending == len(states.those(PENDING)) == 1
    assert states.awaited()


def test_dropping_leaves_alone_those_that_recover_or_are_lost() -> None:
    states = ready(0)
    states.ask([1])
    states.recover(2)
    states.lose(3)
    states.drop()
    assert list(states) == [IDLE, IDLE, RECOVERING, LOST]
    assert (states.num_ready, states.num_pending) == (0, 0)
    states = EnvStates(NUM_ENVS)
    states.hold([3])
    assert states.those(HELD) == [3]
    states.drop()
    assert states.those(IDLE) == [0, 1, 2, 3]


class Pool(RuleBasedStateMachine):
    """Envs that are asked, answer, fail, are received, held, dropped, made anew, in any order."""

    ENV = st.integers(0, NUM_ENVS - 1)

    @initialize()
    def begin(self) -> None:
        self.states = EnvStates(NUM_ENVS)
        self.expected = [IDLE] * NUM_ENVS
        self.order: list[int] = []
        #: Requests in flight.
        self.in_flight: list[list[int]] = []

    @rule(env_ids=st.sets(ENV, min_size=1))
    def ask(self, env_ids: set[int]) -> None:
        at_rest = (IDLE, HELD, RECOVERING, FRESH)
        askable = [i for i in sorted(env_ids) if self.expected[i] in at_rest]
        if askable:
            self.states.ask(askable)
            self.in_flight.append(askable)
            self.put(askable, PENDING)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.in_flight:
            return
        members = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.states.settle(members)
        for env_id in members:
            fate = data.draw(st.sampled_from([IDLE, READY, RECOVERING, LOST]))
            self.put([env_id], fate)
            if fate is READY:
                self.states.offer([env_id])
                self.order.append(env_id)
            elif fate is RECOVERING:
                self.states.recover(env_id)
            elif fate is LOST:
                self.states.lose(env_id)

    @rule(count=st.integers(0, NUM_ENVS))
    def receive(self, count: int) -> None:
        count = min(count, len(self.order))
        expected, self.order = self.order[:count], self.order[count:]
        assert self.states.receive(count) == expected
        self.put(expected, IDLE)

    @rule(env_id=ENV)
    def take(self, env_id: int) -> None:
        if self.expected[env_id] is READY:
            self.states.take(env_id)
            self.order.remove(env_id)
            self.put([env_id], IDLE)

    @rule(env_id=ENV)
    def hold(self, env_id: int) -> None:
        if self.expected[env_id] is IDLE:
            self.states.hold([env_id])
            self.put([env_id], HELD)

    @rule(env_id=ENV, for_good=st.booleans())
    def die(self, env_id: int, for_good: bool) -> None:
        """With its actor; an env that is asked is told by the end of its request."""
        if self.expected[env_id] in (PENDING, LOST):
            return
        if self.expected[env_id] is READY:
            self.order.remove(env_id)
        (self.states.lose if for_good else self.states.recover)(env_id)
        self.put([env_id], LOST if for_good else RECOVERING)

    @rule()
    def run_again(self) -> None:
        recovering = [i for i, state in enumerate(self.expected) if state is RECOVERING]
        self.states.freshen(recovering)
        self.put(recovering, FRESH)

    @rule()
    def drop(self) -> None:
        self.states.drop()
        self.in_flight, self.order = [], []
        stay = (RECOVERING, FRESH, LOST)
        self.put([i for i, state in enumerate(self.expected) if state not in stay], IDLE)

    def put(self, env_ids: list[int], state: EnvState) -> None:
        for env_id in env_ids:
            self.expected[env_id] = state

    @invariant()
    def the_table_says_what_happened(self) -> None:
        states = self.states
        assert list(states) == self.expected
        assert states.num_ready == len(self.order) == len(states.those(READY))
        assert states.num_pending == len(states.those(PENDING))
        assert states.late() == sorted([*states.those(PENDING), *states.those(RECOVERING)])
        assert states.awaited() == bool(states.late())


TestPool = Pool.TestCase
