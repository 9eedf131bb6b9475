"""Large columns of a sample go from a runner to its group through shared memory.

In a message they would be copied four times, into fresh memory each time; so they are copied
into memory that stays, and out of it when samples are joined. A runner writes there only while
its group waits for a sample, and the group reads it before it asks for the next one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.bus.arena import Arena
from envbus.bus.errors import ConfigError
from envbus.runner.nested import Tree, map_tree

__all__ = ["Place", "Placed", "SampleMemory", "fetch"]

#: Bytes from which a column is placed there.
_LARGE = 32 * 1024
#: Columns begin at multiples of as many bytes.
_ALIGNMENT = 64
#: How much more than is needed is reserved, as samples differ.
_SLACK = 1.25


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Placed(msgspec.Struct, frozen=True):
    """A tree in which numbers stand for arrays: indices of `places`."""

    tree: Tree
    places: list[Place]
    #: Number of the parcel with the descriptor of other memory than before; 0: it is the same.
    parcel: int = 0
    #: Of that memory, in bytes.
    size: int = 0


class SampleMemory:
    """The runner's side.

    Args:
        send_fd: Hands a descriptor to the group, and returns the parcel's number.
    """

    def __init__(self, send_fd: Callable[[int], int]) -> None:
        self._send_fd = send_fd
        self._arena: Arena | None = None

    def place(self, tree: Tree) -> Placed:
        """Copy large arrays of `tree` to shared memory; all stay in the tree if there is none."""
        arrays: list[npt.NDArray[Any]] = []

        def choose(leaf: npt.NDArray[Any]) -> Any:
            if leaf.nbytes < _LARGE or leaf.dtype.kind not in "biufcSU":
                return leaf
            arrays.append(leaf)
            return len(arrays) - 1

        numbered = map_tree(choose, tree)
        sizes = [math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT for array in arrays]
        offsets = list(itertools.accumulate(sizes, initial=0))
        if not arrays:
            return Placed(tree, [])
        parcel = 0
        if self._arena is None or self._arena.size < offsets[-1]:
            self.close()
            try:
                self._arena = Arena.create(int(offsets[-1] * _SLACK))
            except ConfigError:  # too little memory: the messages' way needs less for longer
                return Placed(tree, [])
            parcel = self._send_fd(self._arena.fd)
        places = []
        for array, offset in zip(arrays, offsets, strict=False):
            place = Place(offset, array.dtype.str, array.shape)
            _view(self._arena, place)[...] = array
            places.append(place)
        return Placed(numbered, places, parcel, self._arena.size if parcel else 0)

    def close(self) -> None:
        """Let go of the memory."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def fetch(tree: Tree, places: list[Place], arena: Arena | None) -> Tree:
    """Return `tree` with its arrays, which are views of `arena` until the next sample."""
    if not places:
        return tree
    assert arena is not None

    def look(leaf: Any) -> Any:
        return _view(arena, places[leaf]) if isinstance(leaf, int) else leaf

    return map_tree(look, tree)


def _view(arena: Arena, place: Place) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = np.ndarray(
        place.shape, np.dtype(place.dtype), arena.buffer, place.offset
    )
    return view
