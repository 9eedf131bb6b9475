from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import SpaceMismatchError
from envbus.bus.brief import brief
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
def test_spaces_cross_and_are_equal_there(observation: Any) -> None:
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


def test_a_client_tells_bounds_as_arrays() -> None:
    agreement = Agreement(spaces.Box(0, 255, (480, 640, 3), np.uint8), TWO)
    assert isinstance(agreement.described[0]["low"], np.ndarray)
    agreement.check_equal(Agreement.from_wire(*agreement.described))


def test_which_bounds_are_infinite_is_told_only_where_they_do_not_say_it() -> None:
    assert agreed_keys(spaces.Box(-1.0, np.inf, (2,))) == {"space", "dtype", "low", "high"}
    assert "bounded_above" in agreed_keys(spaces.Box(0, np.inf, (2,), np.int32))


def agreed_keys(space: spaces.Box) -> set[str]:
    return set(Agreement(space, TWO).wire[0])


@pytest.mark.parametrize("low", [[1.0, [1.0]], [1.0, "1.0"], [[1.0], ["1.0"]], ["1.0"]])
def test_bounds_are_numbers_of_one_depth(low: Any) -> None:
    plain = {"space": "Box", "dtype": "<f4", "low": low, "high": low}
    with pytest.raises(SpaceMismatchError, match="bounds are numbers"):
        Agreement.from_wire(plain, Agreement(BOX, TWO).wire[1])


def test_other_spaces_are_refused_with_both_printed() -> None:
    with pytest.raises(SpaceMismatchError, match=r"observation space Discrete\(2\).*Box\(-1"):
        Agreement(TWO, TWO).check_equal(Agreement(BOX, TWO))
    with pytest.raises(SpaceMismatchError, match="action space"):
        Agreement(BOX, TWO).check_equal(Agreement(BOX, BOX))
    with pytest.raises(SpaceMismatchError):
        Agreement(BOX, TWO).check_equal(Agreement({"a": BOX}, {"a": TWO}))


def test_spaces_of_different_agents_are_refused_at_the_start() -> None:
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


def test_an_agent_is_called_as_in_the_spaces_by_whatever_number_it_comes() -> None:
    agreement = Agreement({0: TWO, 1: TWO}, {0: TWO, 1: TWO})
    for value in ({0.0: 1, 1.0: 1}, {False: 1, True: 1}):
        assert list(map(type, agreement.take_observation(value, "o"))) == [int, int]


def nested(depth: int) -> Any:
    plain: Any = {"space": "Discrete", "dtype": "<i8", "n": 2, "start": 0}
    for _ in range(depth):
        plain = {"space": "Tuple", "items": [plain]}
    return plain


def sequences(depth: int) -> Any:
    plain: Any = {"space": "Discrete", "dtype": "<i8", "n": 2, "start": 0}
    for _ in range(depth):
        plain = {"space": "Sequence", "item": plain, "stack": False}
    return plain


def box(**changes: Any) -> dict[str, Any]:
    return {"space": "Box", "dtype": "<f4", "low": [-1.0], "high": [1.0], **changes}


