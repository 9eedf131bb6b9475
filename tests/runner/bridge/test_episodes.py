"""The rules of a bridge's episodes, group X of the behaviours."""

from __future__ import annotations

from typing import Any

import pytest

from envbus.actors.external.protocol import EpisodeEnded, Logged
from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Failed, FailureCode
from envbus.runner.bridge.vocabulary import (
    ClientFragment,
    ClientLost,
    Confirm,
    Drain,
    End,
    EpisodeLimits,
    FragmentPart,
    LogReward,
    LogStep,
    Observe,
    Refuse,
    SendReply,
    StartCall,
)
from envbus.runner.errors import FaultCause
from tests.runner.bridge.scenes import A, Scene, action_of, by_agent, refusal

B = b"b"


def test_open_episodes_are_told_with_how_often_each_verb_was_called() -> None:
    scene = Scene()
    scene.start("e")
    scene.start("f")
    scene.ask("e", "o0")
    scene.take()
    scene.choose("e", 0)
    scene.reward("e", 1.0)
    scene.ask("e", "o1")
    scene.log("f", "o0", 1)
    first, second = scene.episodes.figures()
    assert (first.episode_id, first.is_there, first.waits) == ("e", True, True)
    assert first.calls == {"get_action": 2, "log_returns": 1}
    assert (second.calls, second.waits, second.queued) == ({"log_action": 1}, False, 1)
    scene.end("f", "o1")
    assert [told.episode_id for told in scene.episodes.figures()] == ["e"]
    scene.lose()
    assert [told.is_there for told in scene.episodes.figures()] == [False]


# --- one at a time, and time-outs ---


def test_the_newest_call_of_an_episode_counts_and_the_waiting_one_is_told() -> None:
    scene = Scene()
    scene.start("e")
    first = scene.ask("e", "o0")
    (effect,) = scene.all(Observe(A, 50, "e", by_agent("o1"), timeout=10.0))
    assert isinstance(effect, Refuse)
    assert effect.request_id == first
    assert refusal(effect).startswith("EpisodeBusy")
    assert scene.seen("e") == ("o0", 0.0)
    assert scene.choose("e", 0) is None
    assert scene.seen("e") == ("o1", 0.0)
    assert action_of(scene.choose("e", 1)) == (A, 50, 1)


def test_a_time_out_names_the_episode_and_its_late_action_goes_to_nobody() -> None:
    scene = Scene()
    scene.start("e")
    number = scene.ask("e", "o0", timeout=2.0)
    scene.take()
    assert scene.episodes.wake_at() == 2.0
    assert scene.tick(1.9) == []
    (effect,) = scene.tick(0.2)
    assert isinstance(effect, Refuse)
    assert (effect.request_id, effect.failed.code) == (number, FailureCode.TIMEOUT)
    assert "episode e: no action within 2 s" in effect.failed.message
    again = scene.ask("e", "o1")
    assert scene.choose("e", "late") is None  # the runner has not seen o1 yet
    record = scene.take()["e"]
    assert (record.unacted, record.missed) == (True, False)
    assert record.content["observations"] == {"agent0": "o1"}
    assert action_of(scene.choose("e", "right")) == (A, again, "right")
    counts = scene.episodes.statistics()
    assert (counts.timeouts, counts.dropped_actions, counts.actions) == (1, 1, 1)


def test_an_action_that_comes_after_the_time_is_late_though_nobody_looked() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0", timeout=2.0)
    scene.take()
    scene.now = 2.5
    assert refusal(scene.choose("e", 1)).startswith("timeout")
    assert scene.episodes.statistics().actions == 0


