from __future__ import annotations

from envbus.bus.supervision.liveness_probe import LivenessProbe, Verdict


def test_a_worker_that_gives_no_sign_of_life_after_a_question_hangs() -> None:
    probe = LivenessProbe(10.0, now=0.0)
    assert probe.wake_at() == 5.0
    assert probe.look(4.0) is Verdict.NOTHING
    assert probe.look(5.0) is Verdict.ASK
    assert probe.look(10.0) is Verdict.NOTHING
    assert probe.wake_at() == 15.0
    assert probe.look(14.9) is Verdict.NOTHING
    assert probe.look(15.0) is Verdict.HUNG


def test_a_worker_that_answers_is_asked_again_later() -> None:
    probe = LivenessProbe(10.0, now=0.0)
    assert probe.look(5.0) is Verdict.ASK
    probe.alive(14.9)
    assert probe.look(15.0) is Verdict.NOTHING
    assert probe.wake_at() == 19.9
    assert probe.look(19.9) is Verdict.ASK


def test_time_in_which_nobody_ran_does_not_count() -> None:
    probe = LivenessProbe(10.0, now=0.0)
    assert probe.look(5.0) is Verdict.ASK
    assert probe.look(10.0) is Verdict.NOTHING
    assert probe.look(1000.0) is Verdict.NOTHING
    probe.alive(1000.5)  # it was stopped, too, and answers now
    assert probe.look(1001.0) is Verdict.NOTHING


def test_who_was_away_judges_in_the_end() -> None:
    probe = LivenessProbe(10.0, now=0.0)
    assert probe.look(5.0) is Verdict.ASK
    now = 1000.0
    while probe.look(now) is not Verdict.HUNG:
        now = probe.wake_at()
        assert now < 1020.0


def test_who_is_away_again_and_again_finds_out_as_well() -> None:
    probe = LivenessProbe(5.0, now=0.0)
    assert probe.look(2.5) is Verdict.ASK
    now = 2.5
    while probe.look(now) is not Verdict.HUNG:
        now += 10.5  # a short look, and a long absence
        assert now < 60.0
