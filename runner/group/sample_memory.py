"""Large columns of a sample go from a runner to its group through shared memory.

In a message they would be copied four times, into fresh memory each time. So they are copied into
memory of the runner that stays (`SampleMemory`), and out of it when samples are joined. A runner
writes there only while its group waits for a sample, and the group reads it before it asks for the
next one.

Joining takes a copy of all, into fresh memory, and runners wait meanwhile. So, where samples are
laid out as those before were, each runner is offered a slot, its part of one piece of memory in
which the rows of all lie side by side (`JointMemory`): columns that are made there need no copy at
all. A piece is used again once nobody has a sample in it.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.blocks import ALIGNMENT
from envbus.bus.errors import ConfigError
from envbus.bus.memory.arena import Arena
from envbus.runner.batches.nested import Tree, map_tree
from envbus.runner.sampling.config import Quota

__all__ = [
    "MOST_SLOTS",
    "ArrayLocation",
    "Asked",
    "JointMemory",
    "Placed",
    "SampleLayout",
    "SampleMemory",
    "SharedSlot",
    "fetch",
    "padded",
    "view_of",
]

#: Of runners, and how much each was asked for.
Asked: TypeAlias = "Mapping[int, Quota]"

#: Bytes from which a column is placed there.
_LARGE = 32 * 1024
#: Bytes of a sample from which on a slot is worth it.
_WORTHWHILE = 1 << 20
#: How much more than is needed is reserved, as samples differ.
_SLACK = 1.25
#: Memories with slots at one time: the group's caller has one sample while the next is taken.
MOST_SLOTS = 2


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    #: Whether that is in the memory of the runner's slot, and not its own.
    in_slot: bool = False


class SharedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group wants the large columns of a runner's next sample."""

    #: Which memory.
    number: int
    #: Number under which its descriptor was passed; 0: the runner knows it.
    passed: int = 0
    #: Of that memory, in bytes.
    size: int
    locations: list[ArrayLocation]


class Placed(msgspec.Struct, frozen=True):
    """A tree in which numbers stand for arrays: indices of `locations`."""

    tree: Tree
    locations: list[ArrayLocation]
    #: Number under which the descriptor of the memory was passed; 0: the group has it.
    passed: int = 0
    #: Of that memory, in bytes.
    size: int = 0


