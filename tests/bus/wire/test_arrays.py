from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from envbus.bus.errors import DecodeError
from envbus.bus.wire.arrays import (
    describe,
    from_buffer,
    layout_of,
    parse_dtype,
    to_parts,
)
from tests.bus.codec_samples import arrays, identical

NESTED_OBJECT = np.dtype([("a", [("b", "i4"), ("c", "O", (2,))])])


def from_parts(dtype: np.dtype[Any], shape: object, order: object, data: Any) -> npt.NDArray[Any]:
    return from_buffer(layout_of(dtype, shape, order), data)


@given(arrays())
def test_every_dtype_without_objects_survives_in_every_layout(array: npt.NDArray[Any]) -> None:
    descriptor = describe(array.dtype)
    shape, order, data = to_parts(array)
    copy = from_parts(parse_dtype(descriptor), shape, order, bytes(data))
    assert copy.dtype == array.dtype
    assert identical(copy, array)
    assert not copy.flags.writeable


@given(st.lists(arrays(), max_size=3))
def test_a_descriptor_is_made_of_plain_values(several: list[npt.NDArray[Any]]) -> None:
    def check(value: object) -> None:
        assert type(value) in (str, int, bool, list, dict, type(None))
        children = list(value.values()) if isinstance(value, dict) else value
        for child in children if isinstance(children, list) else ():
            check(child)

    for array in several:
        check(describe(array.dtype))


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        NESTED_OBJECT,
        np.dtype((object, (3,))),
        np.dtype((np.record, [("a", "i4")])),
        np.dtype({"names": ["a"], "formats": ["i4"], "titles": [(1, 2)]}),
    ],
    ids=str,
)
def test_a_dtype_that_would_change_or_holds_objects_has_no_descriptor(
    dtype: np.dtype[Any],
) -> None:
    assert describe(dtype) is None


def test_strings_of_variable_width_have_no_descriptor() -> None:
    dtypes = getattr(np, "dtypes", None)  # NumPy 1.26 has no StringDType
    if not hasattr(dtypes, "StringDType"):
        pytest.skip("this NumPy has no StringDType")
    assert describe(np.dtypes.StringDType()) is None


def test_offsets_titles_and_alignment_survive() -> None:
    dtype = np.dtype(
        {
            "names": ["a", "b"],
            "formats": ["<i4", ">f8"],
            "offsets": [4, 16],
            "titles": ["first", None],
            "itemsize": 32,
        }
    )
    assert parse_dtype(describe(dtype)) == dtype
    aligned = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    assert parse_dtype(describe(aligned)).isalignedstruct


@pytest.mark.parametrize(
    "descriptor",
    [
        "O",
        "|O",
        "|O8",
        "O8",
        "object",
        "i4,O",
        "(2,)<f8",
        "f8",
        "",
        ",",
        "<f3",
        "<f99",
        "|S99999999999",
        "<U9999999999",
        "<M8[parsec]",
        "<M8[99999999999s]",
        "\ud800",
        b"<f4",
        None,
        3,
        [["a", "<i4"]],
        {},
        {"base": "|O", "shape": [2]},
        {"base": "<i4", "shape": [-1]},
        {"base": "<i4", "shape": [2**40]},
        {"base": "<i4"},
        {"names": ["a"], "formats": ["|O"], "offsets": [0], "itemsize": 8},
        {"names": ["a"], "formats": ["<i8"], "offsets": [0], "itemsize": 4},
        {"names": ["a"], "formats": ["<i8"], "offsets": [-8], "itemsize": 8},
        {"names": ["a", "a"], "formats": ["<i4", "<i4"], "offsets": [0, 4], "itemsize": 8},
        {"names": ["a"], "formats": [], "offsets": [], "itemsize": 0},
        {"names": [1], "formats": ["<i4"], "offsets": [0], "itemsize": 4},
        {"names": ["a"], "formats": ["<i4"], "offsets": [0], "itemsize": 2**70},
        {"names": ["a"], "formats": ["<i4"], "offsets": [0], "itemsize": 4, "x": 1},
    ],
)
def test_a_bad_descriptor_is_a_decode_error(descriptor: object) -> None:
    with pytest.raises(DecodeError, match=r"not a|does not exist"):
        parse_dtype(descriptor)


def test_a_descriptor_cannot_nest_for_ever() -> None:
    descriptor: object = "<i4"
    for _ in range(100):
        descriptor = {"base": descriptor, "shape": [1]}
    with pytest.raises(DecodeError, match="not a dtype"):
        parse_dtype(descriptor)


@pytest.mark.parametrize(
    ("shape", "order", "size"),
    [
        ([2, 2], "C", 15),
        ([2, 2], "C", 17),
        ([-1, -4], "C", 16),
        ([-1], "C", 0),
        ([2.0, 2], "C", 16),
        ([True, 4], "C", 16),
        ([2**40, 2**40], "C", 0),
        ([0, 2**63], "C", 0),
        ([2**70, 0], "C", 0),
        ([1] * 65, "C", 4),
        ([4], "A", 16),
        ([4], None, 16),
        ((4,), "C", 16),
        (4, "C", 16),
        (None, "C", 16),
    ],
)
def test_shape_order_and_bytes_must_fit(shape: object, order: object, size: int) -> None:
    with pytest.raises(DecodeError):
        from_parts(np.dtype("<i4"), shape, order, bytes(size))


def test_an_array_of_items_without_bytes_cannot_be_huge() -> None:
    assert from_parts(np.dtype("V0"), [3], "C", b"").shape == (3,)
    huge = (("V0", [2**40]), ("S0", [2**17]), ("V0", [2**9, 2**9]), ("f4", [0, 2**40]))
    for dtype, shape in huge:
        with pytest.raises(DecodeError, match="too large to hold nothing"):
            from_parts(np.dtype(dtype), shape, "C", b"")


def test_a_contiguous_array_is_not_copied() -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3)))):
        shape, order, data = to_parts(array)
        assert np.shares_memory(np.frombuffer(data, np.uint8), array)
        assert np.shares_memory(from_parts(array.dtype, shape, order, data), array)


def test_an_unaligned_buffer_gives_an_aligned_array() -> None:
    data = memoryview(bytearray(81))[1:]
    array = from_parts(np.dtype("<f8"), [10], "C", data)
    assert array.flags.aligned
    assert not array.flags.writeable


def test_a_writable_array_is_the_callers_own() -> None:
    data = bytearray(math.prod((2, 3)) * 4)
    array = from_buffer(layout_of(np.dtype("<f4"), [2, 3], "F"), data, writable=True)
    array[...] = 1
    assert array.flags.f_contiguous
    assert not any(data)