def test_an_action_of_which_the_client_says_that_it_had_given_up_before_was_not_taken() -> None:
    scene = Scene()
    scene.start("e")
    first = scene.ask("e", "o0")
    scene.take()
    assert action_of(scene.choose("e", 0)) == (A, first, 0)
    given_up = scene.ask("e", "o1")
    scene.take()
    scene.choose("e", 1)
    scene.do(LogReward(A, 50, "e", by_agent(5.0), {}, {}, {}, not_taken=given_up))
    scene.do(Observe(A, 51, "e", by_agent("o2"), timeout=10.0, not_taken=given_up))
    record = scene.take()["e"]
    assert record.unacted
    assert record.content["rewards"] == by_agent(5.0)
    assert action_of(scene.choose("e", 2)) == (A, 51, 2)
    scene.do(
        Observe(A, 52, "e", by_agent("o3"), timeout=10.0, not_taken=given_up)
    )  # not told: none since
    assert scene.take()["e"].unacted
    scene.choose("e", 3)
    scene.do(Observe(A, 53, "e", by_agent("o4"), timeout=10.0))
    assert not scene.take()["e"].unacted
    scene.choose("e", 4)
    flags = [by_agent(True) | {"__all__": True}, by_agent(False) | {"__all__": False}]
    scene.all(End(A, 55, "e", by_agent("o5"), *flags, not_taken=53))
    assert scene.take()["e"].unacted
    assert scene.episodes.statistics().dropped_actions == 3


def test_no_row_goes_on_over_an_observation_that_never_came() -> None:
    scene = Scene()
    scene.start("e")
    scene.do(LogReward(A, 10, "e", by_agent(1.0), {}, {}, {}, not_taken=9))
    scene.do(Observe(A, 11, "e", by_agent("o0"), timeout=10.0))
    record = scene.take()["e"]
    assert (record.unacted, record.missed) == (False, True)  # the first: no row before it
    scene.choose("e", 0)
    scene.do(LogReward(A, 13, "e", by_agent(1.0), {}, {}, {}, not_taken=12))
    scene.do(Observe(A, 14, "e", by_agent("o2"), timeout=10.0, not_taken=12))
    record = scene.take()["e"]
    assert (record.unacted, record.missed) == (True, True)
    scene.choose("e", 2)
    scene.do(Observe(A, 15, "e", by_agent("o3"), timeout=10.0))
    assert not scene.take()["e"].unacted
    assert scene.episodes.statistics().dropped_actions == 0


def test_a_question_that_never_came_voids_no_action_that_was_taken_after_it() -> None:
    """A client repeats what it gave up until it is answered: held steps may be late."""
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0")
    scene.take()
    scene.choose("e", 0)
    for number, observation in ((20, "o1"), (21, "o2"), (22, "o3")):
        step = LogStep(A, number, "e", by_agent(observation), by_agent(5), not_taken=19)
        scene.all(step)
    assert [scene.take()["e"].unacted for _ in range(3)] == [True, False, False]


def test_of_observations_that_timed_out_unseen_the_first_is_shown() -> None:
    """There the row before ends; what the simulator did without an action is no part of it."""
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0")
    scene.take()
    scene.choose("e", 1)
    scene.reward("e", 1.0, {"a": 1})
    for number in range(1, 4):
        scene.ask("e", f"o{number}", timeout=1.0)
        scene.tick(1.0)
        scene.reward("e", 2.0, {f"b{number}": 2})
    scene.ask("e", "o4")
    shown = scene.take()["e"]
    assert shown.content["observations"] == by_agent("o1")
    assert not shown.unacted
    assert shown.content["rewards"] == {"agent0": 1.0}
    assert shown.content["infos"] == {"agent0": {"a": 1}}
    assert scene.choose("e", "late") is None
    newest = scene.take()["e"]
    assert newest.content["observations"] == by_agent("o4")
    assert newest.unacted
    assert newest.content["rewards"] == {"agent0": 6.0}
    assert newest.content["infos"] == {"agent0": {"b1": 2, "b2": 2, "b3": 2}}
    assert scene.take() == {}


