"""Finds rewards and observations that are NaN, and rewards that are infinite, in an actor's rows.

Pure. Looks at whole arrays, so that it costs two array operations per step; only if one is wrong
at the single rows, and where observations have no fixed size at each of them. Infinities in
observations are let through: a Box without bounds has them. Rewards over what float32 can express
are infinite as soon as they stand in a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.blocks import Blocks
from envbus.actors.spaces.agent_spaces import RecordSpace
from envbus.actors.spaces.spaces import Element, Space, leaves
from envbus.bus.errors import ConfigError

__all__ = ["FLOAT32_MAX", "CheckFinite", "FiniteCheck", "in_words", "without_nan"]

#: What follows: the env has failed; a warning, once per env and field; nobody looks.
CheckFinite: TypeAlias = bool | Literal["warn"]
#: Elements of an array that one thread multiplies, also of a library that has several.
_SMALL: Final = 4096
#: Rows of batches have their rewards, and what clients add, in float32.
FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
# An infinite sum of squares is no NaN, which is all that is asked here. (Where NumPy is told to be
# silent in each step, that takes two microseconds.)
warnings.filterwarnings("ignore", "overflow encountered in dot", RuntimeWarning, __name__)
_WORDS: dict[object, str] = {True: "fault", "warn": "warn", False: "off"}


def in_words(check: CheckFinite) -> str:
    """Return the setting as `MapBlocks` has it.

    Raises:
        ConfigError: It is none.
    """
    try:
        return _WORDS[check]
    except (KeyError, TypeError):  # the latter: it has no hash
        text = f"check_finite must be True, False or 'warn', not {check!r:.80}"
        raise ConfigError(text) from None


class FiniteCheck:
    """Looks at the rows of one actor.

    Args:
        space: Single observation space.
        blocks: The rows; rewards, and observations where they have a fixed size.
    """

    def __init__(self, space: Space, blocks: Blocks) -> None:
        self._rewards = blocks.rewards
        self._is_record = isinstance(space, RecordSpace)
        #: Name and array of each leaf that can hold NaN.
        self._leaves: list[tuple[str, npt.NDArray[Any]]] = []
        if blocks.observations is not None:
            self._leaves = [
                ("observation" + "".join(f"[{key!r}]" for key in leaf.path), array)
                for leaf, array in zip(leaves(space), blocks.observations, strict=True)
                if leaf.dtype.kind in "fc"
            ]
        #: The same, and those whose items lie side by side and are few, as vectors.
        self._large = [array for _, array in self._leaves if not _is_small(array)]
        self._small = [array.reshape(-1) for _, array in self._leaves if _is_small(array)]

    def is_fine(self, infos: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Return whether no row of the blocks has anything wrong; False: `wrong` knows.

        Args:
            infos: Of all slots: last observations in them have to be looked at, too.
        """
        finals = [info["final_obs"] for info in infos or () if "final_obs" in info]
        if finals and (self._is_record or _any_holds_nan(finals)):
            return False
        try:
            squares = self._rewards.dot(self._rewards)
            if not squares <= FLOAT32_MAX * FLOAT32_MAX:  # NaN is not, either
                return False
            for array in self._small:
                squares = array.dot(array)
                if squares != squares:  # NaN
                    return False
        except RuntimeWarning:  # squares are infinite, and the program has made warnings errors
            return False
        return not (self._large and any(map(_has_nan, self._large)))

    def wrong(
        self,
        slots: Sequence[int],
        finals: Mapping[int, Element],
        elements: Mapping[int, Element],
    ) -> list[tuple[int, str, str]]:
        """Return slot, field and what it is, of each field of `slots` that is wrong.

        Args:
            slots: Which rows.
            finals: By slot, last observations of episodes that have ended.
            elements: By slot, observations that have no place in the blocks.
        """
        found = [
            (slot, *field)
            for slot, element in elements.items()
            for field in self._wrong_in(element, "observation")
        ]
        for slot in slots:
            reward = self._rewards[slot]
            if not abs(reward) <= FLOAT32_MAX:
                found.append((slot, "reward", str(reward)))
            found += [(slot, name, "nan") for name, array in self._leaves if _has_nan(array[slot])]
        for slot, element in finals.items():
            found += [(slot, *field) for field in self._wrong_in(element, "final_obs")]
        return found

    def _wrong_in(self, element: Element, name: str) -> list[tuple[str, str]]:
        """Return the fields of an observation, or of a record, that are wrong."""
        if not self._is_record or not isinstance(element, Mapping):
            return [(name, "nan")] if _holds_nan(element) else []
        found = [
            (f"{name} of agent {agent!r}", "nan")
            for agent, own in element["observations"].items()
            if _holds_nan(own)
        ]
        for agent, reward in element["rewards"].items():
            array = np.asarray(reward)
            is_float = array.dtype.kind in "fc"  # a float16 compares with infinity
            if is_float and not (np.abs(array.astype(np.complex128)) <= FLOAT32_MAX).all():
                found.append((f"reward of agent {agent!r}", str(reward)))
        return found

    def clear(self, slot: int) -> None:
        """Write 0 where a row holds what nobody should read."""
        self._rewards[slot] = 0.0
        for _, array in self._leaves:
            array[slot] = np.where(np.isnan(array[slot]), 0, array[slot])


def without_nan(element: Element) -> Element:
    """Return a copy with 0 where an observation, or a record, holds NaN."""
    if isinstance(element, Mapping):
        return {key: without_nan(part) for key, part in element.items()}
    if isinstance(element, tuple | list):
        parts = [without_nan(part) for part in element]
        return type(element)(*parts) if hasattr(element, "_fields") else type(element)(parts)
    if isinstance(element, np.ndarray | np.generic | float) and _holds_nan(element):
        return np.where(np.isnan(element), np.zeros_like(element), element)[()]
    return element


def _is_small(array: npt.NDArray[Any]) -> bool:
    """Return whether an array is multiplied with itself sooner than its least element is found.

    Not one in half precision: NumPy warns of each product that is too large for that.
    """
    dtype = array.dtype
    is_float = dtype.kind == "f" and dtype.itemsize > 2
    return array.size <= _SMALL and is_float and array.flags.c_contiguous


def _has_nan(array: npt.NDArray[Any]) -> bool:
    """Return whether an array of floats holds NaN.

    Then NaN is its product with itself, a sum of squares, which no infinity makes NaN; and its
    least element, which takes longer to find in a small array, and no threads in a large one.
    """
    if _is_small(array):
        flat = array.reshape(-1)
        try:
            squares = flat.dot(flat)
        except RuntimeWarning:  # as in `is_fine`
            return bool(np.isnan(flat).any())
        return bool(squares != squares)
    return bool(array.size and np.isnan(array.min()))


def _any_holds_nan(elements: Sequence[Element]) -> bool:
    if not all(type(element) is np.ndarray for element in elements):
        return any(map(_holds_nan, elements))
    floats = [element for element in elements if element.dtype.kind in "fc"]
    if sum(element.size for element in floats) > _SMALL:
        return any(map(_has_nan, floats))
    # At one go, where a look at each takes a microsecond.
    return bool(floats) and _has_nan(np.concatenate(floats, axis=None))


def _holds_nan(element: Element) -> bool:
    if type(element) is np.ndarray:
        return element.dtype.kind in "fc" and _has_nan(element)
    if isinstance(element, Mapping):
        return any(map(_holds_nan, element.values()))
    if isinstance(element, tuple | list):
        return any(map(_holds_nan, element))
    array = np.asarray(element)
    return array.dtype.kind in "fc" and _has_nan(array)
