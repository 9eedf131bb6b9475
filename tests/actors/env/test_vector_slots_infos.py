from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from envbus.actors.env.vector_slots import split_infos
from envbus.runner.testing import assert_same


class Merger(VectorEnv[Any, Any, Any]):
    """Gymnasium's own merging."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def merge(self, split: list[dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, info in enumerate(split):
            infos = self._add_info(infos, info, i)
        return infos


@pytest.mark.parametrize(
    "split",
    [
        [{}, {}, {}],
        [{"a": 1}, {"a": 2}, {"a": 3}],
        [{"a": 1}, {}, {"a": 3}],
        [{}, {"f": 0.5, "b": True, "s": "x", "n": None}, {"l": [1, 2]}],
        [{"array": np.arange(3)}, {}, {"array": np.arange(3) * 2}],
        [{"scalar": np.float32(1)}, {"scalar": np.float32(2)}, {}],
        [{"d": {"x": 1}}, {"d": {"y": np.ones((2, 2))}}, {}],
        [{"d": {}}, {}, {}],
        [{"final_obs": np.ones(2), "final_info": {"r": 1.5}}, {"r": 2.5}, {}],
        [{"final_obs": {"a": np.ones(2)}}, {}, {"final_obs": (1, "x")}],
        [{"object": (1, 2)}, {"object": object}, {}],
    ],
)
def test_merging_again_gives_the_same(split: list[dict[str, Any]]) -> None:
    merger = Merger(3)
    merged = merger.merge(split)
    again = split_infos(merged, 3)
    assert [set(info) for info in again] == [set(info) for info in split]
    assert_same(merger.merge(again), merged)


def test_inner_values_without_masks_follow_their_parent() -> None:
    infos = {
        "episode": {"r": np.array([1.0, 2.0]), "l": np.array([3, 4])},
        "_episode": np.array([False, True]),
    }
    assert split_infos(infos, 2) == [{}, {"episode": {"r": 2.0, "l": 4}}]


def test_values_without_masks_go_to_all() -> None:
    infos = {"x": np.array([1, 2]), "names": ["a", "b"], "version": "1.0"}
    assert split_infos(infos, 2) == [
        {"x": 1, "names": "a", "version": "1.0"},
        {"x": 2, "names": "b", "version": "1.0"},
    ]


def test_a_key_with_an_underscore_that_is_no_mask_is_kept() -> None:
    assert split_infos({"_private": np.array([1, 2])}, 2) == [{"_private": 1}, {"_private": 2}]


class Foreign:
    """An array of another library, as far as NumPy knows it."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._values, dtype)


def test_arrays_of_other_libraries_are_dealt_out_too() -> None:
    infos = {"x": Foreign([1.5, 2.5]), "in": {"y": Foreign([1, 2]), "_y": Foreign([False, True])}}
    assert split_infos(infos, 2) == [{"x": 1.5, "in": {}}, {"x": 2.5, "in": {"y": 2}}]


def test_arrays_are_copies() -> None:
    infos = {"a": np.zeros((2, 3)), "_a": np.array([True, True])}
    split = split_infos(infos, 2)
    infos["a"][...] = 1.0
    assert split[0]["a"].tolist() == [0.0, 0.0, 0.0]