def test_of_each_agents_observations_that_timed_out_unseen_the_first_is_shown() -> None:
    """Who had acted before the gap has a row that ends there, and none that leads over it."""
    scene = Scene()
    scene.start("e")
    scene.ask("e", {"x": 0})
    scene.take()
    scene.choose("e", 0)
    for number, agent in enumerate("yxyxx", start=1):
        scene.ask("e", {agent: number}, timeout=1.0)
        scene.tick(1.0)
    scene.ask("e", {"x": 6})
    records = [scene.take()["e"] for _ in range(3)]
    assert [record.content["observations"] for record in records] == [{"y": 1}, {"x": 2}, {"x": 6}]
    assert [record.unacted for record in records] == [False, True, True]
    assert scene.take() == {}


def test_rewards_behind_a_first_observation_that_timed_out_belong_to_no_action() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0", timeout=1.0)
    scene.tick(1.0)
    scene.reward("e", 5.0)
    scene.ask("e", "o1")
    assert scene.take()["e"].first
    record = scene.take()["e"]
    assert (record.first, record.unacted) == (False, True)


def test_who_waits_is_told_why_there_is_no_action_and_may_ask_again() -> None:
    scene = Scene()
    scene.start("e")
    number = scene.ask("e", "o0")
    scene.take()
    failed = Failed(code=FailureCode.REMOTE, message="boom", remote_type="builtins.ValueError")
    assert scene.give_up("e", failed) == Refuse(A, number, failed)
    assert scene.give_up("e", failed) is None
    scene.ask("e", "o1")
    assert scene.take()["e"].unacted


@pytest.mark.parametrize("lost", ["step", "reward", "nothing"])
def test_over_a_call_that_may_never_have_come_no_row_leads_if_it_did_not(lost: str) -> None:
    scene = Scene()
    scene.start("e")
    scene.log("e", "o0", 0)
    step, reward = scene.number(A), scene.number(A)
    if lost != "step":
        scene.do(LogStep(A, step, "e", by_agent("o1"), by_agent(1)))
    if lost == "nothing":
        scene.do(LogReward(A, reward, "e", by_agent(1.0), {}, {}, {}))
    for name in ("o2", "o3"):  # the answer to the first one is lost, too
        again = scene.number(A)
        scene.do(LogStep(A, again, "e", by_agent(name), by_agent(2), given_up=reward))
    scene.end("e", "o4")
    unacted = {}
    while records := scene.take():
        record = records["e"]
        (seen,) = record.content["observations"].values()
        unacted[seen] = record.unacted
    assert [name for name, is_void in unacted.items() if is_void] == (
        [] if lost == "nothing" else ["o2"]
    )


def test_a_call_that_never_came_leaves_a_gap_also_where_an_observation_is_taken_back() -> None:
    """Of an agent that acted before, and waits meanwhile, the rewards in it are lost."""
    scene = Scene()
    scene.start("e")
    scene.log("e", {"a": "a0", "c": "c0"}, {"a": 0, "c": 0})
    scene.ask("e", {"a": "a1"})
    scene.tick(10.0)
    scene.ask("e", {"a": "a2"})  # and its client gives up, before the runner has looked
    lost = scene.number(A)
    scene.all(LogReward(A, scene.number(A), "e", {"c": 1.0}, {}, {}, {}, given_up=lost))
    scene.log("e", {"c": "c3"}, {"c": 0})
    records = [scene.take()["e"] for _ in range(3)]
    assert scene.take() == {}
    assert [record.content["observations"] for record in records[1:]] == [{"a": "a1"}, {"c": "c3"}]
    assert [record.unacted for record in records] == [False, False, True]
    assert [record.missed for record in records] == [False, False, True]


# --- resending, leaving, coming back ---