@pytest.mark.parametrize(
    "plain",
    [
        nested(5000),
        box(low=np.ndarray((2**31,), "S0", b"")),
        box(low=np.ndarray((2**31,), "S0", b""), high=np.ndarray((2**31,), "S0", b"")),
        box(dtype="<U100000000"),
        box(dtype="|S0"),
        box(dtype="O"),
        box(dtype=["<f4"] * 3),
        box(dtype="f4," * 1000),
        box(low=["x" * 20_000] * 100),
        box(low=[float("nan")]),
        box(dtype="<f4", high=[1e300]),
        box(dtype="|u1", low=[-1], high=[300]),
        box(bounded_below=[True] * 3),
        box(low=[[1]] * 3),
        {"space": "MultiBinary", "shape": [2**40], "flat": True},
        {"space": "MultiBinary", "shape": [2**20, 2**20], "flat": False},
        {"space": "MultiBinary", "shape": [0, 2**62], "flat": False},
        {"space": "Text", "max_length": 2**62, "min_length": 1, "characters": "a"},
        {"space": "Text", "max_length": 3, "min_length": 1, "characters": [[]] * 3},
        {"space": "Discrete", "dtype": "<i8", "n": 2**63 - 1, "start": 2**63 - 1},
        {"space": "Discrete", "dtype": "|u1", "n": 300, "start": 0},
        {"space": "Discrete", "dtype": "<i8", "n": 1e308, "start": 0},
        {"space": "MultiDiscrete", "dtype": "|i1", "nvec": [200], "start": [0]},
        {"space": "MultiDiscrete", "dtype": "|i1", "nvec": [100], "start": [100]},
        {"space": "MultiDiscrete", "dtype": "<i8", "nvec": "9" * 5000, "start": [0]},
        {"space": "Dict", "items": [[[], nested(0)]], "sort_keys": True},
        {"space": "Dict", "items": {"a": 1}, "sort_keys": True},
        {"space": "Graph", "node": nested(0), "edge": 3},
        {"space": "AgentSpaces", "distinct": [nested(0)], "agents": [["x", 2**70]]},
        {"space": "AgentSpaces", "distinct": [nested(0)], "agents": [["x", 0]]},
        {"space": "Text", "max_length": 2**22, "min_length": 1, "characters": "a"},
        {"space": "Text", "max_length": 3, "min_length": 1, "characters": "a" * 200_000},
        [{"characters": "a" * 50_000}] * 3,
        {"space": "Tuple", "items": [{"space": "MultiBinary", "shape": [2**23], "flat": True}] * 9},
        {i: {"space": "MultiBinary", "shape": [2**23], "flat": True} for i in range(9)},
        {
            "space": "Sequence",
            "item": {"space": "MultiBinary", "shape": [2**23], "flat": True},
            "stack": False,
        },
        sequences(12),
        box(low=np.zeros((2**20, 0), np.float32), high=np.zeros((2**20, 0), np.float32)),
        box(low=np.zeros((2**9, 2**9, 0)), high=np.zeros((2**9, 2**9, 0))),
        {f"a{i}": nested(0) for i in range(2000)},
        {"space": "Tuple", "items": [nested(0)] * 5000},
        {"__all__": nested(0)},
        {1.5: nested(0)},
        {None: nested(0)},
        {True: nested(0)},
    ],
    ids=lambda plain: brief(plain)[:50],
)
def test_spaces_that_nobody_means_are_refused_without_being_built(plain: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SpaceMismatchError, match="cannot be read") as caught:
            Agreement.from_wire(plain, plain)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000


def test_spaces_as_deep_as_anybody_needs_are_taken() -> None:
    space: spaces.Space[Any] = TWO
    for _ in range(12):
        space = spaces.Dict(a=spaces.Tuple([space]))
    agreement = Agreement(space, TWO)
    agreement.check_equal(over_the_wire(agreement))


@pytest.mark.parametrize(
    "space",
    [spaces.MultiBinary(2**23), spaces.Text(2**19), spaces.Sequence(spaces.Sequence(BOX))],
    ids=str,
)
def test_spaces_as_large_as_anybody_needs_are_taken(space: spaces.Space[Any]) -> None:
    agreement = Agreement(space, TWO)
    agreement.check_equal(over_the_wire(agreement))


def test_spaces_that_differ_are_told_without_all_their_bounds() -> None:
    bounds = np.arange(2**12, dtype=np.float32).reshape((2,) * 12)  # NumPy would show each of them
    theirs = Agreement(spaces.Tuple([spaces.Box(bounds - 1.0, bounds)] * 3), TWO)
    with pytest.raises(SpaceMismatchError, match=r"this client has Tuple\(Box\(shape \(2, 2"):
        Agreement(BOX, TWO).check_equal(theirs)


@pytest.mark.parametrize("agent", ["x" * 257, "a\nb"], ids=["long", "control"])
def test_ids_of_agents_that_are_told_are_short_and_printable(agent: str) -> None:
    wire = Agreement({agent: BOX}, {agent: TWO}).wire
    with pytest.raises(SpaceMismatchError, match="an agent's id has at most 256 characters"):
        Agreement.from_wire(*wire)
    assert over_the_wire(Agreement({"x" * 256: BOX}, {"x" * 256: TWO})).agents == ["x" * 256]
