from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.runner.bridge.results import acting
from envbus.runner.policies.policy import FunctionPolicy, Policy, PolicyOutput
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.serving.answering import Chooser, ObservingAgent
from envbus.runner.serving.loading import ServedPolicies

SEEN = spaces.Box(-9.0, 9.0, (1,), np.float32)
PAIR = (SEEN, spaces.Discrete(1000))


def served(policy: Any) -> ServedPolicies:
    return ServedPolicies({"p": policy}, {DUMMY_AGENT: "p"}, {DUMMY_AGENT: PAIR})


def asked(episode_id: str, number: float, agent: Any = DUMMY_AGENT) -> ObservingAgent:
    return ObservingAgent(episode_id, agent, np.array([number], np.float32))


class Counting(Policy):
    """Its state counts the calls of each row."""

    def initial_state(self) -> Any:
        return np.int64(0)

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        return PolicyOutput(states * 10 + int(explore), states + 1)


def test_many_episodes_are_one_call() -> None:
    calls = []

    def policy(observations: Any) -> Any:
        calls.append(len(observations))
        return observations[:, 0].astype(np.int64)

    chooser = Chooser(served(FunctionPolicy(policy)), explore=False)
    (batch,) = chooser.choose([asked(f"e{i}", i) for i in range(5)])
    assert calls == [5]
    assert [batch.action(i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert chooser.choose([]) == []


def test_actions_of_a_fixed_size_are_clipped_also_where_observations_have_none() -> None:
    space = spaces.Tuple([spaces.Discrete(9), spaces.Box(-1.0, 1.0, (1,), np.float32)])
    pair = (spaces.Text(9), space)
    policy = FunctionPolicy(lambda seen: (np.arange(len(seen)), np.array([[2.0]] * len(seen))))
    policies = ServedPolicies({"p": policy}, {DUMMY_AGENT: "p"}, {DUMMY_AGENT: pair})
    rows = [ObservingAgent(name, DUMMY_AGENT, "abc") for name in "ab"]
    (batch,) = Chooser(policies, explore=False).choose(rows)
    assert [batch.action(i) for i in range(2)] == [(0, [1.0]), (1, [1.0])]


def test_recurrent_state_is_kept_by_episode_and_forgotten_with_it() -> None:
    chooser = Chooser(served(Counting()), explore=True)
    chooser.choose([asked("a", 0)])
    (batch,) = chooser.choose([asked("b", 0), asked("a", 0)])
    assert batch.actions.tolist() == [1, 11]
    chooser.forget("a")
    (batch,) = chooser.choose([asked("b", 0), asked("a", 0)])
    assert batch.actions.tolist() == [11, 1]


class UsesItsArrayAgain(Policy):
    """Its state counts, in an array that it returns each time."""

    def __init__(self) -> None:
        self.states = np.zeros((8, 1), np.int64)

    def initial_state(self) -> Any:
        return np.zeros(1, np.int64)

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        self.states[...] = 99
        after = self.states[: len(states)]
        np.add(states, 1, out=after)
        return PolicyOutput(states[:, 0], after)


def test_an_array_that_a_policy_uses_again_changes_nobodys_state() -> None:
    chooser = Chooser(served(UsesItsArrayAgain()), explore=True)
    chooser.choose([asked("a", 0), asked("b", 0)])
    for number in range(1, 4):
        for episode_id in "ab":
            (batch,) = chooser.choose([asked(episode_id, 0)])
            assert batch.actions.tolist() == [number]


def test_each_policy_is_called_once_for_its_agents() -> None:
    plus = ServedPolicies(
        {"p": FunctionPolicy(lambda o: np.full(len(o), 1)), "q": FunctionPolicy(lambda o: [2])},
        {"x": "p", "y": "q", "z": "p"},
        dict.fromkeys("xyz", PAIR),
    )
    batches = Chooser(plus, explore=False).choose([asked("e", 0, agent) for agent in "xyz"])
    assert [(b.policy_id, [one.agent for one in b.rows]) for b in batches] == [
        ("p", ["x", "z"]),
        ("q", ["y"]),
    ]


@pytest.mark.parametrize("result", [[1, 2, 3], None, []])
def test_a_policy_that_fails_is_told_of_and_not_raised(result: Any) -> None:
    def policy(observations: Any) -> Any:
        del observations
        if result is None:
            raise ArithmeticError("no")
        return np.array(result)

    (batch,) = Chooser(served(FunctionPolicy(policy)), explore=False).choose([asked("e", 1)])
    assert isinstance(batch.error, ArithmeticError if result is None else ValueError)


def test_agents_that_are_done_are_not_asked() -> None:
    assert acting({"x": 1, "y": 2, "z": 3}, {"x": True}, {"z": True, "y": False}) == ["y"]


def test_an_observation_that_the_policy_cannot_take_fails_its_own_episode() -> None:
    def policy(observations: Any) -> Any:
        if (observations < 0.0).any():
            raise ArithmeticError("below zero")
        return observations[:, 0].astype(np.int64)

    chooser = Chooser(served(FunctionPolicy(policy)), explore=False)
    batches = chooser.choose([asked("a", 1), asked("b", -1), asked("c", 3)])
    assert [one.rows[0].episode_id for one in batches] == ["a", "b", "c"]
    assert isinstance(batches[1].error, ArithmeticError)
    assert [batches[0].action(0), batches[2].action(0)] == [1, 3]
