"""Elements of spaces over the wire."""

from __future__ import annotations

import sys
import tracemalloc
from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.elements import taker, to_wire
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import GetAction
from envbus.bus.brief import brief
from envbus.bus.wire.codec import Placeholder, Placeholders, decode, encode
from envbus.bus.wire.messages import Tree
from tests.bus.codec_samples import identical
from tests.envs import ANY_GRAPHS, discrete

SPACES = [
    spaces.Box(-1.0, 1.0, (3,)),
    spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-1.0, 1.0, (), np.float16),
    spaces.Box(-1.0, 1.0, (0, 3)),
    spaces.Box(0, 2**64 - 1, (2, 3), np.uint64),
    spaces.Box(-3, 3, (2, 0), np.int8),
    spaces.Discrete(5, start=-2),
    discrete(3, dtype=np.int32),
    spaces.MultiDiscrete([3, 4], start=np.array([1, -1])),
    spaces.MultiDiscrete(np.array([[2, 2], [3, 3]]), dtype=np.int8),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 2]),
    spaces.Text(8),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0.0, 1.0, (2,))),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Box(0.0, 1.0, (100,)))]),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,))]),
    spaces.Sequence(spaces.Box(0.0, 1.0, (2,))),
    spaces.Sequence(spaces.Box(0.0, 1.0, (2,)), stack=True),
    spaces.Sequence(spaces.Discrete(3), stack=True),
    spaces.Sequence(
        spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(0.0, 1.0, (2,))])), stack=True
    ),
]


def test_a_graph_has_no_millions_of_nodes_without_bytes() -> None:
    take = taker(spaces.Graph(spaces.Box(0.0, 1.0, (0,)), None))

    def graph(count: int) -> spaces.GraphInstance:
        return spaces.GraphInstance(np.zeros((count, 0), np.float32), None, None)

    assert take(graph(3), "it").nodes.shape == (3, 0)
    with pytest.raises(SpaceMismatchError, match="too many rows of nothing"):
        take(graph(2**17), "it")


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


@pytest.mark.parametrize("plain", [False, True])
def test_numbers_on_both_sides_of_2_to_the_63rd_stay_what_they_are(plain: bool) -> None:
    take = taker(spaces.Box(0, 2**64 - 1, (3,), np.uint64))
    board = np.array([2**64 - 1, 5, 2**63 + 1], np.uint64)
    assert identical(take(to_wire(board, plain=plain), "it"), board)
    for wrong in (2**64, -1):
        with pytest.raises(SpaceMismatchError, match="uint64"):
            take([2**63, 0, wrong], "it")


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


def test_parts_that_are_stacked_are_as_many_as_each_other() -> None:
    take = taker(spaces.Sequence(spaces.Dict(a=spaces.Discrete(3), b=BOX), stack=True))
    assert take({"a": [1, 2], "b": [[0.0, 0.5]] * 2}, "it")["a"].tolist() == [1, 2]
    for value in ({"a": [1, 2], "b": [[0.0, 0.5]]}, {"a": [1]}, [1, 2]):
        with pytest.raises(SpaceMismatchError, match=r"^it"):
            take(value, "it")


def test_what_cannot_cross_leaves_a_placeholder() -> None:
    frames = encode(
        GetAction(episode_id="e", observation=to_wire(np.array([1, None]))), Placeholders()
    )
    came = decode(GetAction, frames).observation
    assert isinstance(came, Tree)
    assert isinstance(came.value, Placeholder)


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
def test_what_is_outside_is_refused_saying_what_was_expected(
    space: spaces.Space[Any], value: Any
) -> None:
    with pytest.raises(SpaceMismatchError, match=r"^the observation.*expected .*got "):
        taker(space)(value, "the observation")


def test_the_place_is_named() -> None:
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


