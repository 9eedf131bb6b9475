from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import SpaceMismatchError
from envbus.bus.errors import ConfigError

BOX, TWO = spaces.Box(-1.0, np.inf, (2,)), spaces.Discrete(2)


def over_the_wire(agreement: Agreement) -> Agreement:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(agreement.wire))
    return Agreement.from_wire(*sent)


@pytest.mark.parametrize(
    "observation",
    [
        BOX,
        spaces.Box(0, 255, (2, 3), np.uint8),
        spaces.Dict(b=BOX, a=spaces.Tuple([TWO, spaces.Text(3)])),
        spaces.Graph(BOX, None),
        {"x": BOX, "y": TWO},
        {1: BOX},
        {"space": BOX},
    ],
    ids=str,
)
def test_x_22_spaces_cross_and_are_equal_there(observation: Any) -> None:
    action = dict.fromkeys(observation, TWO) if type(observation) is dict else TWO
    agreement = Agreement(observation, action)
    theirs = over_the_wire(agreement)
    agreement.check_equal(theirs)
    assert theirs.multi_agent is agreement.multi_agent
    assert theirs.agents == agreement.agents


def test_the_state_of_random_generators_stays_here() -> None:
    space = spaces.Box(-1.0, 1.0, (2,), seed=3)
    space.sample()
    assert "random" not in str(Agreement(space, TWO).wire)


def test_a_box_may_be_told_by_its_bounds_alone() -> None:
    plain = {"space": "Box", "dtype": "<f4", "low": [-1.0, -1.0], "high": [1.0, 1.0]}
    discrete = {"space": "Discrete", "dtype": "<i8", "n": 2, "start": 0}
    theirs = Agreement.from_wire(plain, discrete)
    Agreement(spaces.Box(-1.0, 1.0, (2,)), TWO).check_equal(theirs)


def test_x_22_other_spaces_are_refused_with_both_printed() -> None:
    with pytest.raises(SpaceMismatchError, match=r"observation space Discrete\(2\).*Box\(-1"):
        Agreement(TWO, TWO).check_equal(Agreement(BOX, TWO))
    with pytest.raises(SpaceMismatchError, match="action space"):
        Agreement(BOX, TWO).check_equal(Agreement(BOX, BOX))
    with pytest.raises(SpaceMismatchError):
        Agreement(BOX, TWO).check_equal(Agreement({"a": BOX}, {"a": TWO}))


def test_x_20_spaces_of_different_agents_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"\['a'\].*\['b'\]"):
        Agreement({"a": BOX}, {"b": TWO})
    with pytest.raises(ConfigError, match="by agent"):
        Agreement({"a": BOX}, TWO)


@pytest.mark.parametrize("space", [3, {}, {"a": 3}, None])
def test_what_is_no_space_is_refused(space: Any) -> None:
    with pytest.raises(ConfigError):
        Agreement(space, TWO)


def test_a_space_of_ones_own_class_has_no_form() -> None:
    class Mine(spaces.Discrete):
        pass

    with pytest.raises(ConfigError, match="no form on the wire"):
        Agreement(BOX, Mine(2))


@pytest.mark.parametrize(
    "plain", [3, {"space": "No"}, {"space": "Box"}, {"a": 3}, [], {"space": "Discrete", "n": "x"}]
)
def test_what_describes_no_space_is_refused(plain: Any) -> None:
    with pytest.raises(SpaceMismatchError, match="cannot be read"):
        Agreement.from_wire(plain, plain)


def test_agents_are_taken_as_they_come_and_strange_ones_are_refused() -> None:
    agreement = Agreement({"x": BOX, "y": TWO}, {"x": TWO, "y": TWO})
    assert agreement.take_observation({}, "o") == {}
    assert agreement.take_observation({"y": 1}, "o") == {"y": 1}
    with pytest.raises(SpaceMismatchError, match="no agent 'z'; the agents are x, y"):
        agreement.take_observation({"z": 1}, "o")
    with pytest.raises(SpaceMismatchError, match="a map by agent"):
        agreement.take_observation([1], "o")
    with pytest.raises(SpaceMismatchError, match=r"o\['y'\]"):
        agreement.take_observation({"y": 2}, "o")
