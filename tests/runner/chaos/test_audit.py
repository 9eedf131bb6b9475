from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from envbus.runner.chaos.audit import (
    APPLIED_AS_SENT,
    APPLIED_ONCE,
    COMES_BACK,
    DELIVERED_ALL,
    DELIVERED_ONCE,
    DELIVERED_TRUE,
    FAULT_TOLD,
    IN_ORDER,
    LIVES_APART,
    NOT_MIXED,
    RESET,
    RULES,
    Delivered,
    EnvRecord,
    Event,
    Faulty,
    Rule,
    Sent,
    audit_env,
)
from tests.runner.chaos.histories import ENV_ID, History, histories

Pick = Callable[[int], int]
Plant = Callable[[History, Pick], None]

picks = st.integers(0, 10_000).map(lambda number: lambda count: number % count)


def places(events: list[Event], kind: type, *, steps_only: bool = False) -> list[int]:
    """Return where such events are; of rows, on demand, those of steps only."""
    return [
        place
        for place, event in enumerate(events)
        if isinstance(event, kind)
        and not (steps_only and isinstance(event, Delivered) and event.nonce == RESET)
    ]


def choose(history: History, pick: Pick, kind: type, *, steps_only: bool = False) -> int:
    found = places(history.events, kind, steps_only=steps_only)
    return found[pick(len(found))]


def rules_broken(history: History) -> set[Rule]:
    return {v.rule for v in audit_env(ENV_ID, history.events, history.applied).violations}


# Each plants one violation; `PLANTED` names the rule that must speak.


def apply_an_action_twice(history: History, pick: Pick) -> None:
    steps = [place for place, row in enumerate(history.applied) if row.nonce != RESET]
    place = steps[pick(len(steps))]
    row = history.applied[place]
    history.applied.insert(place + 1, replace(row, count=row.count + 1))


def apply_an_action_again_in_the_next_life(history: History, pick: Pick) -> None:
    step = next(row for row in history.applied if row.nonce != RESET)
    last = history.applied[-1]
    history.applied.append(EnvRecord(last.life, last.count + 1, step.nonce))


def apply_what_was_sent_to_another(history: History, pick: Pick) -> None:
    last = history.applied[-1]
    history.applied.append(EnvRecord(last.life, last.count + 1, 9_000_001))


def go_on_after_the_next_life_began(history: History, pick: Pick) -> None:
    first = [row for row in history.applied if row.life == history.applied[0].life][-1]
    history.applied.append(EnvRecord(first.life, first.count + 1, RESET))


