"""Memory of a group in which its runners' rows lie side by side.

To join what runners have delivered takes a copy of all of it, into fresh memory, and they wait
meanwhile. So, where samples are laid out as those before were, each runner is told where in one
piece of memory its rows are to be. A piece is used again once nobody has a sample in it.

Leaves out the runners' side (`sample_memory.py`).
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.bus.arena import Arena
from envbus.bus.errors import ConfigError
from envbus.runner.group.sample_memory import MOST_ROOMS, Place, Room, padded, view_of
from envbus.runner.group.shares import Share

__all__ = ["Asked", "JointMemory", "Layout"]

#: Of runners, and how much each was asked for.
Asked: TypeAlias = "Mapping[int, Share]"

#: Bytes of a sample from which on it is worth it.
_WORTHWHILE = 1 << 20


class Layout(NamedTuple):
    """What the large columns of a sample are like."""

    #: Runners in order, and how many rows each has.
    rows: tuple[tuple[int, int], ...]
    #: By column: dtype, and shape of a row.
    columns: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, places: Mapping[int, Sequence[Place]]) -> Layout | None:
        """Return what runners have delivered, by runner; None: columns do not lie side by side."""
        rows, columns = [], set()
        for runner, own in sorted(places.items()):
            counts = {place.shape[0] for place in own}
            if len(counts) != 1:
                return None
            rows.append((runner, counts.pop()))
            columns.add(tuple((place.dtype, place.shape[1:]) for place in own))
        return cls(tuple(rows), *columns) if len(columns) == 1 else None

    @property
    def size(self) -> int:
        """Bytes."""
        total = sum(count for _, count in self.rows)
        return sum(padded(total * _bytes_of_row(*column)) for column in self.columns)

    def places(self) -> dict[int, list[Place]]:
        """Return where the columns of each runner are to be: behind those of the one before it."""
        found: dict[int, list[Place]] = {runner: [] for runner, _ in self.rows}
        begin = 0
        for dtype, shape in self.columns:
            offset = begin
            for runner, count in self.rows:
                found[runner].append(Place(offset, dtype, (count, *shape), in_room=True))
                offset += count * _bytes_of_row(dtype, shape)
            begin += padded(offset - begin)
        return found


class _Piece:
    """Memory for one sample."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.arena = Arena.create(size)
        #: What all arrays in it have as their base.
        self.root: npt.NDArray[np.uint8] = np.frombuffer(self.arena.buffer, np.uint8)
        #: Runners that may write to it.
        self.writers: set[int] = set()

    def is_free(self) -> bool:
        # Two: its own, and the argument.
        return not self.writers and sys.getrefcount(self.root) <= 2


class JointMemory:
    """The group's side of it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pieces: list[_Piece] = []
        #: What was asked last, and what that was like.
        self._seen: tuple[Asked, Layout | None] = ({}, None)
        #: Whether it was so twice in succession.
        self._is_settled = False
        _all.add(self)

    def rooms(self, asked: Asked) -> dict[int, Room]:
        """Return where runners are to write that are asked for so much; nothing: where they like.

        What is theirs is told by `lend`.
        """
        before, layout = self._seen
        if not self._is_settled or layout is None or before != asked:
            return {}
        piece = self._vacant(layout.size)
        if piece is None:
            return {}
        places = layout.places()
        return {
            runner: Room(number=piece.number, size=piece.arena.size, places=own)
            for runner, own in places.items()
        }

    def learn(self, asked: Asked, places: Mapping[int, Sequence[Place]]) -> None:
        """All that was asked has been delivered, and these are the large columns, by runner."""
        seen = asked, Layout.of(places)
        layout = seen[1]
        self._is_settled = seen == self._seen and layout is not None and layout.size >= _WORTHWHILE
        self._seen = seen
        if not self._is_settled:
            self._keep_if(lambda piece: not piece.is_free())

    def fd(self, number: int) -> int:
        """Return the descriptor of a piece; it stays its own."""
        return self._piece(number).arena.fd

    def view(self, number: int, place: Place) -> npt.NDArray[Any]:
        """Return what stands at a place of a piece."""
        return view_of(self._piece(number).root, place)

    def lend(self, number: int, runner: int) -> None:
        """This runner may write to a piece from now on."""
        self._piece(number).writers.add(runner)

    def release(self, number: int, runner: int) -> None:
        """This runner writes to a piece no more."""
        for piece in self._pieces:
            if piece.number == number:
                piece.writers.discard(runner)

    def join(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the rows of all: without a copy, where they lie side by side here."""
        first = arrays[0]
        for piece in self._pieces:
            if first.base is piece.root:
                break
        else:
            return np.concatenate(arrays)
        begin = offset = _address(first) - _address(piece.root)
        rows = 0
        for array in arrays:
            if (
                array.base is not piece.root
                or array.dtype != first.dtype
                or array.shape[1:] != first.shape[1:]
                or _address(array) - _address(piece.root) != offset
            ):
                return np.concatenate(arrays)
            rows += len(array)
            offset += array.nbytes
        return view_of(piece.root, Place(begin, first.dtype.str, (rows, *first.shape[1:])))

    def let_go(self) -> None:
        """Keep no piece: each goes with the last sample in it."""
        self._pieces = []

    def leave_to_forks(self) -> None:
        """This process was forked: samples stay as they are, for the copy has them, too."""
        self._keep_if(lambda piece: piece.writers or piece.is_free())

    # --- private -----------------------------------------------------------------------------

    def _vacant(self, size: int) -> _Piece | None:
        """Return a piece that nobody uses."""
        self._keep_if(lambda piece: piece.arena.size == size or not piece.is_free())
        for piece in self._pieces:
            if piece.arena.size == size and piece.is_free():
                return piece
        if len(self._pieces) >= MOST_ROOMS:  # the caller keeps samples: they have other memory
            return None
        try:
            piece = _Piece(next(self._numbers), size)
        except ConfigError:  # too little memory: samples are joined by a copy
            return None
        self._pieces.append(piece)
        return piece

    def _keep_if(self, is_wanted: Callable[[_Piece], object]) -> None:
        self._pieces = [piece for piece in self._pieces if is_wanted(piece)]

    def _piece(self, number: int) -> _Piece:
        return next(piece for piece in self._pieces if piece.number == number)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _bytes_of_row(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


_all: Final[weakref.WeakSet[JointMemory]] = weakref.WeakSet()


def _leave_to_forks() -> None:
    for memory in list(_all):
        memory.leave_to_forks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_leave_to_forks)
