from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envbus.actors.arrays.blocks import BlockLayout
from envbus.runner.engine.env_results import ObservationStore
from envbus.runner.testing import assert_same

SPACE = spaces.Dict(image=spaces.Box(0, 255, (2,), np.uint8), n=spaces.Discrete(9))


def store_of(single: Any, num_envs: int) -> ObservationStore:
    layout = BlockLayout.of(single, spaces.Discrete(2), num_envs)
    leaves = layout.views(bytearray(layout.size)).observations
    return ObservationStore(single, num_envs, leaves)


def test_a_batch_has_the_structure_of_the_space() -> None:
    store = store_of(SPACE, 3)
    store.put_arrays([2, 0], [np.array([[5, 6], [7, 8]], np.uint8), np.array([4, 3])])
    assert_same(
        store.batch(copy=True),
        {"image": np.array([[7, 8], [0, 0], [5, 6]], np.uint8), "n": np.array([3, 0, 4])},
    )


def test_a_copy_is_the_callers_and_no_copy_is_the_same_each_time() -> None:
    store = store_of(SPACE, 2)
    copied, shared = store.batch(copy=True), store.batch(copy=False)
    store.put_arrays(slice(0, 2), [np.ones((2, 2), np.uint8), np.array([1, 2])])
    assert copied["n"].tolist() == [0, 0]
    assert shared["n"].tolist() == [1, 2]
    assert np.shares_memory(shared["image"], store.batch(copy=False)["image"])
    copied["n"][...] = 8
    assert store.batch(copy=True)["n"].tolist() == [1, 2]


def test_single_observations_are_kept_until_newer_ones_come() -> None:
    store = store_of(spaces.Text(5), 3)
    store.put_singles(range(3), ["a", "b", "c"])
    store.put_singles([1], ["B"])
    assert store.batch(copy=True) == ("a", "B", "c")


def test_selected_rows_are_the_callers_own() -> None:
    store = store_of(spaces.Box(-1.0, 1.0, (2,)), 3)
    store.put_arrays(slice(0, 3), [np.array([[0, 0], [1, 1], [2, 2]], np.float32)])
    chosen = store.select(np.array([2, 0]))
    assert_same(chosen, np.array([[2, 2], [0, 0]], np.float32))
    chosen[...] = 9
    assert store.batch(copy=True).max() == 2


def test_selected_single_observations_are_the_callers_own() -> None:
    store = store_of(spaces.Sequence(spaces.Box(0.0, 1.0, (1,)), stack=True), 2)
    store.put_singles([0, 1], [np.zeros((1, 1), np.float32), np.ones((2, 1), np.float32)])
    (chosen,) = store.select(np.array([1]))
    chosen[...] = 0.5
    assert store.batch(copy=True)[1].tolist() == [[1.0], [1.0]]


def test_neighbours_are_chosen_without_a_copy_on_request() -> None:
    leaf = np.arange(8.0).reshape(4, 2)
    store = ObservationStore(spaces.Box(-9, 9, (2,), np.float64), 4, [leaf])
    cases = {(1, 2): True, (2, 1): False, (1, 3): False}
    for env_ids, in_place in cases.items():
        chosen = store.select(np.array(env_ids), copy=False)
        assert np.shares_memory(chosen, leaf) is in_place
        assert np.array_equal(chosen, leaf[list(env_ids)])
        assert not np.shares_memory(store.select(np.array(env_ids)), leaf)
