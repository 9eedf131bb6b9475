from __future__ import annotations

import numpy as np
import pytest

from envbus.runner.batches.nested import (
    ArrayBuffer,
    TreeBuffer,
    buffer_for,
    concatenate_trees,
    leaves_of,
    map_tree,
)


def test_a_tree_is_mapped_leaf_by_leaf() -> None:
    tree = {"a": (np.array([1]), {"b": np.array([2])})}
    assert map_tree(lambda x, y: int(x[0]) + int(y[0]), tree, tree) == {"a": (2, {"b": 4})}


def test_leaves_come_with_the_path_that_reads_like_code() -> None:
    assert list(leaves_of({"a": (1, {"b": 2})}, "obs")) == [
        ("obs['a'][0]", 1),
        ("obs['a'][1]['b']", 2),
    ]


def test_trees_of_different_structure_cannot_be_joined_and_the_place_is_named() -> None:
    one = {"a": np.zeros((2, 3))}
    with pytest.raises(ValueError, match="obs has the keys"):
        concatenate_trees([one, {"b": np.zeros((2, 3))}], "obs")
    with pytest.raises(ValueError, match=r"rows of obs\['a'\] have shape \(3,\) and \(4,\)"):
        concatenate_trees([one, {"a": np.zeros((2, 4))}], "obs")
    with pytest.raises(ValueError, match="tuple of 1"):
        concatenate_trees([(np.zeros(1),), (np.zeros(1), np.zeros(1))], "obs")


def test_a_buffer_grows_and_keeps_its_rows() -> None:
    buffer = ArrayBuffer(np.array([0.0, 0.5], np.float32), capacity=1)
    for value in range(1, 100):
        buffer.append(np.array([value, 0.5], np.float32))
    rows = buffer.rows(0, len(buffer))
    assert (rows.dtype, rows.shape) == (np.float32, (100, 2))
    assert rows[:, 0].tolist() == list(range(100))


def test_what_was_appended_is_a_copy() -> None:
    value = np.zeros(2)
    buffer = ArrayBuffer(value, capacity=4)
    value[:] = 7
    assert buffer.rows(0, 1).tolist() == [[0.0, 0.0]]


def test_a_later_value_widens_the_dtype_and_loses_nothing() -> None:
    buffer = ArrayBuffer(1, capacity=4)
    buffer.append(0.5)
    assert buffer.rows(0, 2).tolist() == [1.0, 0.5]


def test_a_row_of_another_shape_is_refused_and_not_broadcast() -> None:
    buffer = ArrayBuffer(np.zeros(4), capacity=4)
    with pytest.raises(ValueError, match=r"has shape \(1,\), earlier ones \(4,\)"):
        buffer.append(np.zeros(1))


def test_a_string_among_numbers_is_refused() -> None:
    buffer = ArrayBuffer(1, capacity=4)
    with pytest.raises(ValueError, match="has dtype"):
        buffer.append("one")


@pytest.mark.parametrize("values", [["a", "bc"], [(1,), (1, 2)], [np.zeros(1), np.zeros(2)]])
def test_ragged_rows_are_objects(values: list[object]) -> None:
    buffer = buffer_for(values[0], 1, ragged=True)
    buffer.append(values[1])
    rows = buffer.rows(0, 2)
    assert (rows.dtype, rows.shape) == (np.dtype(object), (2,))
    assert rows[1] is values[1]


def test_nested_rows_become_a_tree_of_columns() -> None:
    buffer = buffer_for({"a": (1, np.zeros(2))}, 2)
    buffer.append({"a": (2, np.ones(2))})
    buffer.append_blank()
    rows = buffer.rows(0, 3)
    assert rows["a"][0].tolist() == [1, 2, 0]
    assert rows["a"][1].shape == (3, 2)


def test_an_odd_row_of_a_tree_is_refused_with_its_place() -> None:
    buffer = TreeBuffer({"a": np.zeros(2), "b": 1}, 2)
    with pytest.raises(ValueError, match=r"\['a'\] has shape"):
        buffer.append({"a": np.zeros(3), "b": 1})
    with pytest.raises(ValueError, match=r"\['b'\] is missing"):
        TreeBuffer({"a": 1, "b": 1}, 2).append({"a": 1, "c": 1})
    with pytest.raises(ValueError, match="is not a dict with"):
        TreeBuffer({"a": 1, "b": 1}, 2).append((1, 2))
