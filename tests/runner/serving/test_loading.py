from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.bus.errors import ConfigError
from envbus.runner.policies.policy import FunctionPolicy, Policy, RandomPolicy
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.serving.loading import clipped, load_policies, policy_maker

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
DONE = spaces.Discrete(2)
HERE = "tests.runner.serving.test_loading"


def by_action(space: Any) -> Any:
    assert space == DONE
    return lambda observations: np.zeros(len(observations), np.int64)


def by_both(actions: Any, observations: Any) -> Any:
    assert (actions, observations) == (DONE, SEEN)
    return by_action(actions)


def by_name(observation_space: Any, *, action_space: Any = None) -> Any:
    return by_both(action_space, observation_space)


def broken(space: Any) -> Any:
    raise ArithmeticError(f"not for {space}")


def nothing(space: Any) -> None:
    del space


class Repeating(Policy):
    wanted_inputs = ("prev_actions", "t")

    def __init__(self, space: Any) -> None:
        assert space == DONE

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        raise AssertionError("it is not told what it wants")


@pytest.mark.parametrize("name", ["by_action", "by_both", "by_name"])
def test_a_factory_is_given_the_spaces_that_it_asks_for(name: str) -> None:
    assert isinstance(policy_maker(f"{HERE}:{name}")(SEEN, DONE), FunctionPolicy)


def test_a_class_of_policies_is_a_factory() -> None:
    made = policy_maker("envbus.runner.policies:MlpPolicy")(SEEN, DONE)
    assert made.compute_actions(np.zeros((2, 3), np.float32), None).actions.shape == (2,)


@pytest.mark.parametrize("text", ["random", "zero"])
def test_policies_without_a_module(text: str) -> None:
    made = policy_maker(text)(SEEN, DONE)
    assert len(made.compute_actions(np.zeros((2, 3), np.float32), None).actions) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rando", "random, zero or module:function"),
        ("no_such_module:make", "cannot import"),
        (f"{HERE}:missing", "has no 'missing'"),
        ("missing.onnx", "there is no model missing.onnx"),
        (f"{HERE}:broken", "ArithmeticError: not for Discrete"),
        (f"{HERE}:nothing", "must have compute_actions"),
        (f"{HERE}:Repeating", "wants prev_actions, t, which a server is not told"),
    ],
)
def test_mistakes_name_the_policy(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        policy_maker(text)(SEEN, DONE)


def test_one_agent_has_one_policy() -> None:
    served = load_policies(policy_maker("random"), SEEN, DONE)
    assert served.policy_of == {DUMMY_AGENT: "default_policy"}
    assert isinstance(served.by_id["default_policy"], RandomPolicy)


def test_agents_of_equal_spaces_share_a_policy() -> None:
    other = spaces.Discrete(9)
    served = load_policies(
        policy_maker("random"),
        AgentSpaces({"a": SEEN, "b": SEEN, "c": SEEN}),
        AgentSpaces({"a": DONE, "b": other, "c": DONE}),
    )
    assert served.policy_of == {"a": "a", "b": "b", "c": "a"}
    assert sorted(served.by_id) == ["a", "b"]


def test_spaces_of_many_agents_are_not_compared_one_by_one() -> None:
    compared = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal compared
        del argument
        compared += event == "call" and frame.f_code is spaces.Box.__eq__.__code__

    seen, done = (
        AgentSpaces({i: spaces.Box(-1.0, 1.0 + own * i, (1,)) for i in range(50)}) for own in (0, 1)
    )
    sys.setprofile(count)
    try:
        served = load_policies(policy_maker("zero"), seen, done)
    finally:
        sys.setprofile(None)
    assert len(served.by_id) == 50
    assert compared < 500


def test_continuous_actions_are_brought_into_their_box() -> None:
    assert clipped([[-3.0], [0.5]], spaces.Box(-1.0, 1.0, (1,))).tolist() == [[-1.0], [0.5]]
    assert clipped([5], DONE) == [5]


def test_actions_of_several_parts_are_brought_into_their_boxes() -> None:
    box = spaces.Box(-1.0, 1.0, (1,))
    space = spaces.Dict({"a": box, "b": spaces.Tuple([DONE, box])})
    found = clipped({"a": [[-3.0]], "b": ([5], [[7.0]])}, space)
    assert found["a"].tolist() == [[-1.0]]
    assert found["b"][0] == [5]
    assert found["b"][1].tolist() == [[1.0]]
    assert clipped([5], space) == [5]  # whoever checks it says what is wrong


def test_an_onnx_model_must_fit_the_spaces(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Identity", ["obs"], ["logits"])],
        "model",
        [helper.make_tensor_value_info("obs", kinds.FLOAT, ["rows", 3])],
        [helper.make_tensor_value_info("logits", kinds.FLOAT, ["rows", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file = tmp_path / "policy.onnx"
    file.write_bytes(model.SerializeToString())
    make = policy_maker(str(file))
    made = make(SEEN, spaces.Discrete(3))
    assert made.compute_actions(np.eye(3), None, explore=False).actions.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"'obs' takes rows of shape \(3,\).*has \(5,\)"):
        make(spaces.Box(-1.0, 1.0, (5,)), spaces.Discrete(3))
    with pytest.raises(ConfigError, match=r"takes 'obs'.*has \['obs.x', 'obs.y'\]"):
        make(spaces.Dict({"x": SEEN, "y": SEEN}), spaces.Discrete(3))
    with pytest.raises(ConfigError, match=r"\(3,\) numbers per row, Discrete\(2\) needs \(2,\)"):
        make(SEEN, DONE)
    file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="this is no ONNX model"):
        make(SEEN, DONE)


def test_spaces_of_agents_are_told_apart_by_their_bounds_and_not_by_texts_of_them() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "c_call" and getattr(argument, "__name__", "") == "tolist"

    low = np.arange(100, dtype=np.float32)
    seen = [spaces.Dict(a=spaces.Box(low, low + number)) for number in (1, 2, 1)]
    made = AgentSpaces(dict(enumerate(seen))), AgentSpaces(dict.fromkeys(range(3), DONE))
    sys.setprofile(count)
    try:
        served = load_policies(policy_maker("random"), *made)
    finally:
        sys.setprofile(None)
    assert served.policy_of == {0: "0", 1: "1", 2: "0"}
    assert calls == 0  # of millions of bounds they take minutes


@pytest.mark.timeout(60)
def test_a_pipe_that_took_the_place_of_a_model_is_refused_and_not_waited_for(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxruntime")
    model = tmp_path / "model.onnx"
    model.write_bytes(b"no model")
    make = policy_maker(str(model))
    with pytest.raises(ConfigError, match=r"model\.onnx: this is no ONNX model"):
        make(SEEN, DONE)
    model.unlink()
    os.mkfifo(model)
    with pytest.raises(ConfigError, match="there is no model"):
        make(SEEN, DONE)
