from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.policies.policy import (
    FunctionPolicy,
    Policy,
    TwoStepPolicy,
    check_has_no_inputs,
    inputs_of,
)
from envbus.runner.policies.policy_map import PolicyMap, check_state


class Keeps(Policy):
    def __init__(self, weights: int) -> None:
        self.weights = weights

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        raise AssertionError

    def get_weights(self) -> Any:
        return {"w": self.weights}

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        self.weights = weights["w"]
        super().set_weights(weights, version)


def test_one_policy_has_a_name_and_a_function_becomes_one() -> None:
    policies = PolicyMap(lambda seen: seen)
    assert list(policies.by_id) == ["default_policy"]
    assert isinstance(policies["default_policy"], FunctionPolicy)
    for odd, message in (({}, "at least one policy"), ({"a": 1}, "policy 'a' must have compute")):
        with pytest.raises(ConfigError, match=message):
            PolicyMap(odd)  # type: ignore[arg-type]


def test_who_kept_the_policies_keeps_those_that_there_were() -> None:
    policies = PolicyMap({"a": Keeps(1)})
    before = policies.by_id
    policies.put("b", Keeps(2))
    policies.remove("a")
    assert (list(before), list(policies.by_id)) == (["a"], ["b"])
    with pytest.raises(ConfigError, match=r"no policy 'a'; there are \['b'\]"):
        policies.remove("a")
    with pytest.raises(ConfigError, match="'b' is the last one"):
        policies.remove("b")


@pytest.mark.parametrize("odd", [5, "a"])
def test_what_is_no_list_of_ids_is_refused_by_name(odd: Any) -> None:
    with pytest.raises(ConfigError, match=f"policy_ids are a list .* not {odd!r}"):
        PolicyMap({"a": Keeps(1)}).get_weights(odd)


def test_a_version_of_weights_that_is_no_number_is_refused() -> None:
    policies = PolicyMap({"a": Keeps(1)})
    for odd in ("3", 1.5, True):
        with pytest.raises(ConfigError, match="version must be a whole number or None"):
            policies.set_weights({"a": {"w": 2}}, odd)  # type: ignore[arg-type]
    policies.set_weights({"a": {"w": 2}}, np.int64(3))  # type: ignore[arg-type]
    assert policies["a"].policy_version == 3


def test_policies_that_replace_others_have_the_next_version() -> None:
    policies = PolicyMap({"a": Keeps(1)})
    policies.set_weights({"a": {"w": 2}}, version=6)
    policies.replace({"a": Keeps(3), "b": Keeps(4)})
    assert [policy.policy_version for policy in policies.by_id.values()] == [7, 0]


def test_weights_and_state_go_over_or_nothing_does() -> None:
    one, other = PolicyMap({"a": Keeps(1), "b": Keeps(2)}), PolicyMap({"a": Keeps(0)})
    one.set_weights({"b": {"w": 5}}, version=9)
    assert one.get_weights(["b"]) == {"b": {"w": 5}}
    with pytest.raises(ConfigError, match="no policy 'b'"):
        other.set_state(one.get_state())
    with pytest.raises(ConfigError, match="no policy 'b'"):
        other.set_weights(one.get_weights())
    assert other.get_weights() == {"a": {"w": 0}}
    other.put("b", Keeps(0))
    other.set_state(one.get_state())
    assert other.get_state() == {"a": ({"w": 1}, 0), "b": ({"w": 5}, 9)}


class Module:
    """Has what PyTorch's modules are known by."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def forward(self, seen: Any) -> Any:
        return seen

    __call__ = forward


def test_a_bare_module_of_pytorch_is_told_which_class_makes_it_a_policy() -> None:
    with pytest.raises(ConfigError, match=r"'default_policy' is a PyTorch module.*TorchPolicy\("):
        PolicyMap(Module())


class Refuses(Keeps):
    """Has half of its weights when it refuses them."""

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        super().set_weights(weights, version)
        if weights["w"] < 0:
            raise ValueError("negative")


def test_a_state_that_one_policy_refuses_is_taken_over_by_none() -> None:
    policies = PolicyMap({"a": Keeps(1), "b": Refuses(2), "c": Keeps(3)})
    before = policies.get_state()
    with pytest.raises(ValueError, match="negative"):
        policies.set_state({"a": ({"w": 7}, 7), "b": ({"w": -1}, 8), "c": ({"w": 9}, 9)})
    assert policies.get_state() == before


@pytest.mark.parametrize("odd", [5, None, ({"w": 1},), ({"w": 1}, "six"), ({"w": 1}, 1.5), (5, 1)])
def test_a_state_that_is_no_weights_with_a_version_is_refused_by_name(odd: Any) -> None:
    policies = PolicyMap({"a": Keeps(1), "b": Keeps(2)})
    before = policies.get_state()
    with pytest.raises(ConfigError, match=r"of (policy )?'b'"):
        policies.set_state({"a": ({"w": 9}, 9), "b": odd})
    assert policies.get_state() == before


def test_what_lacks_a_part_of_a_policy_is_refused_at_once() -> None:
    class Half:
        def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
            raise AssertionError

        def get_weights(self) -> Any:
            return {}

    with pytest.raises(ConfigError, match="'a' has no initial_state, set_weights, policy_version"):
        PolicyMap({"a": Half()})  # type: ignore[dict-item]  # on purpose


@pytest.mark.parametrize("part", ["policies", "connectors", "metrics"])
@pytest.mark.parametrize("damaged", [None, 5, [1]])
def test_a_damaged_part_of_a_state_is_named(part: str, damaged: object) -> None:
    state = {"policies": {}, "connectors": {}, "metrics": {}, "num_samples": 0, part: damaged}
    with pytest.raises(ConfigError, match=f"the state's '{part}' are by name"):
        check_state(state, *state)


@pytest.mark.parametrize("odd", ["t", ("t", "time"), 5, (["t"],)])
def test_inputs_that_there_are_not_are_refused_by_the_policys_name(odd: Any) -> None:
    policy: Any = Keeps(1)
    policy.wanted_inputs = odd
    with pytest.raises(ConfigError, match=r"policy 'a' has wanted_inputs=.* among prev_actions, "):
        PolicyMap({"a": policy})
    policy.wanted_inputs = ("t",)
    assert inputs_of("a", PolicyMap({"a": policy})["a"]) == ("t",)


class Elsewhere(Keeps, TwoStepPolicy):
    wanted_inputs = ("prev_rewards", "t")


def test_a_policy_that_works_elsewhere_is_told_no_inputs() -> None:
    with pytest.raises(ConfigError, match="'a' wants prev_rewards, t, which a policy that works"):
        PolicyMap({"a": Elsewhere(1)})
    with pytest.raises(ConfigError, match="which a server is not told: an EnvRunner tells them"):
        check_has_no_inputs("a", Elsewhere(1), "a server")
    check_has_no_inputs("a", Keeps(1), "a server")
