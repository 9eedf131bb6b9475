"""Elements of spaces over the wire."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.elements import taker, to_wire
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import GetAction
from envbus.bus.codec import decode, encode
from envbus.bus.messages import Tree
from tests.bus.codec_samples import identical

SPACES = [
    spaces.Box(-1.0, 1.0, (3,)),
    spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-1.0, 1.0, (), np.float16),
    spaces.Box(-1.0, 1.0, (0, 3)),
    spaces.Discrete(5, start=-2),
    spaces.Discrete(3, dtype=np.int32),
    spaces.MultiDiscrete([3, 4], start=np.array([1, -1])),
    spaces.MultiDiscrete(np.array([[2, 2], [3, 3]]), dtype=np.int8),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 2]),
    spaces.Text(8),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0.0, 1.0, (2,))),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Box(0.0, 1.0, (100,)))]),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,))]),
    spaces.Sequence(spaces.Box(0.0, 1.0, (2,))),
]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_an_element_comes_back_as_it_was(space: spaces.Space[Any], plain: bool) -> None:
    space.seed(3)
    take = taker(space)
    for _ in range(5):
        element = space.sample()
        frames = encode(GetAction(episode_id="e", observation=to_wire(element, plain=plain)))
        came = take(decode(GetAction, frames, writable=True).observation, "it")
        assert came in space
        assert identical(came, element)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_plain_has_no_ext_types(space: spaces.Space[Any]) -> None:
    frames = encode(GetAction(episode_id="e", observation=to_wire(space.sample(), plain=True)))
    assert len(frames) == 1

    def no_ext(code: int, _data: bytes) -> None:
        raise AssertionError(f"ext type {code}")

    msgpack.unpackb(frames[0], ext_hook=no_ext)


def test_a_graph_crosses_as_a_tree() -> None:
    space = spaces.Graph(spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(3))
    element = space.sample(num_nodes=3, num_edges=2)
    frames = encode(GetAction(episode_id="e", observation=to_wire(element)))
    assert taker(space)(decode(GetAction, frames).observation, "it") in space


BOX = spaces.Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, [1.0]),
        (BOX, [[1.0, 1.0]]),
        (BOX, [0.0, 1.5]),
        (BOX, [0.0, float("nan")]),
        (BOX, [True, False]),
        (BOX, ["0.5", "0.5"]),
        (BOX, [0.0, None]),
        (BOX, [[0.0], [0.0, 1.0]]),
        (BOX, "ab"),
        (BOX, None),
        (BOX, {"0": 1.0}),
        (BOX, np.zeros(2, np.complex64)),
        (BOX, np.full(2, 1e300)),
        (BOX, b"\0\0"),
        (spaces.Box(0, 255, (1,), np.uint8), [256]),
        (spaces.Box(0, 255, (1,), np.uint8), [-1]),
        (spaces.Box(0, 255, (1,), np.uint8), [1.0]),
        (spaces.Box(0, 255, (1,), np.uint8), [2**70]),
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), -1),
        (spaces.Discrete(3), 1.0),
        (spaces.Discrete(3), True),
        (spaces.Discrete(3), [1]),
        (spaces.Discrete(3), np.array([1])),
        (spaces.MultiDiscrete([2, 2]), [0, 2]),
        (spaces.MultiBinary(2), [0, 2]),
        (spaces.Text(2, charset="ab"), "abc"),
        (spaces.Text(2, charset="ab"), "c"),
        (spaces.Dict(a=BOX), {}),
        (spaces.Dict(a=BOX), {"a": [0.0, 0.0], "b": 1}),
        (spaces.Dict(a=BOX), {"b": [0.0, 0.0]}),
        (spaces.Dict(a=BOX), [1]),
        (spaces.Tuple([BOX]), []),
        (spaces.Tuple([BOX]), {}),
        (spaces.OneOf([BOX]), [1, [0.0, 0.0]]),
        (spaces.OneOf([BOX]), [True, [0.0, 0.0]]),
        (spaces.OneOf([BOX]), [0]),
        (spaces.OneOf([BOX]), 0),
        (spaces.OneOf([BOX]), [0.0, [0.0, 0.0]]),
        (spaces.Sequence(BOX), [[0.0]]),
        (spaces.Sequence(BOX), 1),
        (spaces.Graph(BOX, None), [1, 2, 3]),
    ],
    ids=repr,
)
def test_x_21_what_is_outside_is_refused_saying_what_was_expected(
    space: spaces.Space[Any], value: Any
) -> None:
    with pytest.raises(SpaceMismatchError, match=r"^the observation.*expected .*got "):
        taker(space)(value, "the observation")


def test_x_21_the_place_is_named() -> None:
    space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), BOX]))
    with pytest.raises(
        SpaceMismatchError, match=r"o\['a'\]\[1\]: expected Box.* with 3.0 at \[0\]"
    ):
        taker(space)({"a": [1, [3.0, 0.0]]}, "o")


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, [0, 1]),
        (BOX, (0.5, 1)),
        (BOX, np.zeros(2, np.float64)),
        (BOX, np.zeros(2, np.int8)),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([7], np.int64)),
        (spaces.Box(-1.0, 1.0, ()), 0.5),
        (spaces.Box(-1.0, 1.0, ()), np.float64(0.5)),
        (spaces.Discrete(3), np.int8(2)),
        (spaces.Discrete(3), np.array(2, np.uint64)),
        (spaces.MultiBinary(2), [True, False]),
        (spaces.Dict(a=BOX), Tree(OrderedDict(a=[0.0, 0.0]))),
    ],
    ids=repr,
)
def test_numbers_are_converted_where_they_keep_their_meaning(
    space: spaces.Space[Any], value: Any
) -> None:
    assert taker(space)(value, "it") in space


def test_a_number_beyond_the_dtype_becomes_infinite_without_a_warning() -> None:
    space = spaces.Box(-np.inf, np.inf, (1,))
    for value in ([1e300], [float("inf")], np.array([1e300])):
        assert taker(space)(value, "it")[0] == np.inf
