"""Payloads, strategies and an exact comparison for the tests of the codec."""

from __future__ import annotations

import struct
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgspec
import numpy as np
import numpy.typing as npt

from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.dynamic_values import Value
from envbus.bus.wire.messages import Reply, Tree

__all__ = ["Sample", "arrays", "identical", "round_trip", "values"]


class Sample(Reply, frozen=True, kw_only=True):
    """One field of each kind that the codec treats on its own."""

    tree: Tree | None = None
    trees: list[Tree] = msgspec.field(default_factory=list)
    array: npt.NDArray[Any] | None = None
    rewards: npt.NDArray[np.float64] | None = None
    arrays: list[npt.NDArray[Any]] | None = None
    text: str = ""
    number: int = 0
    scale: float = 0.0
    data: bytes = b""


def round_trip(value: object) -> Value:
    """Return what a receiver gets for `value` in a tree."""
    tree = decode(Sample, encode(Sample(tree=Tree(value)))).tree
    assert tree is not None
    return tree.value


def identical(one: Value, other: Value) -> bool:
    """Whether both are the same down to types, bits, order of keys and memory layout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (
            describe_array(one) == describe_array(other)
            and one.dtype == other.dtype
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if type(one) is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if type(one) is complex:
        return identical(one.real, other.real) and identical(one.imag, other.imag)
    if type(one) is dict:
        return identical([list(item) for item in one.items()], [list(i) for i in other.items()])
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def describe_array(array: npt.NDArray[Any]) -> tuple[object, ...]:
    """What equal bytes do not show. Arrays of neither order arrive in C order."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return array.shape, array.dtype.str, array.dtype.isalignedstruct, fortran


plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(max_len=9),
    hnp.unicode_string_dtypes(endianness="?", max_len=9),
    st.integers(0, 9).map(lambda size: np.dtype(f"V{size}")),
)


@st.composite
def structured_dtypes(draw: st.DrawFn) -> np.dtype[Any]:
    items = plain_dtypes.filter(lambda dtype: dtype.itemsize > 0)  # NumPy refuses subarrays of V0
    fields = hnp.array_dtypes(items, max_size=4, allow_subarrays=True)
    return np.dtype(draw(fields | hnp.array_dtypes(fields, max_size=3)), align=draw(st.booleans()))


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Arrays of any dtype without objects, any layout, small or out of band, of any bits."""
    dtype = draw(plain_dtypes | structured_dtypes())
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12))
    size = int(np.prod(shape)) * dtype.itemsize
    bits = draw(st.binary(min_size=min(size, 64), max_size=min(size, 64)))
    data = (bits * (size // len(bits) + 1))[:size] if bits else b""
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, bytearray(data))
    layout = draw(st.sampled_from(["C", "F", "strided", "transposed", "reversed"]))
    if layout == "F":
        return array.copy(order="F")
    if layout == "strided":
        return array[..., ::2] if array.ndim else array
    if layout == "transposed":
        return array.T
    return array[::-1] if layout == "reversed" and array.ndim else array


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic:
    dtype = draw(plain_dtypes | structured_dtypes())
    bits = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    if dtype.kind in "US":  # arrays cut zeros at the end, scalars keep them
        text = draw(st.text(max_size=5) if dtype.kind == "U" else st.binary(max_size=5))
        return np.str_(text) if isinstance(text, str) else np.bytes_(text)
    scalar: np.generic = np.ndarray((), dtype, bits)[()]
    return scalar


texts = st.text(st.characters(codec=None), max_size=8)
keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=8)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
    | st.text(max_size=3).map(np.str_),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
leaves = (
    keys
    | st.floats()
    | st.complex_numbers()
    | numpy_scalars()
    | arrays()
    | st.binary(min_size=4000, max_size=4200)
    | st.integers(-(2**200), 2**200)
)
#: Whatever a tree may hold that crosses a socket.
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.fixed_dictionaries({b"nd": inner, b"type": inner})
    ),
    max_leaves=12,
)