def test_an_id_is_refused_that_another_request_had_or_whose_answer_is_forgotten() -> None:
    scene = Scene(max_answers=3)
    scene.start("e")
    ask = Observe(A, 10, "e", by_agent("o0"), timeout=10.0, digest=1)
    assert scene.do(ask) is None
    other = Observe(A, 10, "e", by_agent("o1"), timeout=10.0, digest=2)
    told = refusal(scene.do(other))  # also while the first one waits
    assert told.startswith("RequestIdUsed: request id 10 came before")
    scene.take()
    acted = scene.choose("e", 1)
    assert scene.do(ask) == acted
    assert refusal(scene.do(other)).startswith("RequestIdUsed")
    for number in (11, 12, 13):
        scene.do(LogReward(A, number, "e", by_agent(1.0), {}, {}, {}, digest=number))
    assert refusal(scene.do(ask)).startswith("RequestIdUsed")
    assert scene.take() == {}
    assert scene.do(LogReward(A, 14, "e", by_agent(1.0), {}, {}, {})) == SendReply(A, 14, Logged())


@pytest.mark.parametrize("away", [False, True])
def test_what_many_episodes_ask_may_be_sent_again_whoever_was_answered_meanwhile(
    away: bool,
) -> None:
    scene = Scene(max_answers=2)
    names = [f"e{index}" for index in range(10)]
    for name in ("quick", *names):
        scene.start(name)
    asked = [
        Observe(A, scene.number(A), name, by_agent(name), timeout=10.0, digest=index)
        for index, name in enumerate(names)
    ]
    for ask in asked:
        scene.do(ask)
    for _ in range(20):
        scene.reward("quick", 1.0)
    scene.take()
    if away:
        scene.lose()
        for name in names:
            assert scene.choose(name, name) is None
        scene.join(A, scene.sessions[A])
    for ask, name in zip(asked, names, strict=True):
        effect = scene.do(ask)
        if not away:
            assert effect is None
            effect = scene.choose(name, name)
        assert action_of(effect) == (A, ask.request_id, name)
    for name in names:
        scene.end(name, 0)
    session = scene.table.sessions.find(A)
    assert session is not None
    assert (len(session.answers), session.unanswered) == (2, {})


def test_a_request_that_was_refused_may_be_tried_again_under_its_id() -> None:
    scene = Scene()
    early = Observe(A, 10, "e", by_agent("o0"), timeout=10.0, digest=1)
    assert refusal(scene.do(early)).startswith("EpisodeNotFound")
    scene.start("e")
    assert scene.do(early) is None
    assert scene.seen("e") == ("o0", 0.0)


def test_a_request_that_comes_again_is_answered_again_and_not_done_again() -> None:
    scene = Scene()
    scene.start("e")
    log = LogStep(A, 70, "e", by_agent("o0"), by_agent(1))
    first = scene.do(log)
    assert scene.do(log) == first == SendReply(A, 70, Logged())
    reward = LogReward(A, 71, "e", by_agent(1.0), {}, {}, {})
    assert scene.do(reward) == scene.do(reward)
    ask = Observe(A, 72, "e", by_agent("o1"), timeout=10.0)
    assert scene.do(ask) is None
    assert scene.do(ask) is None
    assert scene.seen("e") == ("o0", 0.0)
    assert scene.seen("e") == ("o1", 1.0)
    assert scene.take() == {}
    given = scene.choose("e", 5)
    assert action_of(given) == (A, 72, 5)
    assert scene.do(ask) == given
    start = StartCall(A, 73, None)
    assert scene.do(start) == scene.do(start)
    assert scene.episodes.statistics().resent == 5
    assert len(scene.table.open) == 2


