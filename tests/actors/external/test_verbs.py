from __future__ import annotations

from typing import Any

import pytest
from gymnasium.spaces import Discrete
from msgspec import structs

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import (
    ActionTimeoutError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RequestIdUsedError,
)
from envbus.actors.external.protocol import (
    BridgeJoined,
    EndEpisode,
    FragmentStep,
    GetAction,
    LogAction,
    LogFragment,
    Logged,
    LogReturns,
)
from envbus.actors.external.verbs import ClientState
from envbus.bus.errors import EncodeError, PeerLostError, RequestTimeoutError
from envbus.bus.wire.codec import decode
from envbus.bus.wire.messages import Failed, FailureCode


def calls(state: ClientState, episode: str) -> list[Any]:
    requests: list[Any] = [
        GetAction(episode_id=episode, observation=[0.0]),
        LogAction(episode_id=episode, observation=[0.0], action=1),
        LogReturns(episode_id=episode, reward=1.0),
        EndEpisode(episode_id=episode, observation=[0.0]),
    ]
    return [state.prepared(request) for request in requests]


def joins(*episodes: str) -> BridgeJoined:
    observation_space, action_space = Agreement(Discrete(2), Discrete(2)).wire
    return BridgeJoined(
        observation_space=observation_space,
        action_space=action_space,
        multi_agent=False,
        policy_ids=["p"],
        lease=1.0,
        session="s",
        inference=[],
        episodes=list(episodes),
    )


def test_calls_say_which_question_was_given_up_until_one_of_them_is_answered() -> None:
    state = ClientState(None, None, "sim")
    asked = calls(state, "e")[0]
    assert {call.not_taken for call in calls(state, "e")} == {None}
    with pytest.raises(ActionTimeoutError):
        state.result(asked, RequestTimeoutError("late", request_id=5, peer="bridge"), 5)
    with pytest.raises(PeerLostError):
        state.result(asked, PeerLostError("away", request_id=6, peer="bridge"), 6)
    assert {call.not_taken for call in calls(state, "e")} == {5}  # nor what came behind it
    assert {call.not_taken for call in calls(state, "another")} == {None}
    told = calls(state, "e")[2]
    with pytest.raises(RequestTimeoutError):
        state.result(told, RequestTimeoutError("late", request_id=7, peer="bridge"), 7)
    assert state.result(told, Logged(), 8) is None
    assert {call.not_taken for call in calls(state, "e")} == {None}


def test_calls_say_which_call_may_never_have_come_until_one_of_them_is_answered() -> None:
    state = ClientState(None, None, "sim")
    ask, log, reward, _ = calls(state, "e")
    for number, call in enumerate((log, reward, ask, reward, ask, log), 5):
        with pytest.raises(PeerLostError):
            state.result(call, PeerLostError("away", request_id=number, peer="bridge"), number)
        assert {call.given_up for call in calls(state, "e")} == {number}
    assert {call.not_taken for call in calls(state, "e")} == {7}
    state.result(reward, Logged(), 11)
    assert {(call.not_taken, call.given_up) for call in calls(state, "e")} == {(None, None)}


def test_a_question_that_the_bridge_itself_has_ended_was_not_given_up() -> None:
    state = ClientState(None, None, "sim")
    failed = Failed(code=FailureCode.TIMEOUT, message="episode e: no action", peer="bridge")
    with pytest.raises(ActionTimeoutError):
        state.result(calls(state, "e")[0], failed, 5)
    assert {call.not_taken for call in calls(state, "e")} == {None}


def test_an_object_in_an_info_crosses_as_a_placeholder_in_a_fragment_too() -> None:
    state = ClientState(None, None, "sim")
    info = to_wire({"lock": object()})
    told = decode(LogReturns, state.encoded(LogReturns(episode_id="e", reward=1.0, info=info)))
    step = FragmentStep(reward=1.0, info=info)
    sent = LogFragment(episode_id="e", policy_id="p", first=0, steps=[step])
    assert decode(LogFragment, state.encoded(sent)).steps[0].info == told.info
    with pytest.raises(EncodeError, match=r"steps\[0\].action"):
        state.encoded(structs.replace(sent, steps=[FragmentStep(action=to_wire(object()))]))


def test_a_question_whose_answer_is_forgotten_was_given_up() -> None:
    state = ClientState(None, None, "sim")
    with pytest.raises(RequestIdUsedError):
        state.result(calls(state, "e")[0], RequestIdUsedError("5 came before").failed(), 5)
    assert {call.not_taken for call in calls(state, "e")} == {5}


def test_what_another_bridge_does_not_know_of_what_was_asked_before_it_was_joined_is_lost() -> None:
    state, joined = ClientState(None, None, "sim"), joins("e")
    state.on_joined(joined)
    asked = calls(state, "e") + calls(state, "unknown")
    state.on_joined(structs.replace(joined, episodes=[]))
    unknown = Failed(code=FailureCode.REMOTE, remote_type="EpisodeNotFound", message="not found")
    for request in asked:
        error = EpisodeLostError if request.episode_id == "e" else EpisodeNotFoundError
        with pytest.raises(error):
            state.result(request, unknown, 5)


def test_an_episode_that_has_ended_though_its_end_was_not_answered_in_time_is_not_lost() -> None:
    state = ClientState(None, None, "sim")
    state.on_joined(joins("e"))
    end = calls(state, "e")[-1]
    with pytest.raises(RequestTimeoutError):
        state.result(end, Failed(code=FailureCode.TIMEOUT, message="late"), 5)
    with pytest.raises(EpisodeFinishedError):
        state.result(end, EpisodeFinishedError("it has completed").failed(), 6)
    state.on_joined(joins())
    state.check_open("e")
