from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.spaces.forms import check_form_of
from tests.actors.spaces.test_spaces import over_a_socket
from tests.envs import CustomSpace, all_spaces

SPACES = all_spaces()
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
PAIR = spaces.Tuple((BOX, spaces.Discrete(3)))
GRAPH = spaces.Graph(BOX, spaces.Discrete(3))
NODES = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize("name", SPACES)
def test_samples_of_every_space_have_its_form_also_after_a_socket(name: str) -> None:
    space = SPACES[name]
    space.seed(3)
    check = check_form_of(space)
    for _ in range(5):
        sample = space.sample()
        assert check(sample) is None
        assert check(over_a_socket(sample)) is None


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, np.array([7.0, np.inf])),  # bounds are not looked at; float64 can be cast
        (BOX, [1, 2.5]),
        (BOX, (np.float32(1), True)),
        (spaces.Box(0, 9, (2, 2)), [np.zeros(2), [0, 0]]),
        (spaces.Discrete(3), 2),
        (spaces.Discrete(3), np.array(2)),
        (spaces.Text(3), "longer"),
        (spaces.Sequence(BOX), []),
        (spaces.Sequence(BOX, stack=True), []),
        (GRAPH, spaces.GraphInstance(NODES, None, None)),
        (PAIR, [np.zeros(2), 1]),
        (spaces.OneOf((BOX, PAIR)), (np.array(0), np.zeros(2))),
        (CustomSpace(), object()),
    ],
)
def test_what_gymnasium_can_batch_is_taken(space: Any, value: Any) -> None:
    assert check_form_of(space)(value) is None


@pytest.mark.parametrize(
    ("space", "value", "told"),
    [
        (BOX, None, r" that is None, where shape \(2,\) and float32 belong"),
        (BOX, 1.0, "that is 1.0"),
        (BOX, np.zeros(3, np.float32), r" of shape \(3,\) and float32, where shape \(2,\)"),
        (BOX, np.zeros((), np.float32), r" of shape \(\)"),
        (BOX, np.array(["a", "b"]), "<U1"),
        (BOX, "ab", "that is 'ab'"),
        (BOX, [1, "x"], "that is"),
        (BOX, [1, [2]], "that is"),
        (BOX, [1, 2**64], "that is"),
        (spaces.Discrete(3), 1.5, "int64 belong"),
        (spaces.Discrete(3), np.zeros(1, np.int64), r"of shape \(1,\)"),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2), "float64, where"),
        (spaces.Text(3), 5, "that is 5, where a string belongs"),
        (spaces.Dict(a=BOX), [1], "where a dict belongs"),
        (spaces.Dict(a=BOX), {}, r"with the keys \[\], where \['a'\] belong"),
        (spaces.Dict(a=BOX), {"a": np.zeros(2), "b": 1}, r"keys \['a', 'b'\]"),
        (spaces.Dict(a=PAIR), {"a": (BOX.sample(), "x")}, r"^\['a'\]\[1\] that is 'x'"),
        (PAIR, (np.zeros(2),), "a tuple of 2 belongs"),
        (PAIR, [np.zeros(2), 1, 1], "a tuple of 2 belongs"),
        (PAIR, [np.zeros(2), "x"], r"^\[1\] that is 'x'"),
        (spaces.Sequence(BOX), np.zeros(2), "where a tuple belongs"),
        (spaces.Sequence(BOX), (np.zeros(2), np.zeros(3)), r"^\[1\] of shape \(3,\)"),
        (spaces.Sequence(BOX, stack=True), np.zeros((4, 3)), r"\(any, 2\)"),
        (spaces.Sequence(spaces.Dict(a=BOX), stack=True), {"a": np.zeros(2)}, r"^\['a'\] of shape"),
        (spaces.Sequence(spaces.Text(3), stack=True), (1,), r"^\[0\] that is 1"),
        (spaces.OneOf((BOX, PAIR)), (2, np.zeros(2)), r"^\[0\] that is 2, where the number"),
        (spaces.OneOf((BOX, PAIR)), (True, np.zeros(2)), r"^\[0\] that is True"),
        (spaces.OneOf((BOX, PAIR)), (0, None), r"^\[1\] that is None"),
        (spaces.OneOf((BOX, PAIR)), (np.array(1.0), 0), r"^\[0\] of shape \(\) and float"),
        (spaces.OneOf((BOX, PAIR)), (np.array([0]), np.zeros(2)), r"^\[0\] of shape \(1,\)"),
        (spaces.OneOf((BOX, PAIR)), 0, "a tuple of 2"),
        (GRAPH, (NODES, None, None), "a GraphInstance belongs"),
        (GRAPH, spaces.GraphInstance(None, None, None), r"^\.nodes that is None"),
        (GRAPH, spaces.GraphInstance(NODES, np.zeros((1, 2)), None), r"^\.edges of shape"),
        (GRAPH, spaces.GraphInstance(NODES, None, np.zeros(2, int)), r"^\.edge_links of shape"),
        (spaces.Graph(BOX, None), spaces.GraphInstance(NODES, NODES, None), "None belongs"),
    ],
)
def test_another_form_is_named_with_its_place(space: Any, value: Any, told: str) -> None:
    wrong = check_form_of(space)(value)
    assert wrong is not None
    assert re.search(told, wrong)


def test_of_long_strings_in_lists_no_array_is_made() -> None:
    wrong = check_form_of(spaces.Box(0, 1, (2000,)))(["x" * 10_000_000, *[""] * 1999])  # 80 GB
    assert wrong is not None
    assert len(wrong) < 1000