def test_a_client_that_stays_away_ends_its_episodes_as_faulty() -> None:
    scene = Scene(B, lease=30.0)
    scene.start("seen")
    scene.start("unseen")
    scene.start("other", B)
    scene.ask("seen", "o0")
    scene.take()
    scene.log("unseen", "o0", 1)
    scene.take()
    scene.choose("seen", 1)
    scene.log("seen", "o1", 1)
    scene.ask("other", "o0", B, timeout=100.0)
    scene.take()
    scene.lose(A)
    assert scene.tick(29.0) == []
    assert scene.episodes.statistics().lost_clients_now == 1
    assert scene.take() == {}
    scene.tick(1.0)
    records = scene.take()
    assert set(records) == {"seen", "unseen"}
    for name, record in records.items():
        assert record.last
        assert record.fault is not None
        assert (record.fault.episode_id, record.fault.cause) == (name, FaultCause.LOST)
        assert "gone for over 30 s" in record.fault.message
    assert len(scene.table.open) == 1
    assert scene.choose("other", 1) is not None
    assert scene.join(A) not in scene.sessions.values()
    assert refusal(scene.reward("seen", 1.0)).startswith("EpisodeLost")


def test_episodes_of_a_process_that_has_ended_are_faulty_at_once() -> None:
    scene = Scene(B, lease=30.0)
    scene.start("e")
    scene.start("other", B)
    scene.ask("e", "o0")
    scene.take()
    scene.lose(A)  # its connection broke before its end was heard of
    scene.do(ClientLost(A, "simulator x: signal SIGKILL", FaultCause.CRASH))
    record = scene.take()["e"]
    assert record.last
    assert record.fault is not None
    assert record.fault.cause is FaultCause.CRASH
    assert record.fault.message == "episode e: simulator x: signal SIGKILL"
    assert scene.join(B, scene.sessions[A]) == "SessionLost"
    assert list(scene.table.open) == ["other"]
    assert scene.do(ClientLost(A, "again", FaultCause.CRASH)) is None


def test_what_is_lost_before_it_was_seen_is_told_as_lost() -> None:
    scene = Scene(lease=30.0)
    scene.start("e")
    scene.ask("e", "o0")
    scene.lose()
    scene.tick(30.0)
    assert scene.take()["e"].fault is None
    record = scene.take()["e"]
    assert (record.last, record.fault is not None) == (True, True)
    assert scene.take() == {}
    assert scene.episodes.statistics().faulty == 1


def test_a_client_that_comes_back_in_time_goes_on() -> None:
    scene = Scene(lease=30.0)
    scene.start("e")
    number = scene.ask("e", "o0", timeout=100.0)
    scene.take()
    scene.lose()
    assert scene.choose("e", 5) is None  # kept for whoever asks again
    scene.tick(29.0)
    scene.numbers[B] = scene.numbers[A]  # it goes on counting
    assert scene.join(B, scene.sessions[A]) == scene.sessions[A]
    again = scene.do(Observe(B, number, "e", by_agent("o0"), timeout=10.0))
    assert action_of(again) == (B, number, 5)
    assert scene.tick(100.0) == []
    scene.reward("e", 1.0, peer=B)
    scene.ask("e", "o1", B)
    record = scene.take()["e"]
    assert not record.unacted
    assert scene.episodes.statistics().resumed == 1


def test_one_that_counts_anew_is_not_told_what_its_former_self_was() -> None:
    scene = Scene(lease=30.0)
    scene.start("e")
    scene.ask("e", "o0")
    scene.take()
    scene.lose()
    assert scene.join(B, scene.sessions[A]) == scene.sessions[A]  # its numbers begin with 1
    assert (
        scene.do(Observe(B, 2, "e", by_agent("o1"), timeout=10.0)) is None
    )  # what A's 2 was, it is not
    assert scene.take()["e"].unacted


def test_one_that_counts_anew_gets_no_answer_to_what_its_former_self_waited_for() -> None:
    scene = Scene(lease=30.0, max_queued=1, confirm_ends=True)
    for episode in ("asked", "logged", "ended"):
        scene.start(episode)
    scene.log("ended", 0, 0)
    assert scene.end("ended", 1) == []
    scene.log("logged", 0, 0)
    assert scene.log("logged", 1, 0) is None
    scene.ask("asked", "o0")
    assert {"asked", "logged", "ended"} == scene.take().keys()
    scene.lose()
    scene.join(B, scene.sessions[A])
    assert scene.choose("asked", 1) is None
    assert scene.episodes.collect()[1] == []
    assert scene.do(Confirm("ended")) is None
    assert scene.tick(29.0) == []
    assert scene.episodes.wake_at() is None


