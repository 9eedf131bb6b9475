from __future__ import annotations

import pytest

from envbus.bench.harness.record import Schedule
from envbus.bench.steps.cases import Case
from envbus.bench.steps.step_probes import ActorStep, DriverStep, DriverWordStep
from envbus.bench.steps.step_profile import (
    PIECES,
    WHOLE,
    WORD_PIECES,
    measure_profile,
    pieces_of,
    word_pieces_of,
)
from envbus.bus.transport.words import WORDS_EXIST


def test_the_pieces_follow_the_last_actor_and_add_up() -> None:
    driver = DriverStep(
        begun=1_000,
        send_begun={b"a": 2_000, b"b": 4_000},
        sent={b"a": 3_000, b"b": 6_000},
        received={b"a": 9_000, b"b": 13_000},
        collected=15_000,
    )
    last = ActorStep(received=8_000, decoded=9_000, stepped=10_000, encoded=11_000, sent=12_000)
    other = ActorStep(received=4_000, decoded=5_000, stepped=6_000, encoded=7_000, sent=8_000)
    pieces = pieces_of(0, driver, {b"a": other, b"b": last}, ended=18_000)
    assert list(pieces) == list(PIECES)
    assert list(pieces.values()) == [1, 2, 3, 2, 1, 1, 1, 1, 1, 2, 3]
    assert sum(pieces.values()) == 18


def test_the_pieces_of_a_step_by_words_follow_the_last_actor_and_add_up() -> None:
    driver = DriverWordStep(number=7, asking=1_000, asked=3_000, answered=9_000)
    pieces = word_pieces_of(0, driver, [(3_000, 5_000), (4_000, 8_000)], ended=11_000)
    assert list(pieces) == list(WORD_PIECES)
    assert list(pieces.values()) == [1, 2, 1, 4, 1, 2]


def test_an_actor_that_sees_its_word_while_others_are_asked_takes_no_time_below_zero() -> None:
    driver = DriverWordStep(number=7, asking=1_000, asked=3_000, answered=9_000)
    pieces = word_pieces_of(0, driver, [(2_000, 8_000)], ended=11_000)
    assert list(pieces.values()) == [1, 1, 0, 6, 1, 2]


def test_a_process_that_is_seen_before_it_has_stamped_takes_no_time_below_zero() -> None:
    words = word_pieces_of(
        0,
        DriverWordStep(number=7, asking=1_000, asked=3_000, answered=9_000),
        [(4_000, 9_500)],
        11_000,
    )
    assert list(words.values()) == [1, 2, 1, 5, 0, 2]
    driver = DriverStep(1_000, {b"a": 2_000}, {b"a": 5_000}, {b"a": 8_000}, 10_000)
    actor = ActorStep(received=4_000, decoded=5_000, stepped=6_000, encoded=7_000, sent=9_000)
    messages = pieces_of(0, driver, {b"a": actor}, ended=12_000)
    assert list(messages.values()) == [1, 1, 2, 0, 1, 1, 1, 1, 0, 2, 2]


def test_real_steps_are_taken_apart() -> None:
    # A step by messages comes first: no time is enough for it alone.
    schedule = Schedule(rounds=1, seconds=0.1, warm_up=0.0, starts=1)
    case = Case("null", 4)
    record = measure_profile(schedule, [case], [case], say=lambda _: None)
    for way, names in (("words", WORD_PIECES), ("messages", PIECES)):
        pieces = {row["piece"]: row["us"] for row in record["rows"] if row["way"] == way}
        if way == "messages" or WORDS_EXIST:
            assert all(0.0 <= pieces[name] < pieces[WHOLE] for name in names)
            assert pieces["step the envs, write results"] > 0.0


def test_the_pieces_of_a_real_step_by_messages_add_up_to_it() -> None:
    schedule = Schedule(rounds=1, seconds=0.0, warm_up=0.0, starts=1)  # medians of one step
    record = measure_profile(schedule, [], [Case("null", 4)], say=lambda _: None)
    pieces = {row["piece"]: row["us"] for row in record["rows"]}
    # Each is rounded to a hundredth.
    assert sum(pieces[piece] for piece in PIECES) == pytest.approx(pieces[WHOLE], abs=0.1)
