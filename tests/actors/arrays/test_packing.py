"""Dicts by agent come out as they went in, whatever they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.actors.arrays.packing import (
    pack_by_agent,
    pack_records,
    unpack_by_agent,
    unpack_records,
)
from envbus.actors.protocol import StepResult
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Tree
from envbus.runner.testing import assert_same


def travelled(value: object) -> Any:
    """Return what arrives of a value that is sent."""
    frames = encode(StepResult(observations=Tree(value)))
    found = decode(StepResult, frames, writable=True).observations
    assert found is not None
    return found.value


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)

CASES: dict[str, list[dict[Any, Any]]] = {
    "nobody": [{}, {}],
    "no env": [],
    "one form": [{"a": ROWS[0], "b": ROWS[1]}, {"a": ROWS[2], "b": ROWS[3]}],
    "other agents each time": [{"a": ROWS[0]}, {}, {"b": ROWS[1], "a": ROWS[2]}, {"c": ROWS[3]}],
    "another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "ids that are numbers and tuples": [{0: 1.5, (1, "x"): 2.5}, {0: 3.5}],
    "two shapes": [{"a": ROWS[0], "b": ROWS}, {"a": ROWS[1], "b": ROWS + 1}],
    "two dtypes": [{"a": ROWS[0], "b": ROWS[0].astype(np.int8)}],
    "big-endian beside others": [{"a": ROWS[0].astype(">f4"), "b": ROWS[1]}],
    "columns first": [{"a": np.asfortranarray(ROWS), "b": ROWS + 1}],
    "large": [{"a": np.zeros(10_000), "b": np.ones(10_000)}],
    "without size": [{"a": np.zeros((0, 3)), "b": np.zeros((0, 3))}],
    "arrays of one number": [{"a": np.array(1.0), "b": np.array(2.0)}],
    "strings": [{"a": np.array(["x"]), "b": np.array(["y"])}],
    "NumPy scalars": [{"a": np.float32(1.5), "b": np.float32(2.5)}],
    "NumPy scalars of two types": [{"a": np.float32(1.5), "b": np.int64(2)}],
    "NumPy strings": [{"a": np.str_("x"), "b": np.str_("longer")}],
    "times": [{"a": np.datetime64("2020-01-01"), "b": np.datetime64("2021-01-01")}],
    "flags": [{"a": True, "__all__": False}],
    "flags and numbers": [{"a": True, "b": 1, "c": 1.0}],
    "nested": [
        {"a": {"seen": ROWS[0], "mask": np.array([1, 0], np.int8)}},
        {"a": {"seen": ROWS[1], "mask": np.array([0, 1], np.int8)}},
    ],
    "nested otherwise": [{"a": {"seen": ROWS[0]}, "b": {"other": ROWS[1]}}],
    "tuples": [{"a": (ROWS[0], 1), "b": (ROWS[1], 2)}],
    "nothing and something": [{"a": None, "b": ROWS[0], "c": "text"}],
    "empty dicts": [{"a": {}, "b": {}}],
}


@pytest.mark.parametrize("case", CASES)
def test_dicts_by_agent_arrive_as_they_were(case: str) -> None:
    found = unpack_by_agent(travelled(pack_by_agent(CASES[case])))
    assert_same(found, CASES[case])
    assert repr(found) == repr(CASES[case])  # in the same order


@pytest.mark.parametrize("case", CASES)
def test_records_arrive_as_they_were(case: str) -> None:
    records = [
        {
            "observations": one,
            "rewards": dict.fromkeys(one, 0.5),
            "terminateds": {"__all__": False},
            "truncateds": {**dict.fromkeys(one, True), "__all__": True},
            "infos": {"__common__": {"number": index}},
            "agents": list(one),
        }
        for index, one in enumerate(CASES[case])
    ]
    found = unpack_records(travelled(pack_records(records)))
    assert_same(found, records)
    assert repr(found) == repr(records)  # in the same order


def test_an_env_may_have_no_record() -> None:
    record = {"observations": {"a": ROWS[0]}}
    assert unpack_records(pack_records([record, None])) == [record, None]


def test_what_is_no_table_of_agents_stays() -> None:
    assert unpack_by_agent([{"a": 1}]) == [{"a": 1}]
    assert unpack_records(["no record"]) == ["no record"]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    "lie",
    [
        {"values": [1, np.zeros((2**16, 0))]},
        {"values": [2, np.zeros(2**10, "V0")]},
        {"values": [3, [["x"], [[1, np.zeros((2**16, 0))]]]]},
        {"values": [4, [[list(range(100)), np.zeros((100, 0))]]]},
        {"which": np.zeros((2**16, 0), np.int64), "layouts": np.zeros(1)},
    ],
    ids=["rows", "scalars", "within dicts", "forms", "layouts"],
)
def test_a_few_bytes_do_not_tell_of_millions(lie: dict[str, Any]) -> None:
    packed = {"layouts": [["a"]], "which": [0], "values": [0, [1]]}
    assert unpack_by_agent(packed) == [{"a": 1}]
    with pytest.raises((TypeError, ValueError)):
        unpack_by_agent(packed | lie)


def test_alike_arrays_travel_as_one() -> None:
    packed = pack_by_agent(CASES["one form"])
    assert [type(part) for part in packed["values"]] == [int, np.ndarray]
    assert packed["values"][1].shape == (4, 3)


def test_large_arrays_are_not_copied() -> None:
    packed = pack_by_agent(CASES["large"])
    assert packed["values"][1][0] is CASES["large"][0]["a"]


def test_arrays_that_arrive_are_the_receivers_own() -> None:
    first, second = unpack_by_agent(travelled(pack_by_agent(CASES["one form"])))
    first["a"][:] = -1
    assert first["b"].tolist() == ROWS[1].tolist()
    assert second["a"].tolist() == ROWS[2].tolist()


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), np.zeros(10_000), np.array(0.0), [0.0], (np.zeros(3),)],
    ids=["small", "large", "no axis", "list", "tuple"],
)
def test_a_copy_does_not_change_with_the_senders_values(value: Any) -> None:
    packed = pack_by_agent([{"a": value}], copy=True)
    inner = value[0] if isinstance(value, tuple) else value
    inner[... if isinstance(inner, np.ndarray) else 0] = 7.0
    (found,) = unpack_by_agent(packed)
    assert np.all(np.asarray(found["a"]) == 0.0)