def test_one_that_comes_too_late_is_told_that_its_session_is_gone() -> None:
    scene = Scene(lease=30.0)
    scene.start("e")
    scene.lose()
    scene.tick(30.0)
    assert scene.join(B, scene.sessions[A]) == "SessionLost"
    assert scene.join(B)


def test_a_session_has_one_connection_at_a_time() -> None:
    scene = Scene()
    scene.start("e")
    assert scene.join(B, scene.sessions[A]) == scene.sessions[A]
    assert "JoinBridge" in refusal(scene.reward("e", 1.0, peer=A))
    assert isinstance(scene.reward("e", 1.0, peer=B), SendReply)


# --- limits ---


def test_a_client_that_logs_faster_than_the_runner_takes_has_to_wait() -> None:
    scene = Scene(max_queued=2)
    scene.start("e")
    assert scene.log("e", 0, 0)
    assert scene.log("e", 1, 0)
    number = scene.number(A)
    held = LogStep(A, number, "e", by_agent(2), by_agent(0))
    assert scene.do(held) is None
    assert scene.do(held) is None
    for i in range(3, 8):
        assert scene.log("e", i, 0) is None
    assert refusal(scene.log("e", 8, 0)).startswith("overloaded")
    answered = []
    for i in range(8):
        (record,), effects = scene.episodes.collect()
        assert record.content["observations"] == {"agent0": i}
        answered += effects
    assert len(answered) == 6
    assert answered[0] == SendReply(A, number, Logged())


