"""NumPy arrays as a descriptor plus raw bytes, for every dtype that holds no references.

Pure: turns arrays into descriptors and memory views, and back. Which frame the bytes travel in is
decided in `dynamic_values.py`. Whatever a descriptor says is checked before NumPy sees it; `object`
dtype has no spelling here, so it cannot come in.
"""

from __future__ import annotations

import math
import re
import reprlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from envbus.bus.errors import DecodeError
from envbus.bus.wire.frames import Buffer

__all__ = [
    "SCALAR_TYPES",
    "Layout",
    "checked_shape",
    "describe",
    "from_buffer",
    "layout_of",
    "num_fields",
    "parse_dtype",
    "to_parts",
]

#: What a dtype looks like on the wire: `"<f4"`, or a map for structured dtypes and subarrays.
Descriptor: TypeAlias = "str | dict[str, Any]"
T = TypeVar("T")
Array: TypeAlias = npt.NDArray[Any]

#: Scalar types whose `dtype.str` says everything there is to say. Leaves out `object_`, NumPy's
#: variable-width strings, and dtypes of other packages such as bfloat16.
SCALAR_TYPES: frozenset[type[np.generic]] = frozenset(
    np.dtype(code).type for code in np.typecodes["All"] if code != "O"
)
#: `dtype.str` of those types, and nothing else: no `O`, no `"i4,O"`, no `"(2,)f8"`.
_PLAIN_DTYPE = re.compile(
    r"[<>|](?:[biufc]\d{1,2}|[SUV]\d{1,10}|[mM]8(?:\[\d{0,10}[A-Za-z]{1,2}\])?)"
)
#: NumPy 1 allows 32 dimensions, NumPy 2 allows 64.
_MAX_DIMENSIONS = 64
#: Structured dtypes within structured dtypes; real ones have two or three.
_MAX_DTYPE_DEPTH = 16
#: Buffers that their sender, in this process, may still have.
_MAY_BE_SHARED = frozenset({bytes, bytearray, memoryview, np.ndarray})
#: Elements of an array whose items have no bytes, which no byte count bounds: whatever converts
#: them makes bytes of them.
_MAX_EMPTY_ITEMS = 2**16
#: Longest side of an array that has no elements: who goes along it would take for ever.
_MAX_EMPTY_SIZE = 2**24


def describe(dtype: np.dtype[Any]) -> Descriptor | None:
    """Return the wire's spelling of `dtype`, or None if it cannot be spelled."""
    if dtype.hasobject:
        return None
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = describe(base)
        return None if inner is None else {"base": inner, "shape": list(shape)}
    if dtype.names is not None:
        return _describe_fields(dtype)
    return dtype.str if dtype.type in SCALAR_TYPES else None


def _describe_fields(dtype: np.dtype[Any]) -> Descriptor | None:
    names = dtype.names or ()
    fields: Any = dtype.fields or {}
    formats = [describe(fields[name][0]) for name in names]
    titles = [fields[name][2] if len(fields[name]) > 2 else None for name in names]
    if dtype.type is not np.void or None in formats:  # np.record would come back as np.void
        return None
    if not all(title is None or type(title) is str for title in titles):
        return None
    descriptor: dict[str, Any] = {
        "names": list(names),
        "formats": formats,
        "offsets": [fields[name][1] for name in names],
        "itemsize": dtype.itemsize,
    }
    if dtype.isalignedstruct:
        descriptor["aligned"] = True
    if any(title is not None for title in titles):
        descriptor["titles"] = titles
    return descriptor


def parse_dtype(descriptor: object, depth: int = 0) -> np.dtype[Any]:
    """Return the dtype that `descriptor` spells.

    Raises:
        DecodeError: It spells none, or one that holds references.
    """
    if type(descriptor) is str:
        return _parse_plain(descriptor)
    if type(descriptor) is not dict or depth >= _MAX_DTYPE_DEPTH:
        raise DecodeError(f"not a dtype: {_short(descriptor)}")
    try:
        dtype = _parse_map(descriptor, depth)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DecodeError(f"not a dtype: {_short(descriptor)} ({exc})") from exc
    if dtype.hasobject:  # cannot be spelled; stands here in case NumPy learns a new spelling
        raise DecodeError(f"dtype {dtype} holds Python objects; these are never decoded")
    return dtype


def num_fields(descriptor: object) -> int:
    """Return how many dtypes a structured one, or one of subarrays, is made of; 0: it is plain."""
    found, count = [descriptor], 0
    while found:
        item = found.pop()
        if type(item) is dict:
            count += 1
            found.append(item.get("base"))
            formats = item.get("formats")
            if type(formats) is list:
                count += len(formats)
                found += formats
    return count


@lru_cache(maxsize=256)  # a run has a handful
def _parse_plain(text: str) -> np.dtype[Any]:
    if not _PLAIN_DTYPE.fullmatch(text):
        hint = "; object dtype is never decoded" if "O" in text else ""
        raise DecodeError(f"not a dtype: {_short(text)}{hint}")
    try:
        return np.dtype(text)
    except (TypeError, ValueError) as exc:  # e.g. float128 on a machine without it
        raise DecodeError(f"dtype {_short(text)} does not exist on this machine") from exc


