"""Rows of requests and of answers: gathered for one call of a policy, and given back.

Leaves out which rows go together (`policy_batching.py`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.actors import spaces
from envbus.actors.blocks import BlockLayout
from envbus.actors.protocol import MapBlocks
from envbus.bus.arena import Arena
from envbus.bus.codec import decode
from envbus.bus.errors import ProtocolError
from envbus.runner.nested import Tree, concatenate_trees, leaves_of, map_tree
from envbus.runner.policies import PolicyOutput, as_rows
from envbus.runner.policy_batching import Piece
from envbus.runner.policy_output import checked_output, owned

__all__ = ["Answer", "RowMemory", "SharedRows", "cut", "form_of", "gather", "join", "split"]

#: Bytes from which arrays are worth keeping: the system gives smaller ones without new pages.
_LARGE: Final = 64 * 1024
#: Arrays that are kept; a batch has one per leaf.
_MOST_KEPT: Final = 8


class RowMemory:
    """Memory for large batches, used again when nobody refers to the former batch any more.

    Fresh pages from the system cost several times what a copy into old ones does. Not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array to be filled: C-contiguous, writable, and nobody else's."""
        size = math.prod(shape) * dtype.itemsize
        if size < _LARGE or dtype.hasobject:
            return np.empty(shape, dtype)
        kept = self._kept
        for index in range(len(kept)):
            # Two: the list's, and the argument. Each view has one to what it is a view of.
            if size <= kept[index].nbytes <= 2 * size and sys.getrefcount(kept[index]) <= 2:
                found = kept.pop(index)
                break
        else:
            found = np.empty(size, np.uint8)
        kept.append(found)  # the latest at the end
        del kept[:-_MOST_KEPT]
        return found[:size].view(dtype).reshape(shape)


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What a policy returned for some rows, in arrays."""

    #: A batch, or a list, where `listed`.
    actions: Any
    listed: bool
    states: Tree
    extras: Mapping[str, Tree]
    rows: int
    #: Which weights chose the rows; `(rows,)` where they are not the same for all.
    version: int
    versions: npt.NDArray[np.int64] | None

    @classmethod
    def of(cls, out: PolicyOutput, rows: int, version: int, states: Tree = None) -> Answer:
        """Return what a policy returned, after a look at its form, in arrays of its own.

        Args:
            out: What it returned.
            rows: How many it was asked about.
            version: Of its weights.
            states: What it was told.

        Raises:
            ValueError: As `checked_output`.
        """
        is_array = isinstance(out.actions, np.ndarray)
        listed = out.actions.dtype.hasobject if is_array else isinstance(out.actions, list)
        out = checked_output(out, rows, states, listed=listed)
        actions = list(out.actions) if listed else owned(out.actions)
        return cls(
            actions,
            listed,
            owned(out.states),
            {name: owned(tree) for name, tree in out.extras.items()},
            rows,
            version,
            out.versions,
        )


def split(answer: Answer, start: int, stop: int) -> Answer:
    """Return some rows of an answer."""
    if start == 0 and stop == answer.rows:
        return answer

    def some(tree: Tree) -> Tree:
        return None if tree is None else map_tree(lambda leaf: leaf[start:stop], tree)

    return Answer(
        answer.actions[start:stop] if answer.listed else some(answer.actions),
        answer.listed,
        some(answer.states),
        {name: some(tree) for name, tree in answer.extras.items()},
        stop - start,
        answer.version,
        some(answer.versions),
    )


def join(answers: Sequence[Answer]) -> Answer:
    """Return the rows of several answers as one.

    Raises:
        ValueError: They differ in structure.
    """
    first = answers[0]
    if len(answers) == 1:
        return first
    if first.listed:
        actions: Any = [action for answer in answers for action in answer.actions]
    else:
        actions = concatenate_trees([answer.actions for answer in answers], "actions")
    states = None
    if first.states is not None:
        states = concatenate_trees([answer.states for answer in answers], "states")
    versions = None
    if any(one.version != first.version or one.versions is not None for one in answers):
        versions = np.concatenate(
            [
                np.full(one.rows, one.version) if one.versions is None else one.versions
                for one in answers
            ]
        )
    return Answer(
        actions,
        first.listed,
        states,
        concatenate_trees([dict(answer.extras) for answer in answers], "extras"),
        sum(answer.rows for answer in answers),
        answers[-1].version,
        versions,
    )


def cut(tree: Tree, piece: Piece[Any]) -> Tree:
    """Return the rows of a piece: of a batch, of a list of single observations, or None of None."""
    if tree is None:
        return None
    start, stop = piece.start, piece.stop
    if isinstance(tree, list | np.ndarray):
        return tree[start:stop]
    return map_tree(lambda leaf: leaf[start:stop], tree)


def gather(parts: Sequence[Tree], memory: RowMemory) -> Tree:
    """Return the rows of several parts as one, in memory that is nobody else's.

    Parts are batches of one form, or lists of single observations, or None.
    """
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, list):
        return as_rows([one for part in parts for one in part])

    if type(first) is np.ndarray:  # the usual case
        return _joined(parts, memory)
    return map_tree(lambda *leaves: _joined(leaves, memory), *parts)


def form_of(tree: Tree, rows: int, what: str) -> object:
    """Return what a batch must have in common with others to be one with them.

    Raises:
        ProtocolError: It is no batch of `rows` rows.
    """
    if tree is None:
        return None
    if isinstance(tree, np.ndarray):
        if tree.ndim and len(tree) == rows:
            return tree.shape[1:], tree.dtype
        raise ProtocolError(f"{what} have shape {tree.shape}, of {rows} rows")
    form = []
    for path, leaf in leaves_of(tree, what):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != rows:
            found = getattr(leaf, "shape", type(leaf).__name__)
            raise ProtocolError(f"{path} is {found}, no array of {rows} rows")
        form.append((path, leaf.shape[1:], leaf.dtype))
    return tuple(form)


class SharedRows:
    """Observations of a pool's envs, in the memory that the envs write them to.

    A row is still while its env waits for an action, so that it can be read until then.
    """

    def __init__(self, arena: Arena, layout: MapBlocks) -> None:
        observation_space = spaces.from_plain(layout.observation_space.value)
        action_space = spaces.from_plain(layout.action_space.value)
        blocks = BlockLayout.of(observation_space, action_space, layout.num_envs)
        leaves = blocks.views(arena.buffer).observations
        if leaves is None:
            raise ProtocolError("observations of no fixed size are not in shared memory")
        self._arena = arena
        self._num_rows = layout.num_envs
        self._observations = spaces.structurer(observation_space)(leaves)
        self.form = form_of(self._observations, layout.num_envs, "observations")

    @classmethod
    def attach(cls, arena_fd: int, size: int, layout_fd: int) -> SharedRows:
        """Return the rows of somebody's arena; takes over both descriptors."""
        arena = Arena.attach(arena_fd, size)
        try:
            with os.fdopen(layout_fd, "rb") as file:
                file.seek(0)
                frames = msgspec.msgpack.decode(file.read(), type=list[bytes])
            return cls(arena, decode(MapBlocks, frames))
        except BaseException:
            arena.close()  # now: later the number of its descriptor may be another file's
            raise

    def check(self, rows: npt.NDArray[np.int64] | None) -> None:
        """Raise ProtocolError for rows that are not there."""
        if rows is None or rows.ndim != 1 or not len(rows):
            raise ProtocolError("which of the shared rows?")
        if rows.min() < 0 or rows.max() >= self._num_rows:
            raise ProtocolError(f"there are {self._num_rows} shared rows, and not all of {rows}")

    def rows(self, rows: Any) -> Tree:
        """Return a copy of some rows."""
        return map_tree(lambda leaf: leaf[rows], self._observations)

    def close(self) -> None:
        """Let go of the memory."""
        self._observations = None
        self._arena.close()


def _joined(leaves: Sequence[npt.NDArray[Any]], memory: RowMemory) -> npt.NDArray[Any]:
    """Return the rows of several arrays as one that is nobody else's."""
    leaf = leaves[0]
    if len(leaves) == 1:
        if leaf.flags.writeable:  # what was decoded is not
            return leaf
        if leaf.nbytes < _LARGE:  # the usual case, in a tenth of the time
            return np.array(leaf)
    rows = sum(map(len, leaves))
    return np.concatenate(leaves, out=memory.empty((rows, *leaf.shape[1:]), leaf.dtype))
