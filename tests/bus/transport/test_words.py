"""Words by which processes of one host ask each other, and that no wake-up is lost."""

from __future__ import annotations

import pytest

from envbus.bus.transport.words import BYTES_PER_DOER, WORDS_EXIST, Asker, Doer, _Fence
from tests.soak.words import hand_over

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not WORDS_EXIST, reason="words are for x86-64 only"),
]

HAND_OVERS = 20_000
FEW_AND_MANY = pytest.mark.parametrize("count", [1, 3, 20])


def make(count: int) -> tuple[Asker, list[Doer]]:
    memory = memoryview(bytearray(count * BYTES_PER_DOER))
    doers = [Doer() for _ in range(count)]
    for index, doer in enumerate(doers):
        doer.attach(memory[index * BYTES_PER_DOER : (index + 1) * BYTES_PER_DOER])
    return Asker(memory, count), doers


@FEW_AND_MANY
def test_all_are_asked_and_each_answers_once(count: int) -> None:
    asker, doers = make(count)
    for _ in range(3):
        number = asker.begin()
        assert not any(doer.is_asked() for doer in doers)
        assert list(asker.ask()) == []
        for index, doer in enumerate(doers):
            assert asker.undone() == index
            assert asker.all_undone() == list(range(index, count))
            assert doer.take() == number
            assert not doer.is_asked()
            assert not doer.answer(number, has_more=False)
            assert asker.answered(index, number)
        assert asker.undone() == -1


@FEW_AND_MANY
def test_who_has_more_to_tell_is_not_done(count: int) -> None:
    asker, doers = make(count)
    number = asker.begin()
    asker.ask()
    for doer in doers[:-1]:
        doer.answer(doer.take(), has_more=False)
    doers[-1].answer(doers[-1].take(), has_more=True)
    assert asker.answered(count - 1, number)
    assert asker.has_more(count - 1, number)
    assert asker.undone() == count - 1
    assert asker.all_undone() == [count - 1]


@FEW_AND_MANY
def test_only_who_sleeps_is_rung(count: int) -> None:
    asker, doers = make(count)
    assert doers[-1].fall_asleep()
    asker.begin()
    assert list(asker.ask()) == [count - 1]
    assert not doers[0].fall_asleep(), "it is asked"
    doers[-1].wake_up()
    asker.fall_asleep(count - 1)
    for index, doer in enumerate(doers):
        assert doer.answer(doer.take(), has_more=False) == (index == count - 1)


def test_what_was_asked_of_a_former_life_is_not_asked_of_the_next() -> None:
    memory = memoryview(bytearray(BYTES_PER_DOER))
    asker = Asker(memory, 1)
    asker.begin()
    asker.ask()
    doer = Doer()
    doer.attach(memory)
    assert not doer.is_asked()
    asker.begin()
    assert asker.undone() == 0
    asker.ask()
    assert doer.is_asked()


def test_who_is_detached_is_asked_nothing() -> None:
    asker, (doer,) = make(1)
    doer.detach()
    asker.begin()
    asker.ask()
    assert not doer.is_asked()
    doer.detach()


def test_who_looks_sees_what_is_asked() -> None:
    asker, (doer,) = make(1)
    assert not doer.look()
    asker.begin()
    asker.ask()
    assert doer.look()
    doer.take()
    assert not doer.look()
    assert not Doer().look()


def test_one_of_several_is_asked() -> None:
    asker, doers = make(3)
    number = asker.begin()
    assert not asker.ask_one(1, number)
    assert [doer.is_asked() for doer in doers] == [False, True, False]
    doers[1].answer(doers[1].take(), has_more=False)
    assert asker.answered(1, number)


def test_no_wake_up_is_lost_between_two_processes() -> None:
    counts = hand_over(HAND_OVERS)
    assert counts.slept
    assert counts.rung
    assert not counts.lost


def test_a_fence_that_a_signal_broke_off_is_one_again() -> None:
    fence = _Fence()
    fence._lock.acquire()  # as if a handler had raised before it was given back
    fence()
    fence()
