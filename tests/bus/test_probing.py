from __future__ import annotations

from envbus.bus.probing import Probing, Verdict


def test_a_worker_that_gives_no_sign_of_life_after_a_question_hangs() -> None:
    probing = Probing(10.0, now=0.0)
    assert probing.wake_at() == 5.0
    assert probing.look(4.0) is Verdict.NOTHING
    assert probing.look(5.0) is Verdict.ASK
    assert probing.look(10.0) is Verdict.NOTHING
    assert probing.wake_at() == 15.0
    assert probing.look(14.9) is Verdict.NOTHING
    assert probing.look(15.0) is Verdict.HUNG


def test_a_worker_that_answers_is_asked_again_later() -> None:
    probing = Probing(10.0, now=0.0)
    assert probing.look(5.0) is Verdict.ASK
    probing.alive(14.9)
    assert probing.look(15.0) is Verdict.NOTHING
    assert probing.wake_at() == 19.9
    assert probing.look(19.9) is Verdict.ASK


def test_time_in_which_nobody_ran_does_not_count() -> None:
    probing = Probing(10.0, now=0.0)
    assert probing.look(5.0) is Verdict.ASK
    assert probing.look(10.0) is Verdict.NOTHING
    assert probing.look(1000.0) is Verdict.NOTHING
    probing.alive(1000.5)  # it was stopped, too, and answers now
    assert probing.look(1001.0) is Verdict.NOTHING


def test_who_was_away_judges_in_the_end() -> None:
    probing = Probing(10.0, now=0.0)
    assert probing.look(5.0) is Verdict.ASK
    now = 1000.0
    while probing.look(now) is not Verdict.HUNG:
        now = probing.wake_at()
        assert now < 1020.0


def test_who_is_away_again_and_again_finds_out_as_well() -> None:
    probing = Probing(5.0, now=0.0)
    assert probing.look(2.5) is Verdict.ASK
    now = 2.5
    while probing.look(now) is not Verdict.HUNG:
        now += 10.5  # a short look, and a long absence
        assert now < 60.0
