from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import GraphInstance
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import envbus.actors  # noqa: F401  registers Gymnasium's graphs
from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.testing import assert_same

pa = pytest.importorskip("pyarrow")

from envbus.runner.recordings.tables import from_table, to_table  # noqa: E402  # needs pyarrow


def same(one: SampleBatch, other: SampleBatch) -> None:
    assert list(one.columns) == list(other.columns)
    assert_same(one.columns, other.columns)


@settings(max_examples=60)
@given(
    st.sampled_from([np.bool_, np.uint8, np.int64, np.float16, np.float32, np.float64]),
    st.integers(0, 5),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.integers(0, 1000),
)
def test_arrays_come_back_with_shape_and_dtype(
    dtype: type, rows: int, shape: tuple[int, ...], seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, 2, (rows, *shape)).astype(dtype)
    batch = SampleBatch({"obs": values})
    back = from_table(to_table(batch))
    same(back, batch)
    assert back["obs"].shape == values.shape


def test_nested_columns_come_back_nested() -> None:
    rows = 3
    batch = SampleBatch(
        {
            "obs": {"image": np.zeros((rows, 4, 4, 3), np.uint8), 1: (np.arange(rows), np.eye(3))},
            "actions": (np.ones((rows, 2), np.float32), np.zeros(rows, np.int64)),
            "agent_id": np.array(["left", "right", "left"]),
        }
    )
    same(from_table(to_table(batch)), batch)


def test_rows_of_several_texts_times_or_complex_numbers_come_back() -> None:
    days = np.array([["2020-01-01", "2021-01-01"]] * 2, "M8[s]")
    batch = SampleBatch(
        {
            "texts": np.array([["ab", "c"], ["", "d"]]),
            "bytes": np.array([[b"ab", b"c"], [b"", b"d"]]),
            "complex": np.array([[1j, 2], [3, 4j]], np.complex64),
            "days": days,
        }
    )
    same(from_table(to_table(batch)), batch)


def test_what_cannot_be_recorded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"obs\[\('a', 1\)\]: keys"):
        to_table(SampleBatch({"obs": {("a", 1): np.zeros(2)}}))
    with pytest.raises(ConfigError, match=r"obs\['x'\]: values of \[\('a', '<f4'\)\]"):
        to_table(SampleBatch({"obs": {"x": np.zeros(2, [("a", "<f4")])}}))
    infos = np.array([{"a": np.array([object()])}, {}], np.object_)
    with pytest.raises(ConfigError, match=r"infos: values that cannot be recorded: .*'a'.*object"):
        to_table(SampleBatch({"infos": infos}))
    for odd in ({"texts": np.array(["a\udc80"])}, {"a\udc80": np.zeros(1)}):
        with pytest.raises(ConfigError, match="text that UTF-8 does not have"):
            to_table(SampleBatch(odd))


def test_infos_and_graphs_come_back_without_pickle() -> None:
    graph = GraphInstance(np.eye(3, dtype=np.float32), None, None)
    values = np.empty(2, np.object_)
    values[:] = [graph, graph]
    infos = np.empty(2, np.object_)
    infos[:] = [{"a": (1, 2.5), "b": np.arange(2000)}, {}]
    back = from_table(to_table(SampleBatch({"obs": values, "infos": infos})))
    np.testing.assert_array_equal(back["obs"][1].nodes, graph.nodes)
    assert back["infos"][0]["a"] == (1, 2.5)
    np.testing.assert_array_equal(back["infos"][0]["b"], np.arange(2000))
    assert back["infos"][1] == {}


def test_big_endian_and_strided_arrays_are_recorded_as_native_ones() -> None:
    values = np.arange(24, dtype=">i4").reshape(4, 6)[:, ::2]
    back = from_table(to_table(SampleBatch({"obs": values})))
    assert back["obs"].dtype == np.dtype("=i4")
    np.testing.assert_array_equal(back["obs"], values)


def test_a_table_from_somewhere_else_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"not recorded by envbus.*reward_signal"):
        from_table(pa.table({"reward_signal": [1.0]}))
