"""Infos as columns: merged to the bit as Gymnasium merges them, or left to messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from envbus.actors.arrays.info_columns import (
    RECORD_BYTES,
    InfoLayout,
    InfoReader,
    InfoWriter,
    records_of,
)
from envbus.runner.testing import assert_same


class Both:
    """A writer and a reader of the same records, which learn as runner and actor do."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        records = records_of(memoryview(bytearray(num_envs * RECORD_BYTES)), num_envs)
        self.writer, self.reader = InfoWriter(records), InfoReader(records)

    def learn(self, infos: list[dict[str, Any]]) -> None:
        layout = self.reader.layout
        for info in infos:
            layout = layout.with_form_of(info) or layout
        told = InfoLayout.from_plain(layout.to_plain())
        assert told.to_plain() == layout.to_plain()
        self.reader.learn(layout)
        self.writer.learn(told)


def gymnasiums(infos: list[dict[str, Any]]) -> dict[str, Any]:
    merger = VectorEnv[Any, Any, Any]()
    merger.num_envs = len(infos)
    merged: dict[str, Any] = {}
    for env_id, info in enumerate(infos):
        merged = merger._add_info(merged, info, env_id)
    return merged


def assert_merged(found: dict[str, Any], infos: list[dict[str, Any]]) -> None:
    expected = gymnasiums(infos)
    assert_same(found, expected)
    assert repr(found) == repr(expected)  # in the same order


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.sampled_from(
        [np.float32(1.5), np.int8(-3), np.float64(2.5), np.uint16(9), np.complex64(1j)]
    ),
    st.sampled_from([np.arange(3.0), np.zeros((2, 2), np.int32), np.array(5), np.array([True])]),
)
KEYS = st.sampled_from(["a", "b", "c", "_a", "d"])
INFOS = st.builds(
    lambda info, final: info if final is None else {"final_obs": final, **info},
    st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=2), max_size=4),
    st.sampled_from([None, None, np.arange(4.0), np.ones((2, 1), np.uint8), np.ones(1)]),
)


@given(st.lists(INFOS, min_size=1, max_size=5), st.lists(INFOS, max_size=3))
def test_what_fits_is_merged_as_gymnasium_merges_it(
    infos: list[dict[str, Any]], before: list[dict[str, Any]]
) -> None:
    both = Both(len(infos))
    both.learn([*before, *infos])
    if not both.writer.write(infos):
        assert both.reader.merged() == {}
        return
    assert_merged(both.reader.merged(), infos)
    rows = np.arange(len(infos))[::-1]
    assert_merged(both.reader.merged(rows), infos[::-1])
    singles = both.reader.infos(range(len(infos)))
    assert_merged(gymnasiums([singles.get(i, {}) for i in range(len(infos))]), infos)
    for env_id, info in singles.items():
        assert repr(info) == repr(infos[env_id])
    assert repr(both.reader.infos()) == repr(singles)


ENDED = {"final_obs": np.arange(4.0), "final_info": {}, "episode": 2}
STEP, FIRST = {"x": 1.5, "n": 3, "inner": {"done": True, "at": np.arange(2.0)}}, {"episode": 1}


def test_usual_infos_fit() -> None:
    both = Both(3)
    both.learn([STEP, FIRST, ENDED])
    assert both.writer.write([ENDED, STEP, ENDED])
    assert_merged(both.reader.merged(), [ENDED, STEP, ENDED])
    assert both.writer.write([STEP, {}, FIRST])
    assert_merged(both.reader.merged(), [STEP, {}, FIRST])
    assert both.writer.write([STEP] * 3)
    assert_merged(both.reader.merged(), [STEP] * 3)
    assert both.writer.write(None)
    assert both.reader.merged() == {}
    assert both.reader.infos() == {}


@pytest.mark.parametrize(
    "info",
    [
        {"x": 1},  # Gymnasium's array has the type of the first value
        {"x": np.float64(1.5)},
        {"x": 1.5, "y": 2.0},
        {"n": 2**70},
        {"x": None},
        {},
    ],
)
def test_another_form_does_not_fit(info: dict[str, Any]) -> None:
    both = Both(2)
    both.learn([{"x": 1.5}, {"n": 1}])
    assert both.writer.write([{"x": 2.5}, info]) == (not info)


@pytest.mark.parametrize("value", [np.array(1.5), np.array([2]), np.array([[3]])])
def test_an_array_of_another_form_does_not_fit(value: Any) -> None:
    both = Both(1)
    both.learn([{"x": np.array(1)}])
    assert both.writer.write([{"x": np.array(2)}])
    assert not both.writer.write([{"x": value}])


def test_arrays_of_foreign_byte_order_are_merged_as_they_are() -> None:
    infos = [{"x": np.array(1.5, ">f8")}, {}]
    both = Both(2)
    both.learn(infos)
    assert both.writer.write(infos)
    assert_merged(both.reader.merged(), infos)


@pytest.mark.parametrize(
    "info",
    [
        {"text": "a"},
        {"x": np.bool_(True)},
        {"x": 1.0, "_x": 2.0},
        {"final_obs": 1.0},
        {"inner": {"final_obs": np.zeros(2)}},
        {"big": np.zeros(100)},
        {"": 1.0},
        {1: 2.0},
        {},
    ],
)
def test_what_gymnasium_treats_otherwise_has_no_columns(info: dict[Any, Any]) -> None:
    assert InfoLayout().with_form_of(info) is None


def test_an_info_that_contains_itself_has_no_columns() -> None:
    info: dict[str, Any] = {"x": 1.0}
    info["me"] = info
    assert InfoLayout().with_form_of(info) is None


def test_forms_that_contradict_each_other_are_not_both_learnt() -> None:
    layout = InfoLayout().with_form_of({"x": 1.5, "y": {"z": 1}})
    assert layout is not None
    for info in ({"x": 1}, {"y": 1.0}, {"x": {"z": 1}}, {"x": 2.5, "y": {"z": 1}}):
        assert layout.with_form_of(info) is None
    grown = layout.with_form_of({"x": 2.5})
    assert grown is not None
    assert grown.offsets == layout.offsets


def test_who_knows_fewer_forms_leaves_the_others_to_messages() -> None:
    both = Both(2)
    both.learn([STEP])
    both.reader.learn(both.reader.layout.with_form_of(FIRST) or both.reader.layout)
    assert both.writer.write([STEP, STEP])
    assert_merged(both.reader.merged(), [STEP, STEP])
    assert not both.writer.write([STEP, FIRST])