def deliver_a_row_twice(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    history.events.insert(place + 1, history.events[place])


def lose_a_row(history: History, pick: Pick) -> None:
    """One that no fault follows: an episode that is reported as faulty may lose its last row."""
    events = [*history.events, Sent(0)]
    rows = places(events, Delivered, steps_only=True)
    found = [place for place in rows if not isinstance(events[place + 1], Faulty)]
    del history.events[found[pick(len(found))]]


def lose_the_last_row(history: History, pick: Pick) -> None:
    del history.events[places(history.events, Delivered)[-1]]


def invent_a_row(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    row = history.events[place]
    assert isinstance(row, Delivered)
    history.events[place] = replace(row, life=0xDEAD)


def deliver_the_row_of_another_env(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    row = history.events[place]
    assert isinstance(row, Delivered)
    history.events[place] = replace(row, env_id=ENV_ID + 1)


def mix_up_a_reward(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    row = history.events[place]
    assert isinstance(row, Delivered)
    history.events[place] = replace(row, reward=row.reward + 1)


def mix_up_an_info(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    row = history.events[place]
    assert isinstance(row, Delivered)
    history.events[place] = replace(row, noted=row.noted + 2)


def deliver_the_answer_to_the_action_before(history: History, pick: Pick) -> None:
    """What a time-out without request ids does: from here on each row is one too old."""
    place = choose(history, pick, Sent)
    history.nonce += 2
    history.events.insert(place, Sent(history.nonce))
    history.events[place], history.events[place + 1] = (
        history.events[place + 1],
        history.events[place],
    )


def swap_two_rows_of_a_life(history: History, pick: Pick) -> None:
    history.happen(0)
    history.happen(0)
    one, other = places(history.events, Delivered)[-2:]
    events = history.events
    events[one], events[other] = events[other], events[one]


def say_nothing_of_a_fault(history: History, pick: Pick) -> None:
    """One in the middle of an episode: else it looks like a recycling, and is counted as one."""
    found = []
    over = False
    for place, event in enumerate(history.events):
        if isinstance(event, Delivered):
            over = event.over
        elif isinstance(event, Faulty) and not over:
            found.append(place)
    del history.events[found[pick(len(found))]]


def recycle_in_the_middle_of_an_episode(history: History, pick: Pick) -> None:
    history.number += 1
    history.begin()


def report_a_fault_twice(history: History, pick: Pick) -> None:
    place = choose(history, pick, Faulty)
    history.events.insert(place, history.events[place])


def report_a_fault_of_an_env_that_goes_on(history: History, pick: Pick) -> None:
    history.events.insert(places(history.events, Delivered)[-1], Faulty(history.number))


def number_a_row_wrongly(history: History, pick: Pick) -> None:
    place = choose(history, pick, Delivered)
    row = history.events[place]
    assert isinstance(row, Delivered)
    history.events[place] = replace(row, incarnation=row.incarnation + 1)


def never_come_back(history: History, pick: Pick) -> None:
    history.fail()


def never_answer(history: History, pick: Pick) -> None:
    history.send()


PLANTED: dict[Plant, set[Rule]] = {
    apply_an_action_twice: {APPLIED_ONCE},
    apply_an_action_again_in_the_next_life: {APPLIED_ONCE},
    apply_what_was_sent_to_another: {APPLIED_AS_SENT},
    go_on_after_the_next_life_began: {LIVES_APART},
    deliver_a_row_twice: {DELIVERED_ONCE},
    lose_a_row: {DELIVERED_ALL, IN_ORDER},
    lose_the_last_row: {DELIVERED_ALL},
    invent_a_row: {DELIVERED_TRUE},
    deliver_the_row_of_another_env: {NOT_MIXED},
    mix_up_a_reward: {DELIVERED_TRUE},
    mix_up_an_info: {DELIVERED_TRUE},
    deliver_the_answer_to_the_action_before: {DELIVERED_ALL},
    swap_two_rows_of_a_life: {IN_ORDER},
    say_nothing_of_a_fault: {FAULT_TOLD},
    recycle_in_the_middle_of_an_episode: {FAULT_TOLD},
    report_a_fault_twice: {FAULT_TOLD},
    report_a_fault_of_an_env_that_goes_on: {FAULT_TOLD},
    number_a_row_wrongly: {FAULT_TOLD},
    never_come_back: {COMES_BACK},
    never_answer: {DELIVERED_ALL},
}


@given(histories)
def test_nothing_is_wrong_where_all_promises_are_kept(history: History) -> None:
    audit = audit_env(ENV_ID, history.events, history.applied)
    assert audit == ([], history.recycled)


@given(histories, st.sampled_from(list(PLANTED)), picks)
def test_each_kind_of_violation_is_found(history: History, plant: Plant, pick: Pick) -> None:
    plant(history, pick)
    assert PLANTED[plant] & rules_broken(history), plant.__name__


def test_every_rule_has_a_violation_that_is_planted() -> None:
    assert set(RULES) == set().union(*PLANTED.values())


@given(histories)
def test_an_env_of_which_nothing_ever_came_is_told(history: History) -> None:
    history.events.clear()
    history.applied.clear()
    assert rules_broken(history) == {COMES_BACK}


def test_a_violation_says_what_was_promised_and_what_happened() -> None:
    history = History()
    history.begin()
    history.send()
    (violation,) = audit_env(ENV_ID, history.events, history.applied).violations
    assert str(violation) == (
        "env 3: an applied step is delivered, or its episode is faulty; "
        "but action 102 was never answered"
    )


def test_one_mistake_with_a_long_train_is_told_in_short() -> None:
    history = History()
    history.begin()
    for _ in range(100):
        history.happen(0)
    history.applied.clear()
    assert len(audit_env(ENV_ID, history.events, history.applied).violations) == 20