INF, NAN = float("inf"), float("nan")
REAL = spaces.Box(-np.inf, np.inf, (2,))
PICTURE = spaces.Box(0, 255, (2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (REAL, [0.0, 1e300]),
        (REAL, [INF, 0.0]),
        (REAL, [0.0, NAN]),
        (REAL, [0, 10**400]),
        (REAL, np.array([0.0, 1e39])),
        (REAL, np.array([0.0, -np.inf], np.float32)),
        (spaces.Box(-np.inf, np.inf, (100,)), np.full(100, np.inf, np.float32)),
        (spaces.Box(-np.inf, np.inf, (), np.float16), 65520.0),
        (spaces.Box(0, 2**63 - 1, (1,), np.int64), [2**63]),
        (spaces.Box(0, 2**63 - 1, (1,), np.int64), np.array([2**63], np.uint64)),
        (PICTURE, [[[0, 0, 256]] * 2] * 2),
        (PICTURE, [[[0, 0, -1]] * 2] * 2),
        (spaces.Sequence(REAL, stack=True), np.array([[0.0, np.inf]], np.float32)),
        (
            spaces.Graph(REAL, None),
            spaces.GraphInstance(np.full((1, 2), np.inf, np.float32), None, None),
        ),
        (spaces.Dict(a=REAL), {"a": [INF, 0.0]}),
    ],
    ids=lambda value: brief(value)[:40],
)
def test_what_is_not_finite_or_leaves_its_dtype_is_refused(
    space: spaces.Space[Any], value: Any
) -> None:
    with pytest.raises(SpaceMismatchError, match=r"^it"):
        taker(space)(value, "it")


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (REAL, ["x" * 20_000] * 2),
        (REAL, ["1.0", "2.0"]),
        (REAL, "12"),
        (PICTURE, [["x" * 20_000, *["y"] * 4000]] * 2),
        (PICTURE, [[[1, 2, 3]] * 2] * 3),
        (PICTURE, [[[1, 2, 3]] * 2, [[1, 2, 3]]]),
        (PICTURE, [[[1, 2, [3]]] * 2] * 2),
        (PICTURE, [[[1, 2, None]] * 2] * 2),
        (PICTURE, [[[1, 2, "3"]] * 2] * 2),
        (PICTURE, [[np.zeros(2, np.uint8)] * 2] * 2),
        (PICTURE, [[np.zeros(3, "S1")] * 2] * 2),
        (PICTURE, np.zeros((2, 2, 3), "V1")),
        (REAL, np.ndarray((2**31,), "S0", b"")),
        (REAL, np.ndarray((0, 2**40), np.float32, b"")),
        (spaces.Box(-1, 1, (0,)), [["x"]]),
        (spaces.Discrete(3), 10**5000),
        (spaces.MultiBinary(2), [0, 2]),
        (spaces.Text(4), "x" * 10**6),
    ],
    ids=lambda value: brief(value)[:40],
)
def test_what_has_another_form_is_refused_without_being_built(
    space: spaces.Space[Any], value: Any
) -> None:
    take = taker(space)
    tracemalloc.start()
    try:
        with pytest.raises(SpaceMismatchError, match=r"^it") as caught:
            take(value, "it")
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1500


def test_a_deep_list_is_refused_like_any_other() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for space in (REAL, spaces.Tuple([REAL]), spaces.Discrete(2), spaces.Text(3)):
        with pytest.raises(SpaceMismatchError):
            taker(space)(deep, "it")
    while type(deep) is list:  # or its end would take the stack
        (deep,) = deep


def test_bytes_stand_for_an_array_of_uint8_in_c_order() -> None:
    space = spaces.Box(0, 100, (2, 3), np.uint8)
    take = taker(space)
    came = take(bytes([0, 1, 2, 3, 4, 100]), "it")
    assert identical(came, np.array([[0, 1, 2], [3, 4, 100]], np.uint8))
    assert came.flags.writeable
    for wrong in (bytes(5), bytes(7), b"", bytes([0, 0, 0, 0, 0, 101])):
        with pytest.raises(SpaceMismatchError, match="it: expected Box"):
            take(wrong, "it")
    for other in (spaces.Box(0, 100, (6,), np.int8), spaces.MultiBinary(6), spaces.Text(9)):
        with pytest.raises(SpaceMismatchError):
            taker(other)(bytes(6), "it")


