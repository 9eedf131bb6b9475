from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.arrays.rows import Cell, ObservationRows
from envbus.actors.spaces.spaces import Space, leaves
from tests.actors.driver import Anything
from tests.envs import discrete


def prepared(space: Space, num_slots: int = 2) -> tuple[ObservationRows, list[np.ndarray]]:
    arrays = [np.zeros((num_slots, *leaf.shape), leaf.dtype) for leaf in leaves(space)]
    return ObservationRows(space, arrays, num_slots, first_env_id=10), arrays


def write(rows: ObservationRows, slot: int, observation: Anything) -> None:
    rows.rows[slot][...] = rows.convert(slot, observation)


@pytest.mark.parametrize(
    ("space", "observation", "expected"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), np.ones(2, np.float32), [1.0, 1.0]),
        (spaces.Box(-1, 1, (2,), np.float32), np.full(2, 0.5), [0.5, 0.5]),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 1], [0.5, 1.0]),
        (spaces.Box(-1, 1, (2,), np.float32), (True, False), [1.0, 0.0]),
        (spaces.Box(-1, 1, (), np.float32), 0.5, 0.5),
        (spaces.Box(-9, 9, (2,), np.int16), [3, 4], [3, 4]),
        (spaces.Discrete(5), 3, 3),
        (spaces.Discrete(5), np.int64(3), 3),
        (spaces.Discrete(5), np.int32(3), 3),
        (spaces.Discrete(5), np.array(3), 3),
        (discrete(5, dtype=np.int8), 3, 3),
        (spaces.MultiBinary(2), [1, 0], [1, 0]),
    ],
)
def test_what_gymnasium_stacks_is_taken(
    space: Space, observation: Anything, expected: Anything
) -> None:
    rows, arrays = prepared(space)
    write(rows, 1, observation)
    assert arrays[0][1].tolist() == expected
    assert not arrays[0][0].any()
    out = np.zeros((1, *arrays[0].shape[1:]), arrays[0].dtype)
    np.stack([observation], out=out)
    assert out[0].tolist() == expected


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (
            spaces.Box(-1, 1, (4,), np.float32),
            np.zeros(3, np.float32),
            r"env 11: observation is a ndarray of shape \(3,\) and dtype float32, but its "
            r"observation space needs shape \(4,\) and dtype float32",
        ),
        (spaces.Box(-1, 1, (4,), np.float32), 0.0, r"a float of shape \(\) and dtype float64"),
        (spaces.Box(-1, 1, (1,), np.float32), 0.5, r"needs shape \(1,\)"),
        (spaces.Box(0, 9, (2,), np.uint8), [1.5, 2.5], r"dtype float64, but .* dtype uint8"),
        (spaces.Discrete(5), 2.0, r"dtype float64, but .* dtype int64"),
        (spaces.Discrete(5), None, r"is a NoneType of shape \(\) and dtype object"),
        (spaces.Discrete(5), "a", r"is a str of"),
        (spaces.Box(-1, 1, (2,), np.float32), [[1], [1, 2]], r"is a list, but"),
    ],
)
def test_what_does_not_fit_is_named(space: Space, observation: Anything, message: str) -> None:
    rows, arrays = prepared(space)
    with pytest.raises(ValueError, match=message):
        write(rows, 1, observation)
    assert not arrays[0].any()


def test_a_number_that_is_too_large_is_refused() -> None:
    rows, _ = prepared(spaces.Discrete(5))
    with pytest.raises(OverflowError):
        write(rows, 1, 2**80)


NESTED = spaces.Dict(a=spaces.Box(0, 9, (2,), np.int64), b=spaces.Tuple((spaces.Discrete(3),)))


def test_all_arrays_of_a_nested_observation_are_written() -> None:
    rows, arrays = prepared(NESTED)
    assert rows.dtype is None
    write(rows, 1, {"a": np.array([1, 2]), "b": (2,), "not in the space": 3})
    assert [array.tolist() for array in arrays] == [[[0, 0], [1, 2]], [0, 2]]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"a": np.array([1, 2])}, r"env 11: observation\['b'\]\[0\] is nothing, but"),
        ({"a": np.array([1, 2]), "b": ()}, r"observation\['b'\]\[0\] is nothing"),
        ({"a": np.array([1, 2]), "b": (0.5,)}, r"observation\['b'\]\[0\] is a float of shape"),
        (None, r"observation\['a'\] is nothing"),
    ],
)
def test_a_bad_part_is_named_and_nothing_is_written(observation: Anything, message: str) -> None:
    rows, arrays = prepared(NESTED)
    with pytest.raises(ValueError, match=message):
        write(rows, 1, observation)
    assert not any(array.any() for array in arrays)


def test_observations_without_a_fixed_size_are_kept_as_they_are() -> None:
    rows = ObservationRows(spaces.Text(3), None, 2, first_env_id=0)
    assert rows.is_ragged
    observation = object()
    write(rows, 1, observation)
    assert isinstance(rows.rows[1], Cell)
    assert rows.rows[1].value is observation
    assert rows.rows[0].value is None


@pytest.mark.parametrize(
    "observation",
    [
        {"box": np.zeros(3), "text": "a"},
        {"box": np.zeros(2, complex), "text": "a"},
        {"text": "a"},
        None,
    ],
)
def test_what_could_not_be_batched_beside_others_is_refused(observation: Anything) -> None:
    space = spaces.Dict(box=spaces.Box(-1, 1, (2,), np.float32), text=spaces.Text(3))
    rows = ObservationRows(space, None, 2, first_env_id=10)
    fits = {"box": [0.5, 1], "text": "a"}
    write(rows, 1, fits)
    assert rows.rows[1].value == fits
    with pytest.raises(ValueError, match=r"env 11: observation is .* does not fit"):
        write(rows, 1, observation)
    assert rows.rows[1].value == fits


def test_big_endian_arrays_are_written() -> None:
    rows, arrays = prepared(spaces.Box(0, 9, (2,), np.float32))
    write(rows, 0, np.array([1, 2], ">f4"))
    assert arrays[0][0].tolist() == [1.0, 2.0]


def test_a_subclass_of_ndarray_is_written() -> None:
    rows, arrays = prepared(spaces.Box(0, 9, (2,), np.float32))
    write(rows, 0, np.ma.masked_array([1, 2], dtype=np.float32))
    assert arrays[0][0].tolist() == [1.0, 2.0]


def test_integers_that_would_become_others_are_refused() -> None:
    rows, arrays = prepared(spaces.Box(-100, 100, (2,), np.int8))
    write(rows, 0, np.array([1, -100]))
    assert arrays[0][0].tolist() == [1, -100]
    with pytest.raises(ValueError, match=r"dtype int64 with 1 to 300 in it, but .* dtype int8"):
        write(rows, 0, np.array([1, 300]))
    assert arrays[0][0].tolist() == [1, -100]
