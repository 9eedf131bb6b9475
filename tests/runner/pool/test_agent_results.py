from __future__ import annotations

from typing import Any

import numpy as np

from envbus.runner.pool.agent_results import DUMMY_AGENT, HeldBack, PollResult, single_record


def record(
    observations: Any, rewards: Any, terminateds: Any = (), truncateds: Any = (), over: Any = False
) -> dict[str, Any]:
    return {
        "observations": dict.fromkeys(observations, 0),
        "rewards": dict(rewards),
        "terminateds": {**dict(terminateds), "__all__": over},
        "truncateds": {**dict(truncateds), "__all__": False},
        "infos": {},
    }


def test_a_poll_result_is_a_tuple_of_six_dicts_with_more_beside_it() -> None:
    result = PollResult.of(
        {3: single_record("seen", 1.0, False, True, {"key": 1})},
        faults=[],
        late=[2],
        incarnations={3: 0},
    )
    observations, rewards, terminateds, truncateds, infos, off_policy_actions = result
    assert observations == {3: {DUMMY_AGENT: "seen"}}
    assert rewards == {3: {DUMMY_AGENT: 1.0}}
    assert terminateds == {3: {DUMMY_AGENT: False, "__all__": False}}
    assert truncateds == {3: {DUMMY_AGENT: True, "__all__": True}}
    assert infos == {3: {DUMMY_AGENT: {"key": 1}}}
    assert off_policy_actions == {}
    assert isinstance(result, tuple)
    assert (result.late, result.faults, result.incarnations) == ([2], [], {3: 0})


def test_rewards_without_an_observation_add_up_until_the_next_one() -> None:
    held = HeldBack()
    assert held.settle(record("a", {"a": 1, "b": 2}))["rewards"] == {"a": 1}
    assert held.settle(record("a", {"b": 3}))["rewards"] == {}
    assert held.settle(record("b", {"b": 4}))["rewards"] == {"b": 9}
    assert held.settle(record("b", {"b": 5}))["rewards"] == {"b": 5}


def test_rewards_without_an_observation_come_with_one_that_brings_none() -> None:
    held = HeldBack()
    held.settle(record("a", {"b": 3}))
    assert held.settle(record("b", {}))["rewards"] == {"b": 3}


def test_rewards_without_an_observation_come_with_the_end() -> None:
    held = HeldBack()
    held.settle(record("a", {"a": 1, "b": 2}))
    last = held.settle(record("a", {"a": 1, "b": 2, "c": 7}, over=True))
    assert last["rewards"] == {"a": 1, "b": 4, "c": 7}
    assert held.settle(record("b", {"b": 1}))["rewards"] == {"b": 1}


def test_flags_without_an_observation_are_or_ed() -> None:
    held = HeldBack()
    first = held.settle(record("a", {}, {"a": False, "b": True}, {"b": False}))
    assert first["terminateds"] == {"a": False, "__all__": False}
    assert first["truncateds"] == {"__all__": False}
    held.settle(record("a", {}, {"b": False}, {"b": True}))
    last = held.settle(record("b", {}, {"b": False}))
    assert last["terminateds"] == {"b": True, "__all__": False}
    assert last["truncateds"] == {"b": True, "__all__": False}
    assert held.settle(record("b", {}, {"b": False}))["terminateds"]["b"] is False


def test_flags_without_an_observation_come_with_the_end() -> None:
    held = HeldBack()
    held.settle(record("a", {}, {"b": True}))
    last = held.settle(record("", {}, {"c": False}, over=True))
    assert last["terminateds"] == {"b": True, "c": False, "__all__": True}


def test_rewards_that_are_arrays_are_added_and_left_alone() -> None:
    held = HeldBack()
    reward = np.array([1.0, 2.0])
    held.settle(record("a", {"b": reward}))
    assert held.settle(record("b", {"b": reward}))["rewards"]["b"].tolist() == [2.0, 4.0]
    assert reward.tolist() == [1.0, 2.0]
