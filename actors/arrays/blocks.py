"""Where observations, actions, rewards and flags of a pool lie in one buffer.

Pure: the buffer comes from elsewhere (an arena, or a `bytearray`), so that both sides of a
shared memory, and an actor without one, use the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envbus.actors.spaces.spaces import Leaf, Space, is_fixed_size, leaves
from envbus.bus.wire.frames import Buffer

__all__ = ["ALIGNMENT", "BlockLayout", "Blocks"]

#: Bytes; a cache line, and more than any dtype's alignment.
ALIGNMENT = 64
_REWARD = np.dtype(np.float64)
_FLAG = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Writable views of a buffer; each array has one row per env."""

    #: One array `(num_envs, *leaf_shape)` per leaf, or None if the space is not of fixed size.
    observations: list[npt.NDArray[Any]] | None
    #: The same for actions.
    actions: list[npt.NDArray[Any]] | None
    #: `(num_envs,)`
    rewards: npt.NDArray[np.float64]
    #: `(num_envs,)`
    terminations: npt.NDArray[np.bool_]
    #: `(num_envs,)`
    truncations: npt.NDArray[np.bool_]

    def part(self, rows: slice) -> Blocks:
        """Return views of some rows."""
        return Blocks(
            observations=_rows_of(self.observations, rows),
            actions=_rows_of(self.actions, rows),
            rewards=self.rewards[rows],
            terminations=self.terminations[rows],
            truncations=self.truncations[rows],
        )


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Offsets of a pool's blocks in a buffer; equal spaces give equal layouts anywhere."""

    num_envs: int
    #: Leaves of the single observation space, or None if it is not of fixed size.
    observations: tuple[Leaf, ...] | None
    #: Leaves of the single action space, or None if it is not of fixed size.
    actions: tuple[Leaf, ...] | None
    #: Byte offset of each block: observations, actions, rewards, terminations, truncations.
    offsets: tuple[int, ...]
    #: Bytes of the whole buffer; never 0.
    size: int

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, num_envs: int) -> BlockLayout:
        """Return the layout for `num_envs` rows of the two *single* spaces.

        Raises:
            ValueError: `num_envs` is not positive.
        """
        if num_envs < 1:
            raise ValueError(f"a block needs at least one row, got num_envs={num_envs}")
        observations = _leaves_or_none(observation_space)
        actions = _leaves_or_none(action_space)
        rows = [leaf.dtype.itemsize * _count(leaf.shape) for leaf in observations or ()]
        rows += [leaf.dtype.itemsize * _count(leaf.shape) for leaf in actions or ()]
        rows += [_REWARD.itemsize, _FLAG.itemsize, _FLAG.itemsize]
        offsets = []
        end = 0
        for row in rows:
            offsets.append(end)
            # A block of zero bytes still gets an offset inside the buffer.
            end += max(-(-row * num_envs // ALIGNMENT), 1) * ALIGNMENT
        return cls(num_envs, observations, actions, tuple(offsets), end)

    def views(self, buffer: Buffer) -> Blocks:
        """Return arrays over `buffer`, which must stay open as long as any of them is in use.

        Raises:
            TypeError: The buffer is too small.
        """
        offsets = iter(self.offsets)

        def view(dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
            array: npt.NDArray[Any]
            array = np.ndarray((self.num_envs, *shape), dtype, buffer, next(offsets))
            return array

        def views(block: tuple[Leaf, ...] | None) -> list[npt.NDArray[Any]] | None:
            return None if block is None else [view(leaf.dtype, leaf.shape) for leaf in block]

        return Blocks(
            observations=views(self.observations),
            actions=views(self.actions),
            rewards=view(_REWARD, ()),
            terminations=view(_FLAG, ()),
            truncations=view(_FLAG, ()),
        )


def _leaves_or_none(space: Space) -> tuple[Leaf, ...] | None:
    return tuple(leaves(space)) if is_fixed_size(space) else None


def _rows_of(arrays: list[npt.NDArray[Any]] | None, rows: slice) -> list[npt.NDArray[Any]] | None:
    return None if arrays is None else [array[rows] for array in arrays]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