class SampleMemory:
    """The runner's side: its own memory, and the slot that it is offered.

    Args:
        send_fd: Hands a descriptor to the group, and returns its number.
        receive_fd: Returns the descriptor that was passed under a number.
    """

    def __init__(
        self, send_fd: Callable[[int], int], receive_fd: Callable[[int], int] | None = None
    ) -> None:
        self._send_fd = send_fd
        self._receive_fd = receive_fd
        self._arena: Arena | None = None
        #: Number under which its descriptor was passed; 0: the group is not known to have it.
        self._passed = 0
        self._slots: dict[int, Arena] = {}
        #: The slot of the present sample: its memory, and where nothing was made yet.
        self._buffer: Any = None
        self._vacant: list[ArrayLocation] = []
        #: What was made there.
        self._made: list[tuple[npt.NDArray[Any], ArrayLocation]] = []

    def enter(self, slot: SharedSlot | None, held: int) -> None:
        """A sample begins, with that slot for it; `place` ends it.

        Args:
            slot: None: there is none.
            held: Number of the last passed descriptor that the group has taken. It is not what was
                sent last where the message that named that was lost, as something in it could not
                be sent.
        """
        self._leave()
        if held != self._passed:
            self._passed = 0
        if slot is None:
            return
        if slot.passed:
            assert self._receive_fd is not None
            arena = Arena.attach(self._receive_fd(slot.passed), slot.size)
            self._slots.pop(slot.number, None)  # which may have been announced before
            self._slots[slot.number] = arena
            while len(self._slots) > MOST_SLOTS:
                self._slots.pop(next(iter(self._slots))).close()
        self._buffer = self._slots[slot.number].buffer
        self._vacant = list(slot.locations)

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an array of the slot, where one like that is wanted; its content is arbitrary."""
        for index, location in enumerate(self._vacant):
            if location.shape == shape and location.dtype == dtype.str:
                del self._vacant[index]
                array = view_of(self._buffer, location)
                self._made.append((array, location))
                return array
        return None

    def place(self, tree: Tree) -> Placed:
        """Copy large arrays of `tree` to shared memory, but for those that are there already.

        All stay in the tree if there is too little memory.
        """
        arrays: list[npt.NDArray[Any]] = []
        locations: list[ArrayLocation | None] = []

        def choose(leaf: npt.NDArray[Any]) -> Any:
            if leaf.nbytes < _LARGE or leaf.dtype.kind not in "biufcSU":
                return leaf
            arrays.append(leaf)
            locations.append(self._in_slot(leaf))
            return len(arrays) - 1

        numbered = map_tree(choose, tree)
        self._leave()
        others = [
            array for array, location in zip(arrays, locations, strict=True) if location is None
        ]
        if not others:
            return Placed(numbered, [location for location in locations if location is not None])
        passed = 0
        offsets = list(itertools.accumulate((padded(leaf.nbytes) for leaf in others), initial=0))
        if self._arena is None or self._arena.size < offsets[-1]:
            self._close_own()
            try:
                self._arena = Arena.create(int(offsets[-1] * _SLACK))
            except ConfigError:  # too little memory: the messages' way needs less for longer
                return Placed(tree, [])
        if not self._passed:
            passed = self._passed = self._send_fd(self._arena.fd)
        begins = iter(offsets)
        found = []
        for array, location in zip(arrays, locations, strict=True):
            if location is None:
                location = ArrayLocation(next(begins), array.dtype.str, array.shape)
                view_of(self._arena.buffer, location)[...] = array
            found.append(location)
        return Placed(numbered, found, passed, self._arena.size if passed else 0)

    def close(self) -> None:
        """Let go of the memory."""
        self._leave()
        self._close_own()
        for arena in self._slots.values():
            arena.close()
        self._slots.clear()

    def _in_slot(self, leaf: npt.NDArray[Any]) -> ArrayLocation | None:
        """Return where an array is in the slot, or was copied to."""
        for made, location in self._made:
            if made is leaf:
                return location
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
        self._passed = 0


def fetch(
    tree: Tree,
    locations: list[ArrayLocation],
    arena: Arena | None,
    slot: Callable[[ArrayLocation], npt.NDArray[Any]] | None = None,
) -> Tree:
    """Return `tree` with its arrays, which are views.

    What is in `arena`, the runner's own memory, is overwritten by its next sample; `slot` returns
    what is at a location in the runner's slot.
    """
    if not locations:
        return tree

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, int):
            return leaf
        location = locations[leaf]
        if location.in_slot:
            assert slot is not None
            return slot(location)
        assert arena is not None
        return view_of(arena.buffer, location)

    return map_tree(look, tree)


def padded(nbytes: int) -> int:
    """Return after how many bytes another column can begin."""
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def view_of(buffer: Any, location: ArrayLocation) -> npt.NDArray[Any]:
    """Return the array at a location of a buffer."""
    view: npt.NDArray[Any] = np.ndarray(
        location.shape, np.dtype(location.dtype), buffer, location.offset
    )
    return view


class SampleLayout(NamedTuple):
    """What the large columns of a sample are like."""

    #: Runners in order, and how many rows each has.
    rows: tuple[tuple[int, int], ...]
    #: By column: dtype, and shape of a row.
    columns: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, locations: Mapping[int, Sequence[ArrayLocation]]) -> SampleLayout | None:
        """Return what runners have delivered, by runner; None: columns do not lie side by side."""
        rows, columns = [], set()
        for runner, own in sorted(locations.items()):
            counts = {location.shape[0] for location in own}
            if len(counts) != 1:
                return None
            rows.append((runner, counts.pop()))
            columns.add(tuple((location.dtype, location.shape[1:]) for location in own))
        return cls(tuple(rows), *columns) if len(columns) == 1 else None

    @property
    def size(self) -> int:
        """Bytes."""
        total = sum(count for _, count in self.rows)
        return sum(padded(total * _bytes_of_row(*column)) for column in self.columns)

    def locations(self) -> dict[int, list[ArrayLocation]]:
        """Return where the columns of each runner are to be: behind those of the one before it."""
        found: dict[int, list[ArrayLocation]] = {runner: [] for runner, _ in self.rows}
        begin = 0
        for dtype, shape in self.columns:
            offset = begin
            for runner, count in self.rows:
                found[runner].append(ArrayLocation(offset, dtype, (count, *shape), in_slot=True))
                offset += count * _bytes_of_row(dtype, shape)
            begin += padded(offset - begin)
        return found


class _SampleBuffer:
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
    """The group's side: pieces of memory in which slots are."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pieces: list[_SampleBuffer] = []
        #: What was asked last, and what that was like.
        self._seen: tuple[Asked, SampleLayout | None] = ({}, None)
        #: Whether it was so twice in succession.
        self._is_settled = False
        _all.add(self)

    def slots(self, asked: Asked) -> dict[int, SharedSlot]:
        """Return where runners are to write that are asked for so much; nothing: where they like.

        What is theirs is told by `lend`.
        """
        before, layout = self._seen
        if not self._is_settled or layout is None or before != asked:
            return {}
        piece = self._vacant(layout.size)
        if piece is None:
            return {}
        locations = layout.locations()
        return {
            runner: SharedSlot(number=piece.number, size=piece.arena.size, locations=own)
            for runner, own in locations.items()
        }

    def learn(self, asked: Asked, locations: Mapping[int, Sequence[ArrayLocation]]) -> None:
        """All that was asked has been delivered, and these are the large columns, by runner."""
        seen = asked, SampleLayout.of(locations)
        layout = seen[1]
        self._is_settled = seen == self._seen and layout is not None and layout.size >= _WORTHWHILE
        self._seen = seen
        if not self._is_settled:
            self._keep_if(lambda piece: not piece.is_free())

    def fd(self, number: int) -> int:
        """Return the descriptor of a piece; it stays its own."""
        return self._piece(number).arena.fd

    def view(self, number: int, location: ArrayLocation) -> npt.NDArray[Any]:
        """Return what stands at a location of a piece."""
        return view_of(self._piece(number).root, location)

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
        return view_of(piece.root, ArrayLocation(begin, first.dtype.str, (rows, *first.shape[1:])))

    def let_go(self) -> None:
        """Keep no piece: each goes with the last sample in it."""
        self._pieces = []

    def leave_to_forks(self) -> None:
        """This process was forked: samples stay as they are, for the copy has them, too."""
        self._keep_if(lambda piece: piece.writers or piece.is_free())

    # --- private -----------------------------------------------------------------------------

    def _vacant(self, size: int) -> _SampleBuffer | None:
        """Return a piece that nobody uses."""
        self._keep_if(lambda piece: piece.arena.size == size or not piece.is_free())
        for piece in self._pieces:
            if piece.arena.size == size and piece.is_free():
                return piece
        if len(self._pieces) >= MOST_SLOTS:  # the caller keeps samples: they have other memory
            return None
        try:
            piece = _SampleBuffer(next(self._numbers), size)
        except ConfigError:  # too little memory: samples are joined by a copy
            return None
        self._pieces.append(piece)
        return piece

    def _keep_if(self, is_wanted: Callable[[_SampleBuffer], object]) -> None:
        self._pieces = [piece for piece in self._pieces if is_wanted(piece)]

    def _piece(self, number: int) -> _SampleBuffer:
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