def _parse_map(fields: dict[Any, Any], depth: int) -> np.dtype[Any]:
    if set(fields) == {"base", "shape"}:
        return np.dtype((parse_dtype(fields["base"], depth + 1), _checked_shape(fields["shape"])))
    if not fields.keys() <= {"names", "formats", "offsets", "itemsize", "aligned", "titles"}:
        raise ValueError("unknown keys")
    spec: Any = {  # typed as several TypedDicts, none of which has optional keys
        "names": [_checked(str, name) for name in _checked(list, fields["names"])],
        "formats": [parse_dtype(f, depth + 1) for f in _checked(list, fields["formats"])],
        "offsets": [_checked(int, offset) for offset in _checked(list, fields["offsets"])],
        "itemsize": _checked(int, fields["itemsize"]),
        "aligned": _checked(bool, fields.get("aligned", False)),
    }
    titles = fields.get("titles")
    if titles is not None:
        spec["titles"] = [None if t is None else _checked(str, t) for t in titles]
    if any(offset < 0 for offset in spec["offsets"]) or spec["itemsize"] < 0:
        raise ValueError("negative offset or size")
    dtype: np.dtype[Any] = np.dtype(spec)
    return dtype


def to_parts(array: Array) -> tuple[list[int], str, memoryview | bytes]:
    """Return shape, order (`"C"` or `"F"`) and the raw bytes of `array`.

    The bytes are a view of the array's memory, one-dimensional and of format `B`, if the array
    is contiguous in either order, else a copy. `describe(array.dtype)` must not be None.
    """
    shape = list(array.shape)
    flags = array.flags
    order = "C"
    if not flags.c_contiguous:
        if flags.f_contiguous:
            array, order = array.T, "F"
        else:
            array = array.copy(order="C")
    if array.nbytes == 0:
        return shape, order, b""
    return shape, order, array.reshape(-1).view(np.uint8).data


class Layout(NamedTuple):
    """How the bytes of an array are to be read, checked."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    nbytes: int


def layout_of(dtype: np.dtype[Any], shape: object, order: object) -> Layout:
    """Return the layout that came over the wire.

    Raises:
        DecodeError: No array is like that.
    """
    sizes = _checked_shape(shape)
    if order != "C" and order != "F":
        raise DecodeError(f"array order must be C or F, not {_short(order)}")
    return Layout(dtype, sizes, order, _checked_nbytes(dtype, sizes))


def from_buffer(layout: Layout, data: Buffer, *, writable: bool = False) -> Array:
    """Return an array over `data`.

    Args:
        layout: Of the array.
        data: Contiguous buffer of exactly the bytes that the layout asks for.
        writable: Return an array that is the caller's own: over `data` if that is the receiver's
            (see `transport.Buffer`), else a copy. Otherwise the array is a read-only view, or,
            where `data` is not aligned for the dtype, a read-only copy.

    Raises:
        DecodeError: They do not fit each other.
    """
    dtype, sizes, order, nbytes = layout
    _check_size(dtype, sizes, nbytes, data)
    try:
        array: Array = np.ndarray(sizes, dtype, data, order=order)
    except (TypeError, ValueError, OverflowError) as exc:
        raise DecodeError(f"no array of {dtype} has shape {_short(sizes)}: {exc}") from exc
    flags = array.flags
    is_own = type(data) not in _MAY_BE_SHARED and flags.writeable
    if (writable and not is_own) or not flags.aligned:
        array = array.copy(order="K")
    if not writable:
        array.flags.writeable = False
    return array


def checked_shape(dtype: np.dtype[Any], shape: object, data: Buffer) -> tuple[int, ...]:
    """Return `shape` as a tuple, if an array of it and `dtype` has the size of `data`.

    Raises:
        DecodeError: It is no shape, or does not fit `data`.
    """
    sizes = _checked_shape(shape)
    _check_size(dtype, sizes, _checked_nbytes(dtype, sizes), data)
    return sizes


def _checked_nbytes(dtype: np.dtype[Any], sizes: tuple[int, ...]) -> int:
    count = math.prod(sizes)
    nbytes = count * dtype.itemsize
    if not nbytes and (count > _MAX_EMPTY_ITEMS or max(sizes, default=0) > _MAX_EMPTY_SIZE):
        raise DecodeError(f"array of {dtype}, shape {_short(sizes)} is too large to hold nothing")
    return nbytes


def _check_size(dtype: np.dtype[Any], sizes: tuple[int, ...], nbytes: int, data: Buffer) -> None:
    size = len(data) if type(data) is bytes else memoryview(data).nbytes
    if nbytes != size:
        raise DecodeError(
            f"array of {dtype}, shape {_short(sizes)} needs {nbytes} bytes, got {size}"
        )


def _checked_shape(shape: object) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise DecodeError(f"not a shape: {_short(shape)}")
    for size in shape:
        if type(size) is not int or size < 0:
            raise DecodeError(f"not a shape: {_short(shape)}")
    return tuple(shape)


def _checked(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError(f"{_short(value)} is not {kind.__name__}")
    return value


def _short(value: object) -> str:
    """`repr` for an error message, cut: the value came from somebody else."""
    return reprlib.repr(value)
