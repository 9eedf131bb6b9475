from __future__ import annotations

import itertools

import numpy as np
import pytest

from envbus.actors.external.protocol import Logged
from envbus.runner.bridge.episode_table import Sessions
from envbus.runner.bridge.vocabulary import Act, SendReply


def made(max_answers: int = 10) -> Sessions:
    secrets = itertools.count()
    return Sessions(lambda: f"secret-{next(secrets)}", 5.0, max_answers)


def answer(number: int) -> SendReply:
    return SendReply(b"p", number, Logged())


def test_a_session_is_found_by_peer_and_by_secret() -> None:
    sessions = made()
    session = sessions.open(b"p", "sim")
    assert sessions.find(b"p") is session is sessions.by_secret("secret-0")
    assert sessions.find(b"q") is None
    assert (len(sessions), sessions.num_lost, sessions.next_expiry()) == (1, 0, None)
    sessions.check_invariants()


def test_lost_sessions_expire_in_the_order_in_which_they_were_lost() -> None:
    sessions = made()
    for name in "abc":
        sessions.open(name.encode(), name)
    for now, name in enumerate("bac"):
        sessions.lose(name.encode(), float(now))
        sessions.check_invariants()
    assert sessions.next_expiry() == 5.0
    assert [session.name for session in sessions.expire(6.5)] == ["b", "a"]
    assert sessions.next_expiry() == 7.0
    assert len(sessions) == 1
    sessions.lose(b"nobody", 0.0)
    sessions.check_invariants()


def test_who_goes_on_counting_keeps_its_answers_and_who_begins_anew_does_not() -> None:
    for number, kept in ((8, True), (7, False), (1, False)):
        sessions = made()
        session = sessions.open(b"p", "sim")
        sessions.note(session, 7, answer(7))
        sessions.lose(b"p", 0.0)
        sessions.move(session, b"q", number)
        assert (7 in session.answers) is kept
        assert sessions.find(b"p") is None
        assert sessions.find(b"q") is session
        assert sessions.next_expiry() is None
        sessions.check_invariants()


def test_a_session_that_moves_leaves_its_former_peer() -> None:
    sessions = made()
    session = sessions.open(b"p", "sim")
    sessions.move(session, b"q", 1)
    sessions.lose(b"p", 0.0)  # late news of the former connection
    assert sessions.num_lost == 0
    sessions.check_invariants()


@pytest.mark.parametrize("lost", [False, True])
def test_a_session_whose_client_cannot_come_back_ends_at_once(lost: bool) -> None:
    sessions = made()
    session, other = sessions.open(b"p", "sim"), sessions.open(b"q", "other")
    if lost:
        sessions.lose(b"p", 0.0)
        sessions.lose(b"q", 0.0)
    assert sessions.end(b"p") is session
    assert sessions.end(b"p") is None
    sessions.check_invariants()
    assert sessions.by_secret(session.secret) is None
    assert sessions.by_secret(other.secret) is other
    assert sessions.num_lost == lost


def test_the_oldest_answers_are_forgotten_first() -> None:
    sessions = made(max_answers=2)
    session = sessions.open(b"p", "sim")
    sessions.note(session, 1, None)
    sessions.note(session, 2, answer(2))
    sessions.note(session, 1, answer(1))
    sessions.note(session, 3, answer(3))
    assert list(session.answers) == [1, 3]
    sessions.check_invariants()


def test_large_actions_are_not_all_remembered() -> None:
    sessions = made(1000)
    session = sessions.open(b"p", "sim")
    large = {"agent0": {"a": (np.zeros(2**20, np.uint8), "x" * 2**20, 1)}}
    for number in range(1, 31):
        sessions.note(session, number, None)
        sessions.note(session, number, Act(b"p", number, large, 0))
        sessions.check_invariants()
    assert list(session.answers) == list(range(23, 31))
    assert session.forgotten == 22
    sessions.note(session, 22, answer(22))  # too late
    sessions.note(session, 31, Act(b"p", 31, {"agent0": np.zeros(2**25, np.uint8)}, 0))
    assert list(session.answers) == [31]  # the newest is kept, whatever it takes
    sessions.note(session, 32, answer(32))
    assert list(session.answers) == [32]
    sessions.check_invariants()
    for number in range(33, 43):
        sessions.note(session, number, Act(b"p", number, {"agent0": np.int64(1)}, 0))
    assert len(session.answers) == 11
    sessions.check_invariants()
