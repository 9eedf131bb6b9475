from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from envbus.actors.arrays.blocks import BlockLayout
from envbus.runner.testing import assert_same
from envbus.runner.workers.actions import ActionStore

Space = gymnasium.Space[Any]

NUMBER = spaces.Discrete(5)
BOX = spaces.Box(-1.0, 1.0, (2,))
NESTED = spaces.Dict(a=NUMBER, b=spaces.Tuple((BOX, spaces.MultiBinary(3))))


def store_of(single: Space, num_envs: int = 3) -> tuple[ActionStore, list[Any] | None]:
    layout = BlockLayout.of(spaces.Discrete(2), single, num_envs)
    leaves = layout.views(bytearray(layout.size)).actions
    return ActionStore(batch_space(single, num_envs), num_envs, leaves), leaves


@pytest.mark.parametrize("single", [NUMBER, BOX, NESTED, spaces.MultiDiscrete([2, 3])])
def test_a_batch_of_the_space_goes_into_the_blocks(single: Space) -> None:
    store, leaves = store_of(single)
    batch = batch_space(single, 3).sample()
    assert leaves is not None
    assert store.store(batch) is None
    written = [leaf.copy() for leaf in leaves]
    assert store.store(batch) is None
    assert_same([leaf.copy() for leaf in leaves], written)


def test_the_blocks_hold_the_batch() -> None:
    store, leaves = store_of(NESTED)
    batch = {
        "a": np.array([1, 2, 3]),
        "b": (np.full((3, 2), 0.5, np.float32), np.ones((3, 3), np.int8)),
    }
    assert store.store(batch) is None
    assert leaves is not None
    assert leaves[0].tolist() == [1, 2, 3]
    assert leaves[1].tolist() == [[0.5, 0.5]] * 3
    assert leaves[2].tolist() == [[1, 1, 1]] * 3


@pytest.mark.parametrize(
    ("single", "actions"),
    [
        (NUMBER, np.array([1, 2, 3], np.int32)),
        (NUMBER, np.array([1, 2, 3], np.uint8)),
        (BOX, np.ones((3, 2), np.float16)),
        (spaces.Tuple((NUMBER, BOX)), (np.ones(3, np.int32), np.ones((3, 2), np.float32))),
    ],
    ids=str,
)
def test_a_smaller_dtype_of_the_same_kind_goes_into_the_blocks(single: Space, actions: Any) -> None:
    store, leaves = store_of(single)
    assert store.store(actions) is None
    assert leaves is not None
    arrays = actions if isinstance(actions, tuple) else [actions]
    for leaf, array in zip(leaves, arrays, strict=True):
        assert leaf.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("single", "actions"),
    [
        (NUMBER, [1, 2, 3]),
        (NUMBER, (1, 2, 3)),
        (NUMBER, np.array([1.5, 2, 3])),
        (NUMBER, np.array([1, 2, 3], np.uint64)),
        (NUMBER, np.array([True, False, True])),
        (NUMBER, np.array([[1], [2], [3]])),
        (NUMBER, np.array(["a", "b", "c"])),
        (BOX, np.ones((3, 2), np.float64)),
        (BOX, np.ones((3, 5), np.float32)),
        (BOX, [np.zeros(2, np.float32)] * 3),
        (NUMBER, np.ma.masked_array([1, 2, 3])),
        (spaces.Text(4), ("a", "b", "c")),
    ],
    ids=str,
)
def test_what_does_not_fit_is_handed_out_as_gymnasium_would(single: Space, actions: Any) -> None:
    """Each env sees what `iterate` gives; values and dtypes are its own business."""
    store, leaves = store_of(single)
    before = None if leaves is None else [leaf.copy() for leaf in leaves]
    singles = store.store(copy.deepcopy(actions))
    assert_same(singles, list(iterate(batch_space(single, 3), actions)))
    if leaves is not None:
        assert_same([leaf.copy() for leaf in leaves], before)


@pytest.mark.parametrize(
    ("single", "actions"),
    [
        (NUMBER, np.array([1, 2])),
        (NUMBER, [1, 2, 3, 4]),
        (NUMBER, []),
        (BOX, np.ones((4, 2), np.float32)),
        (NESTED, {"a": np.arange(2), "b": (np.ones((2, 2)), np.ones((2, 3)))}),
    ],
    ids=["too few", "too many", "none", "box", "nested"],
)
def test_a_wrong_number_of_actions_is_refused_with_both_numbers(
    single: Space, actions: Any
) -> None:
    store, leaves = store_of(single)
    assert leaves is not None
    before = [leaf.copy() for leaf in leaves]
    with pytest.raises(ValueError, match=r"expected 3 actions, one per env, but got \d"):
        store.store(actions)
    assert_same([leaf.copy() for leaf in leaves], before)


def test_parts_of_different_lengths_are_refused() -> None:
    store, _ = store_of(NESTED)
    actions = {"a": np.arange(3), "b": (np.ones((3, 2), np.float32), np.ones((2, 3), np.int8))}
    with pytest.raises(ValueError, match="actions"):
        store.store(actions)


@pytest.mark.parametrize(
    ("actions", "error"),
    [([{"a": 1}] * 3, TypeError), ({"a": np.arange(3)}, ValueError)],
    ids=["one by one", "a part is missing"],
)
def test_actions_of_another_form_are_told_which_one_is_expected(actions: Any, error: Any) -> None:
    store, _ = store_of(NESTED)
    with pytest.raises(error, match=r"expected 3 actions, one per env, as a batch of Dict\('a': "):
        store.store(actions)


@pytest.mark.parametrize("actions", [0, 1.5, np.int64(1), None])
@pytest.mark.parametrize("single", [NUMBER, BOX])
def test_a_scalar_is_no_batch(single: Space, actions: Any) -> None:
    with pytest.raises(TypeError):
        store_of(single)[0].store(actions)


def test_a_batch_for_some_envs_is_written_to_their_rows() -> None:
    store, leaves = store_of(NUMBER, 4)
    assert leaves is not None
    assert store.store(np.array([7, 8]), np.array([3, 1])) is None
    assert leaves[0].tolist() == [0, 8, 0, 7]
    with pytest.raises(ValueError, match="expected 2 actions"):
        store.store([1, 2, 3], np.array([3, 1]))
