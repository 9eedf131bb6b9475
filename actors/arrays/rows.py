"""Checks single observations and writes them where they are exchanged.

Each slot has one *row*: whatever `row[...] = value` is told to. `row` is a NumPy view for a space
of one array, a group of views for Dict and Tuple spaces, and a plain cell for spaces without a
fixed size, so that the loop over envs is the same for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from envbus.actors.arrays.copies import own
from envbus.actors.spaces.spaces import Element, Leaf, Space, leaves
from envbus.bus.brief import brief

__all__ = ["Cell", "ObservationRows", "as_array"]


_NESTED = (spaces.Dict, spaces.Tuple)
#: Spaces whose elements are batched as they are.
_UNSTACKED = (spaces.Text, spaces.Sequence, spaces.Graph)


class Cell:
    """Row of a slot whose observations have no fixed size."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def __setitem__(self, index: object, value: object) -> None:
        self.value = own(value)  # envs of one process may share what they return


class _Group:
    """Row of a slot whose observations consist of several arrays."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[npt.NDArray[Any]]) -> None:
        self.rows = rows

    def __setitem__(self, index: object, values: list[Any]) -> None:
        for row, value in zip(self.rows, values, strict=False):
            row[...] = value


class ObservationRows:
    """The rows of some slots, and what may be written to them.

    Attributes:
        rows: One per slot, to be written by `rows[slot][...] = value`.
        dtype: Of the only array of an observation. An `ndarray` with this dtype and `shape` may
            be written as it is; everything else must go through `convert`. None, which no array
            has, if observations are not just one array.
        shape: Of the only array of an observation.
        is_ragged: Whether the rows are cells, whose values travel in a list.
    """

    def __init__(
        self,
        space: Space,
        arrays: list[npt.NDArray[Any]] | None,
        num_slots: int,
        first_env_id: int,
    ) -> None:
        """Prepare the rows.

        Args:
            space: Single observation space.
            arrays: Its leaves, `(num_slots, *leaf_shape)` each, or None if it has none.
            num_slots: How many rows there are.
            first_env_id: Number of slot 0 in messages to people.
        """
        self.dtype: np.dtype[Any] | None = None
        self.shape: tuple[int, ...] = ()
        self.rows: list[Any]
        self._first_env_id = first_env_id
        self._leaves: list[Leaf] | None = None
        self.is_ragged = arrays is None
        if arrays is None:
            self.rows = [Cell() for _ in range(num_slots)]
            self._space = space
            #: Of spaces with parts: where each is.
            self._parts = list(_parts(space)) if isinstance(space, _NESTED) else []
            return
        self._leaves = leaves(space)
        #: What `convert` reads per leaf and step, unpacked once.
        self._plan = [(leaf.path, leaf.dtype, leaf.shape, leaf) for leaf in self._leaves]
        # `array[slot, ...]` is a view also where a row is a single number.
        views = [[array[slot, ...] for array in arrays] for slot in range(num_slots)]
        if [leaf.path for leaf in self._leaves] == [()]:
            self.dtype = self._leaves[0].dtype
            self.shape = self._leaves[0].shape
            self.rows = [view[0] for view in views]
        else:
            self.rows = [_Group(view) for view in views]

    def convert(self, slot: int, observation: Element) -> Element:
        """Return what may be written to the slot's row.

        Takes what `np.stack(..., out=...)` takes in `SyncVectorEnv`: anything that NumPy can
        make an array of, of exactly the right shape and with a dtype of the same kind.

        Raises:
            ValueError: It does not fit; the message says which env, what came and what was
                expected.
        """
        if self._leaves is None:
            if self._parts and not self._surely_stacks(observation):
                self._check_stacks(slot, observation)
            return observation
        if self.dtype is not None:
            return self._fit(slot, self._leaves[0], observation)
        values = []
        for path, dtype, shape, leaf in self._plan:
            value = observation
            try:
                for key in path:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                value = _Missing()
            # As in `_fit`, which costs a call.
            if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                value = self._fit(slot, leaf, value)
            values.append(value)
        return values

    def _surely_stacks(self, observation: Element) -> bool:
        """Return whether an observation has what usual ones have, which is soon looked up."""
        try:
            for path, part in self._parts:
                value = observation
                for key in path:
                    value = value[key]
                if isinstance(part, spaces.Box):
                    if type(value) is not np.ndarray or value.dtype is not part.dtype:
                        return False
                    if value.shape != part.shape:
                        return False
                elif not isinstance(part, _UNSTACKED):
                    return False
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def _check_stacks(self, slot: int, observation: Element) -> None:
        """See that an observation can be batched: who does so has those of all envs.

        Raises:
            ValueError: It cannot.
        """
        out: Any = create_empty_array(self._space, 1)
        try:
            concatenate(self._space, [observation], out)
        except Exception as error:  # a different one for each kind of misfit
            raise ValueError(
                f"env {self._first_env_id + slot}: observation is {brief(observation)}, which does "
                f"not fit its observation space {self._space}: {error}"
            ) from error

    def _fit(self, slot: int, leaf: Leaf, value: Element) -> Element:
        kind = type(value)
        # Numbers of Discrete spaces, which need no array in between.
        if not leaf.shape and (kind is leaf.dtype.type or (kind is int and leaf.dtype == np.int64)):
            return value
        return as_array(value, leaf.dtype, leaf.shape, f"env {self._first_env_id + slot}", leaf)


def _parts(
    space: Space, path: tuple[Hashable, ...] = ()
) -> Iterator[tuple[tuple[Hashable, ...], Space]]:
    """Yield where in an element each part without parts is, and its space."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*path, index))
    else:
        yield path, space


class _Missing:
    """Stands for what an observation lacks."""


def as_array(
    value: Element, dtype: np.dtype[Any], shape: tuple[int, ...], who: str, leaf: Leaf
) -> npt.NDArray[Any]:
    """Return `value` as an array of `shape` whose dtype may be cast to `dtype`.

    Raises:
        ValueError: It is none; the message names `who` and the place of `leaf`.
    """
    came = f"a {type(value).__qualname__}"
    cause: BaseException | None = None
    if isinstance(value, _Missing):
        came = "nothing"
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            cause = error
        else:
            came = f"{came} of shape {array.shape} and dtype {array.dtype}"
            if array.shape == shape and np.can_cast(array.dtype, dtype, "same_kind"):
                # Floats are rounded; integers that are cut off would be others, in silence.
                if dtype.kind not in "iu" or np.can_cast(array.dtype, dtype):
                    return array
                if (array == array.astype(dtype)).all():
                    return array
                came += f" with {array.min()} to {array.max()} in it"
    place = "".join(f"[{key!r}]" for key in leaf.path)
    raise ValueError(
        f"{who}: observation{place} is {came}, but its observation space needs shape {shape} and "
        f"dtype {dtype}"
    ) from cause
