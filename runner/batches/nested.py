"""Nested dicts and tuples of arrays: the form of observations, actions and policy states.

Pure. A *tree* is an array, or a dict or tuple of trees; anything else is a leaf that becomes an
array. Leaves out spaces (`actors/spaces/spaces.py`) and what trees look like on the wire
(`bus/wire/dynamic_values.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "ArrayBuffer",
    "JoinArrays",
    "Tree",
    "TreeBuffer",
    "as_rows",
    "concatenate_trees",
    "leaves_of",
    "map_tree",
    "row_of",
]

#: An array, or nested dicts and tuples of arrays.
Tree: TypeAlias = Any
#: Makes one array with the rows of all.
JoinArrays: TypeAlias = "Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]]"

#: Kinds of dtype that a column of numbers has: bool, integers, floats, complex, times.
_NUMBERS = frozenset("biufcmM")
#: A tuple is asked in a quarter of the time of a union.
_ARRAYS = (np.ndarray, np.generic)


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return a tree like `tree` with `function(leaf, *leaves of others)` in each place."""
    if isinstance(tree, dict):
        return {
            key: map_tree(function, part, *(other[key] for other in others))
            for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple(map_tree(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


def leaves_of(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)`; paths read `obs['image'][0]` if `path` is `obs`."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from leaves_of(part, f"{path}[{key!r}]")
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            yield from leaves_of(part, f"{path}[{index}]")
    else:
        yield path, tree


def row_of(rows: Tree, index: int, *, ragged: bool = False) -> Tree:
    """Return one row of a batch."""
    if ragged or not isinstance(rows, (dict, tuple)):
        return rows[index]
    return map_tree(lambda leaf: leaf[index], rows)


def as_rows(singles: Sequence[Any]) -> npt.NDArray[np.object_]:
    """Return elements of a space without a fixed size as an array of objects, `(rows,)`."""
    rows = np.empty(len(singles), np.object_)
    for index, single in enumerate(singles):
        rows[index] = single
    return rows


def concatenate_trees(trees: Sequence[Tree], path: str, join: JoinArrays = np.concatenate) -> Tree:
    """Return one tree with the rows of all, in their order, as `join` does: in new memory.

    Raises:
        ValueError: There are none, or they differ in structure, or in the shape of a row.
    """
    first = trees[0]
    if isinstance(first, dict):
        for tree in trees:
            if not isinstance(tree, dict) or tree.keys() != first.keys():
                raise ValueError(f"{path} has the keys {list(first)} in one part and not in all")
        return {
            key: concatenate_trees([tree[key] for tree in trees], f"{path}[{key!r}]", join)
            for key in first
        }
    if isinstance(first, tuple):
        for tree in trees:
            if not isinstance(tree, tuple) or len(tree) != len(first):
                raise ValueError(f"{path} is a tuple of {len(first)} in one part and not in all")
        return tuple(
            concatenate_trees([tree[index] for tree in trees], f"{path}[{index}]", join)
            for index in range(len(first))
        )
    for tree in trees:
        if not isinstance(tree, np.ndarray) or tree.shape[1:] != first.shape[1:]:
            other = tree.shape[1:] if isinstance(tree, np.ndarray) else type(tree).__name__
            raise ValueError(f"rows of {path} have shape {first.shape[1:]} and {other}")
    return join(trees)


class ArrayBuffer:
    """Rows of equal shape in one array that doubles when it is full; what is appended is copied.

    The dtype is that of the first value, and widens where a later one needs it.

    Args:
        capacity: Rows to make room for at first.
        ragged: Values of any kind, kept as they are in an array of objects.
    """

    __slots__ = ("_array", "_dtype", "_ragged", "_scalar", "_shape", "_size")

    def __init__(self, first: Any, capacity: int, *, ragged: bool = False) -> None:
        value = np.asarray(None) if ragged else np.asarray(first)
        # Strings and other objects have no array form that would be of use.
        self._ragged = ragged or value.dtype.kind not in _NUMBERS
        self._shape: tuple[int, ...] = () if self._ragged else value.shape
        self._dtype: np.dtype[Any] = np.dtype(object) if self._ragged else value.dtype
        self._array: npt.NDArray[Any] = np.zeros((max(capacity, 1), *self._shape), self._dtype)
        #: What a row surely is that needs no check.
        self._scalar = self._scalar_type()
        self._size = 0
        self.append(first)

    def __len__(self) -> int:
        return self._size

    def append(self, value: Any) -> None:
        """Add a row.

        Raises:
            ValueError: Its shape is not that of the rows before.
        """
        size = self._size
        if size == len(self._array):
            grown = np.zeros((2 * size, *self._shape), self._dtype)
            grown[:size] = self._array
            self._array = grown
        if not self._ragged and type(value) is not self._scalar:
            if not isinstance(value, _ARRAYS):
                value = np.asarray(value)
            if value.shape != self._shape:
                raise ValueError(f"has shape {value.shape}, earlier ones {self._shape}")
            if value.dtype is not self._dtype and value.dtype != self._dtype:
                self._widen(value.dtype)
        self._array[size] = value
        self._size = size + 1

    def append_blank(self) -> None:
        """Add a row of zeros, or None where rows are objects."""
        self.append(None if self._ragged else np.zeros(self._shape, self._dtype))

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return a view of some rows, `(stop - start, *shape)`."""
        return self._array[start:stop]

    def behind(self, start: int) -> ArrayBuffer:
        """Return a buffer of the rows from `start` on; it shares them."""
        rest = copy.copy(self)
        rest._array, rest._size = self._array[start:], self._size - start
        return rest

    def _scalar_type(self) -> type[Any] | None:
        # Times of one type may have different units.
        fits = not self._ragged and not self._shape and self._dtype.kind not in "mM"
        return self._dtype.type if fits else None

    def _widen(self, dtype: np.dtype[Any]) -> None:
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"has dtype {dtype}, earlier ones {self._dtype}")
        wider = np.result_type(dtype, self._dtype)
        if wider != self._dtype:
            self._array = self._array.astype(wider)
            self._dtype = wider
            self._scalar = self._scalar_type()


class TreeBuffer:
    """Rows of trees of one structure, that of the first: an `ArrayBuffer` per leaf."""

    __slots__ = ("_keys", "_kind", "_parts")

    def __init__(self, first: Tree, capacity: int) -> None:
        self._kind: type[dict[Any, Any]] | type[tuple[Any, ...]] = (
            dict if isinstance(first, dict) else tuple
        )
        self._keys = list(first) if isinstance(first, dict) else list(range(len(first)))
        self._parts = [buffer_for(first[key], capacity) for key in self._keys]

    def __len__(self) -> int:
        return len(self._parts[0]) if self._parts else 0

    def append(self, value: Tree) -> None:
        """Add a row.

        Raises:
            ValueError: Its structure, or the shape of a leaf, is not that of the rows before.
        """
        if not isinstance(value, self._kind) or len(value) != len(self._keys):
            raise ValueError(f"is not a {self._kind.__name__} with {self._keys} like earlier ones")
        for key, part in zip(self._keys, self._parts, strict=True):
            try:
                part.append(value[key])
            except (KeyError, ValueError) as exc:
                reason = "is missing" if isinstance(exc, KeyError) else str(exc)
                raise ValueError(f"[{key!r}] {reason}") from None

    def append_blank(self) -> None:
        """Add a row of zeros."""
        for part in self._parts:
            part.append_blank()

    def rows(self, start: int, stop: int) -> Tree:
        """Return a tree of views of some rows."""
        views = [part.rows(start, stop) for part in self._parts]
        if self._kind is tuple:
            return tuple(views)
        return dict(zip(self._keys, views, strict=True))

    def behind(self, start: int) -> TreeBuffer:
        """Return a buffer of the rows from `start` on; it shares them."""
        rest = copy.copy(self)
        rest._parts = [part.behind(start) for part in self._parts]
        return rest


def buffer_for(first: Tree, capacity: int, *, ragged: bool = False) -> ArrayBuffer | TreeBuffer:
    """Return a buffer that holds `first` as its only row, with room for `capacity` rows."""
    if not ragged and isinstance(first, dict | tuple) and first:
        return TreeBuffer(first, capacity)
    return ArrayBuffer(first, capacity, ragged=ragged)
