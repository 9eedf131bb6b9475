from __future__ import annotations

from typing import Any

import pytest

from envbus.actors.external.errors import ActionTimeoutError
from envbus.actors.external.protocol import EndEpisode, GetAction, LogAction, Logged, LogReturns
from envbus.actors.external.verbs import ClientState
from envbus.bus.errors import PeerLostError, RequestTimeoutError
from envbus.bus.wire.messages import Failed, FailureCode


def calls(state: ClientState, episode: str) -> list[Any]:
    requests: list[Any] = [
        GetAction(episode_id=episode, observation=[0.0]),
        LogAction(episode_id=episode, observation=[0.0], action=1),
        LogReturns(episode_id=episode, reward=1.0),
        EndEpisode(episode_id=episode, observation=[0.0]),
    ]
    return [state.prepared(request) for request in requests]


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


def test_a_question_that_the_bridge_itself_has_ended_was_not_given_up() -> None:
    state = ClientState(None, None, "sim")
    failed = Failed(code=FailureCode.TIMEOUT, message="episode e: no action", peer="bridge")
    with pytest.raises(ActionTimeoutError):
        state.result(calls(state, "e")[0], failed, 5)
    assert {call.not_taken for call in calls(state, "e")} == {None}
