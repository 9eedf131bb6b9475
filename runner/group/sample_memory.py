"""Large columns of a sample go from a runner to its group through shared memory.

In a message they would be copied four times, into fresh memory each time. A group may offer a
runner a room, part of a memory in which the samples of all runners lie side by side
(`joint_memory.py`): columns that are made there need no copy at all. The others are copied into
memory of the runner that stays, and out of it when samples are joined. A runner writes there only
while its group waits for a sample, and the group reads it before it asks for the next one.
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

__all__ = ["MOST_ROOMS", "Place", "Placed", "Room", "SampleMemory", "fetch", "padded", "view_of"]

#: Bytes from which a column is placed there.
_LARGE = 32 * 1024
#: Columns begin at multiples of as many bytes.
_ALIGNMENT = 64
#: How much more than is needed is reserved, as samples differ.
_SLACK = 1.25
#: Memories with rooms at one time: the group's caller has one sample while the next is taken.
MOST_ROOMS = 2


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    #: Whether that is in the memory of the runner's room, and not its own.
    in_room: bool = False


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group wants the large columns of a runner's next sample."""

    #: Which memory.
    number: int
    #: Number of the parcel with its descriptor; 0: the runner knows it.
    parcel: int = 0
    #: Of that memory, in bytes.
    size: int
    places: list[Place]


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
        receive_fd: Returns the descriptor that came as the parcel of a given number.
    """

    def __init__(
        self, send_fd: Callable[[int], int], receive_fd: Callable[[int], int] | None = None
    ) -> None:
        self._send_fd = send_fd
        self._receive_fd = receive_fd
        self._arena: Arena | None = None
        self._rooms: dict[int, Arena] = {}
        #: The room of the present sample: its memory, and where nothing was made yet.
        self._buffer: Any = None
        self._vacant: list[Place] = []
        #: What was made there.
        self._made: list[tuple[npt.NDArray[Any], Place]] = []

    def enter(self, room: Room | None) -> None:
        """A sample begins, with that room for it; `place` ends it."""
        self._leave()
        if room is None:
            return
        if room.parcel:
            assert self._receive_fd is not None
            arena = Arena.attach(self._receive_fd(room.parcel), room.size)
            self._rooms[room.number] = arena
            while len(self._rooms) > MOST_ROOMS:
                self._rooms.pop(next(iter(self._rooms))).close()
        self._buffer = self._rooms[room.number].buffer
        self._vacant = list(room.places)

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an array of the room, where one like that is wanted; its content is arbitrary."""
        for index, place in enumerate(self._vacant):
            if place.shape == shape and place.dtype == dtype.str:
                del self._vacant[index]
                array = view_of(self._buffer, place)
                self._made.append((array, place))
                return array
        return None

    def place(self, tree: Tree) -> Placed:
        """Copy large arrays of `tree` to shared memory, but for those that are there already.

        All stay in the tree if there is too little memory.
        """
        arrays: list[npt.NDArray[Any]] = []
        places: list[Place | None] = []

        def choose(leaf: npt.NDArray[Any]) -> Any:
            if leaf.nbytes < _LARGE or leaf.dtype.kind not in "biufcSU":
                return leaf
            arrays.append(leaf)
            places.append(self._in_room(leaf))
            return len(arrays) - 1

        numbered = map_tree(choose, tree)
        self._leave()
        others = [array for array, place in zip(arrays, places, strict=True) if place is None]
        if not others:
            return Placed(numbered, [place for place in places if place is not None])
        parcel = 0
        offsets = list(itertools.accumulate((padded(leaf.nbytes) for leaf in others), initial=0))
        if self._arena is None or self._arena.size < offsets[-1]:
            self._close_own()
            try:
                self._arena = Arena.create(int(offsets[-1] * _SLACK))
            except ConfigError:  # too little memory: the messages' way needs less for longer
                return Placed(tree, [])
            parcel = self._send_fd(self._arena.fd)
        begins = iter(offsets)
        found = []
        for array, place in zip(arrays, places, strict=True):
            if place is None:
                place = Place(next(begins), array.dtype.str, array.shape)
                view_of(self._arena.buffer, place)[...] = array
            found.append(place)
        return Placed(numbered, found, parcel, self._arena.size if parcel else 0)

    def close(self) -> None:
        """Let go of the memory."""
        self._leave()
        self._close_own()
        for arena in self._rooms.values():
            arena.close()
        self._rooms.clear()

    def _in_room(self, leaf: npt.NDArray[Any]) -> Place | None:
        """Return where an array is in the room, or was copied to."""
        for made, place in self._made:
            if made is leaf:
                return place
        array = self.make(leaf.shape, leaf.dtype)
        if array is None:
            return None
        array[...] = leaf
        return self._made[-1][1]

    def _leave(self) -> None:
        self._buffer = None
        self._vacant.clear()
        self._made.clear()

    def _close_own(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def fetch(
    tree: Tree,
    places: list[Place],
    arena: Arena | None,
    room: Callable[[Place], npt.NDArray[Any]] | None = None,
) -> Tree:
    """Return `tree` with its arrays, which are views.

    Args:
        tree: As it was placed.
        places: Likewise.
        arena: The runner's own memory; what is there is overwritten by its next sample.
        room: Returns what is at a place in the runner's room.
    """
    if not places:
        return tree

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, int):
            return leaf
        place = places[leaf]
        if place.in_room:
            assert room is not None
            return room(place)
        assert arena is not None
        return view_of(arena.buffer, place)

    return map_tree(look, tree)


def padded(nbytes: int) -> int:
    """Return after how many bytes another column can begin."""
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def view_of(buffer: Any, place: Place) -> npt.NDArray[Any]:
    """Return the array at a place of a buffer."""
    view: npt.NDArray[Any] = np.ndarray(place.shape, np.dtype(place.dtype), buffer, place.offset)
    return view
