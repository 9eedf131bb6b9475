from __future__ import annotations

from typing import Any

import pytest

from envbus.actors.external.errors import ActionTimeoutError
from envbus.actors.external.protocol import Logged
from envbus.actors.external.verbs import Verbs
from envbus.bus.errors import PeerLostError, RequestTimeoutError
from envbus.bus.messages import Failed, FailureCode


def calls(verbs: Verbs, episode: str) -> list[Any]:
    return [
        verbs.get_action(episode, [0.0]),
        verbs.log_action(episode, [0.0], 1),
        verbs.log_returns(episode, 1.0, None, None, None),
        verbs.end_episode(episode, [0.0], False, None, None),
    ]


def test_calls_say_which_question_was_given_up_until_one_of_them_is_answered() -> None:
    verbs = Verbs(None, None, "sim")
    asked = verbs.get_action("e", [0.0])
    assert {call.not_taken for call in calls(verbs, "e")} == {None}
    with pytest.raises(ActionTimeoutError):
        verbs.result(asked, RequestTimeoutError("late", request_id=5, peer="bridge"), 5)
    with pytest.raises(PeerLostError):
        verbs.result(asked, PeerLostError("away", request_id=6, peer="bridge"), 6)
    assert {call.not_taken for call in calls(verbs, "e")} == {5}  # nor what came behind it
    assert {call.not_taken for call in calls(verbs, "another")} == {None}
    told = verbs.log_returns("e", 1.0, None, None, None)
    with pytest.raises(RequestTimeoutError):
        verbs.result(told, RequestTimeoutError("late", request_id=7, peer="bridge"), 7)
    assert verbs.result(told, Logged(), 8) is None
    assert {call.not_taken for call in calls(verbs, "e")} == {None}


def test_a_question_that_the_bridge_itself_has_ended_was_not_given_up() -> None:
    verbs = Verbs(None, None, "sim")
    failed = Failed(code=FailureCode.TIMEOUT, message="episode e: no action", peer="bridge")
    with pytest.raises(ActionTimeoutError):
        verbs.result(verbs.get_action("e", [0.0]), failed, 5)
    assert {call.not_taken for call in calls(verbs, "e")} == {None}
