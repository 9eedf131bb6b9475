from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.local_policy import LocalPolicy, LocalSettings
from envbus.actors.external.protocol import Model
from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Tree

BOX, MANY = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(100)


class Counting:
    """Acts by its weight and by how often it was asked in the episode."""

    def __init__(self) -> None:
        self.weight = 0

    def initial_state(self) -> Any:
        return np.zeros(1, np.float32)

    def set_weights(self, weights: Any, version: int) -> None:
        self.weight = int(weights["w"])

    def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
        after = states + 1
        return SimpleNamespace(
            actions=(self.weight + after[:, 0]).astype(np.int64),
            states=after,
            extras={"vf_preds": observations[:, 0]},
        )


def model(version: int, **weights: Any) -> Model:
    return Model(policy_id="p", version=version, weights=weights)


def test_states_belong_to_episodes_and_begin_anew_in_each() -> None:
    policy = LocalPolicy(Counting(), BOX, MANY)
    policy.take(model(3, w=10))
    one = np.array([0.5], np.float32)
    acted = [policy.answer(episode, one, {}) for episode in ("a", "b", "a")]
    assert [int(each.action) for each in acted] == [11, 11, 12]
    assert acted[2].extras == {"vf_preds": 0.5, "state_in": [1.0], "state_out": [2.0]}
    policy.end("a")
    assert int(policy.answer("a", one, {}).action) == 11


class Careless(Counting):
    """Counts in the array that it was told, and hands out its own first state."""

    first = np.zeros(1, np.float32)

    def initial_state(self) -> Any:
        return self.first

    def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
        states += 1
        actions = (self.weight + states[:, 0]).astype(np.int64)
        return SimpleNamespace(actions=actions, states=states, extras={"vf_preds": states[:, 0]})


def test_a_policy_that_writes_to_its_states_writes_to_no_row_and_to_no_first_state() -> None:
    policy = LocalPolicy(Careless(), BOX, MANY)
    policy.take(model(3, w=10))
    one = np.array([0.5], np.float32)
    acted = [policy.answer(episode, one, {}) for episode in ("a", "b", "a")]
    assert [int(each.action) for each in acted] == [11, 11, 12]
    assert acted[2].extras == {"vf_preds": 2.0, "state_in": [1.0], "state_out": [2.0]}


def test_versions_and_the_steps_chosen_by_them_go_together() -> None:
    policy = LocalPolicy(Counting(), BOX, MANY)
    assert policy.version == -1
    assert policy.take(model(3, w=10))
    assert not policy.take(Model(policy_id="p", version=3))
    assert policy.answer("e", np.zeros(1), {}).policy_version == 3
    assert policy.take(Model(policy_id="p", version=1, weights=Tree({"w": 20})))
    assert policy.answer("e", np.zeros(1), {}).policy_version == 1


def test_agents_that_are_done_are_not_asked() -> None:
    both = Agreement({"x": BOX, "y": BOX}, {"x": MANY, "y": MANY})
    policy = LocalPolicy(Counting(), both.observation_space, both.action_space)
    policy.take(model(0, w=0))
    answered = policy.answer("e", {"x": np.zeros(1), "y": np.ones(1)}, {"y": True})
    assert answered.action == {"x": 1}
    assert answered.extras.keys() == {"x"}


def test_a_function_makes_the_policy_of_the_first_weights() -> None:
    made = []

    def factory(*given: Any) -> Any:
        made.append(given)
        return Counting()

    policy = LocalPolicy(factory, BOX, MANY)
    policy.take(Model(policy_id="p", version=0, weights={"w": 5}))
    policy.take(model(1, w=6))
    assert made == [(BOX, MANY, {"w": 5})]
    assert int(policy.answer("e", np.zeros(1), {}).action) == 7


def test_a_class_of_policies_is_a_function_that_makes_one() -> None:
    class Weighed(Counting):
        def __init__(self, *given: Any) -> None:
            super().__init__()
            self.given = given

        def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
            assert self.given == (BOX, MANY, {"w": 5})
            return super().compute_actions(observations, states, explore=explore)

    policy = LocalPolicy(Weighed, BOX, MANY)
    policy.take(model(0, w=5))
    assert int(policy.answer("e", np.zeros(1), {}).action) == 6


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute_actions"):
        LocalPolicy(5, BOX, MANY)
    with pytest.raises(ConfigError, match="returned 5"):
        LocalPolicy(lambda *_: 5, BOX, MANY).take(model(0))
    with pytest.raises(ConfigError, match="fragment_length"):
        LocalSettings(fragment_length=0)
