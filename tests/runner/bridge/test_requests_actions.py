"""Actions of the runner, before the rules hear of them."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import SpaceMismatchError
from envbus.runner.bridge.requests import checked, told
from envbus.runner.bridge.vocabulary import Chosen, GiveUp

SPACE = spaces.Discrete(3)
ONE = Agreement(SPACE, SPACE)
TWO = Agreement({"a": SPACE, "b": SPACE}, {"a": SPACE, "b": SPACE})


def test_actions_become_events_in_their_order() -> None:
    waiting = {"e": ["agent0"], "f": None, "g": ["agent0"]}
    actions = {"g": {"agent0": np.int64(2)}, "f": {"agent0": 1}, "e": {"agent0": 0, "other": 9}}
    events, error = checked(actions, waiting.get, ONE, 7)
    assert error is None
    assert events == [
        Chosen("g", {"agent0": 2}, 7),
        Chosen("f", {}, 7),
        Chosen("e", {"agent0": 0}, 7),
    ]


def test_an_action_that_is_missing_stops_all_of_them() -> None:
    with pytest.raises(ValueError, match="episode e: no action for b"):
        checked({"e": {"a": 1}}, {"e": ["a", "b"]}.get, TWO, 0)


def test_only_agents_that_are_awaited_act() -> None:
    events, _ = checked({"e": {"a": 1, "b": 2}}, {"e": ["b"]}.get, TWO, 0)
    assert events == [Chosen("e", {"b": 2}, 0)]


def test_an_action_outside_its_space_is_told_and_others_are_not_held_up() -> None:
    waiting = {"e": ["agent0"], "f": ["agent0"]}
    events, error = checked({"e": {"agent0": 3}, "f": {"agent0": 1}}, waiting.get, ONE, 0)
    assert isinstance(error, SpaceMismatchError)
    assert events == [GiveUp("e", told(error)), Chosen("f", {"agent0": 1}, 0)]
    assert "action for episode e" in told(error).message


def test_what_a_policy_raised_is_told_by_its_type() -> None:
    failed = told(ZeroDivisionError("no"))
    assert (failed.remote_type, failed.peer) == ("builtins.ZeroDivisionError", "bridge")
    assert "no" in failed.message


def test_actions_stay_what_they_are_whatever_a_policy_writes_into_its_arrays() -> None:
    box = spaces.Box(-1.0, 1.0, (2, 50), np.float32)
    parts = spaces.Dict({"a": box, "b": spaces.Tuple([box])})
    batch = np.ones((4, 2, 50), np.float32)
    actions = {"e": {"agent0": {"a": batch[1], "b": (batch[2],)}}}
    agreement = Agreement(spaces.Discrete(2), parts)
    ((chosen,), _) = checked(actions, {"e": ["agent0"]}.get, agreement, 0)
    batch[:] = 0.0
    assert isinstance(chosen, Chosen)
    action = chosen.action["agent0"]
    for array in (action["a"], action["b"][0]):
        assert (array == 1.0).all()
        assert array.base is None  # or all of the batch would be kept