def test_arrays_may_stand_in_lists() -> None:
    rows = [np.full(3, i, np.uint8) for i in range(4)]
    came = taker(PICTURE)([rows[:2], [rows[2], [np.uint8(3), 3, 3]]], "it")
    assert came.dtype == np.uint8
    assert came[:, :, 0].tolist() == [[0, 1], [2, 3]]


GRAPH = spaces.Graph(spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(3, start=1))
NODES = np.array([[0.0, 1.0], [0.5, 0.5]], np.float32)
EDGES, LINKS = np.array([1, 3]), np.array([[0, 1], [1, 1]])


@pytest.mark.parametrize(
    "graph",
    [
        (NODES, EDGES, LINKS),
        (NODES, None, None),
        (NODES.astype(np.float16), EDGES.astype(np.int8), LINKS.astype(np.uint8)),
        (NODES.astype(np.float64), None, None),
        (NODES[:0], None, None),
        (NODES + 1, None, None),
        (NODES[:, :1], None, None),
        (NODES * np.nan, None, None),
        (NODES, EDGES + 1, LINKS),
        (NODES, EDGES > 1, LINKS),
        (NODES, EDGES[:1], LINKS),
        (NODES, EDGES, LINKS + 1),
        (NODES, EDGES, LINKS - 1),
        (NODES, EDGES, LINKS.astype(float)),
        (NODES, EDGES, None),
        (NODES, None, LINKS),
        (list(NODES), EDGES, LINKS),
        (None, None, None),
        (np.float32(0.5), None, None),
        (NODES.astype(str), None, None),
    ],
    ids=str,
)
def test_a_graph_is_taken_where_its_space_contains_it(graph: tuple[Any, Any, Any]) -> None:
    value = spaces.GraphInstance(*graph)
    try:
        inside = GRAPH.contains(value)
    except Exception:
        inside = False
    if inside:
        assert identical(taker(GRAPH)(value, "it"), value)
    else:
        with pytest.raises(SpaceMismatchError):
            taker(GRAPH)(value, "it")


def test_a_graph_without_a_space_of_edges_has_none() -> None:
    take = taker(spaces.Graph(spaces.Box(0.0, 1.0, (2,)), None))
    assert take(spaces.GraphInstance(NODES, None, None), "it").edges is None
    with pytest.raises(SpaceMismatchError):
        take(spaces.GraphInstance(NODES, EDGES, LINKS), "it")


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (GRAPH, spaces.GraphInstance(*(np.repeat(x, 500, axis=0) for x in (NODES, EDGES, LINKS)))),
        (spaces.Sequence(spaces.Box(0.0, 1.0, (2,)), stack=True), np.repeat(NODES, 500, axis=0)),
        (spaces.Sequence(spaces.Discrete(3, start=1), stack=True), np.repeat(EDGES, 500)),
    ],
    ids=["graph", "boxes", "numbers"],
)
def test_rows_of_an_array_are_looked_at_together(space: spaces.Space[Any], value: Any) -> None:
    take, calls = taker(space), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        taken = take(value, "it")
    finally:
        sys.setprofile(None)
    assert identical(taken, value)
    assert calls < 500  # one by one millions take minutes


def test_a_graph_has_no_millions_of_nodes_in_lists() -> None:
    take = taker(spaces.Graph(spaces.Box(0.0, 1.0, (1,)), None))
    nodes: Any = [np.zeros(1, np.float32)] * (2**16 + 1)
    if ANY_GRAPHS:  # before, lists of nodes are none
        assert take(spaces.GraphInstance(nodes[:9], None, None), "it").nodes is not None
    with pytest.raises(SpaceMismatchError, match="no array"):
        take(spaces.GraphInstance(nodes, None, None), "it")


@pytest.mark.parametrize("wrong", [[[0.0, 2.0]], [[0.0, np.nan]], [[True, False]], [[1j, 0]]])
def test_each_row_of_a_stack_is_checked(wrong: Any) -> None:
    take = taker(spaces.Sequence(spaces.Box(0.0, 1.0, (2,)), stack=True))
    assert take(np.array([[0, 1]]), "it").dtype == np.float32
    with pytest.raises(SpaceMismatchError):
        take(np.array([[0.0, 0.0], *wrong], np.array(wrong).dtype), "it")