def test_what_others_have_can_be_taken_where_memory_ran_out_as_something_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(max_queued=1)
    for episode in ("e", "f"):
        scene.start(episode)
    scene.log("e", 0, 0)
    assert scene.log("e", 1, 0) is None  # it is held
    scene.take()
    scene.ask("f", 0)

    def short(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(scene.episodes._table, "resolve", short)
        with pytest.raises(MemoryError):
            scene.episodes.collect()
    records, _ = scene.episodes.collect()
    assert [record.episode_id for record in records] == ["f"]


@pytest.mark.parametrize("kind", ["LogStep", "ClientFragment", "End"])
def test_whoever_waits_is_told_once_when_its_time_is_over_and_what_it_sent_counts(
    kind: str,
) -> None:
    scene = Scene(max_queued=1, confirm_ends=True)
    scene.start("e")
    scene.log("e", 0, 0)
    number = scene.number(A)
    step = LogStep(A, number, "e", by_agent(1), by_agent(0), timeout=2.0)
    held: dict[str, Any] = {
        "LogStep": step,
        "ClientFragment": ClientFragment(
            A, number, "e", "p", 0, [FragmentPart(None, step)], timeout=2.0
        ),
        "End": End(A, number, "e", by_agent(1), {"__all__": True}, {}, timeout=2.0),
    }
    assert scene.do(held[kind]) is None
    assert scene.episodes.wake_at() == 2.0
    assert scene.tick(1.9) == []
    (told,) = scene.tick(0.2)
    assert isinstance(told, Refuse)
    assert (told.request_id, told.failed.code) == (number, FailureCode.TIMEOUT)
    assert "episode e: " in told.failed.message
    assert "within 2 s; what was sent counts" in told.failed.message
    assert scene.episodes.wake_at() is None
    assert scene.do(held[kind]) == told  # again, and it is not done again
    assert [scene.seen("e")[0], scene.seen("e")[0]] == [0, 1]
    assert scene.take() == {}
    assert scene.do(Confirm("e")) is None
    counts = scene.episodes.statistics()
    assert (counts.held_timeouts, counts.timeouts, counts.unconfirmed_now) == (1, 0, 0)


@pytest.mark.parametrize(
    "limits",
    [
        {"lease": 0.0},
        {"lease": float("inf")},
        {"max_finished": 0},
        {"max_client_finished": 0},
        {"max_queued": 1.5},
        {"max_rate": 0},
        {"max_rate": 1e-320},  # its inverse is infinite
    ],
)
def test_unusable_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        EpisodeLimits(**limits)  # type: ignore[arg-type]  # on purpose


# --- ends that are confirmed, and the end of all ---


def test_an_end_is_told_when_it_was_confirmed_and_not_before() -> None:
    scene = Scene(confirm_ends=True)
    scene.start("e")
    scene.log("e", 1, 2)
    assert scene.end("e", 3) == []
    scene.take()
    assert scene.take()["e"].last  # being shown to the runner is not enough
    assert scene.episodes.unconfirmed_ids() == ["e"]
    told = scene.do(Confirm("e"))
    assert isinstance(told, SendReply)
    assert isinstance(told.reply, EpisodeEnded)
    assert scene.do(Confirm("e")) is None
    assert scene.episodes.statistics().unconfirmed_now == 0


def test_an_end_that_could_not_be_made_sure_of_is_told_as_a_failure() -> None:
    scene = Scene(confirm_ends=True)
    scene.start("e")
    scene.log("e", 1, 2)
    scene.end("e", 3)
    failed = Failed(code=FailureCode.REMOTE, message="the disk is full")
    assert refusal(scene.do(Confirm("e", failed))).endswith("the disk is full")


def test_an_end_of_which_the_runner_hears_nothing_needs_no_confirmation() -> None:
    scene = Scene(confirm_ends=True)
    scene.start("e")
    (told,) = scene.end("e", 3)
    assert isinstance(told, SendReply)


def test_a_client_that_came_back_is_told_of_the_end_that_it_asked_for_before() -> None:
    scene = Scene(confirm_ends=True)
    scene.start("e")
    scene.log("e", 1, 2)
    scene.end("e", 3)
    scene.lose()
    scene.join(B, scene.sessions[A], number=50)
    told = scene.do(Confirm("e"))
    assert isinstance(told, SendReply)
    assert told.peer == B


def test_nobody_is_told_of_a_confirmed_end_whose_session_is_over() -> None:
    scene = Scene(confirm_ends=True, lease=1.0)
    scene.start("e")
    scene.log("e", 1, 2)
    scene.end("e", 3)
    scene.lose()
    scene.tick(2.0)
    assert scene.do(Confirm("e")) is None
    assert scene.episodes.unconfirmed_ids() == []


def test_after_a_drain_open_episodes_go_on_and_none_begins() -> None:
    scene = Scene()
    scene.start("e")
    scene.all(Drain())
    assert "no more episodes" in refusal(scene.do(StartCall(A, scene.number(A), None)))
    scene.ask("e", 1)
    scene.take()
    assert action_of(scene.choose("e", 7))[2] == 7
    assert isinstance(scene.end("e", 2)[0], SendReply)


def test_the_time_from_question_to_action_is_measured() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", 1)
    scene.take()
    scene.now += 0.5
    scene.choose("e", 7)
    assert scene.episodes.latency.quantile(0.5) == pytest.approx(0.5, rel=0.02)


def test_of_so_many_episodes_as_are_asked_for_a_record_is_taken_and_the_others_come_next() -> None:
    scene = Scene()
    scene.join(A)
    for name in "abc":
        scene.start(name)
        scene.log(name, 1, 1)
        scene.log(name, 2, 1)
    taken = []
    while records := scene.episodes.collect(2)[0]:
        scene.episodes.check_invariants()
        taken.append("".join(record.episode_id for record in records))
    assert taken == ["ab", "ca", "bc"]
