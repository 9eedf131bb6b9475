"""Finds rewards and observations that are NaN, and rewards that are infinite, in rows of blocks.

Pure. Looks at whole arrays, so that it costs two array operations per step; only if one is wrong
at the single rows. Infinities in observations are let through: a Box without bounds has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.actors.blocks import Blocks
from envbus.actors.spaces import Element, Space, leaves
from envbus.bus.errors import ConfigError

__all__ = ["CheckFinite", "FiniteCheck", "in_words"]

#: What follows: the env has failed; a warning, once per env and field; nobody looks.
CheckFinite: TypeAlias = bool | Literal["warn"]
#: Elements of an array that one thread multiplies, also of a library that has several.
_SMALL: Final = 4096
_WORDS: dict[object, str] = {True: "fault", "warn": "warn", False: "off"}


def in_words(check: CheckFinite) -> str:
    """Return the setting as `MapBlocks` has it.

    Raises:
        ConfigError: It is none.
    """
    word = _WORDS.get(check)
    if word is None:
        raise ConfigError(f"check_finite must be True, False or 'warn', not {check!r}")
    return word


class FiniteCheck:
    """Looks at the rows of one actor.

    Args:
        space: Single observation space.
        blocks: The rows; rewards, and observations where they have a fixed size.
    """

    def __init__(self, space: Space, blocks: Blocks) -> None:
        self._rewards = blocks.rewards
        self._zeros = np.zeros_like(blocks.rewards)
        #: Name and array of each leaf that can hold NaN.
        self._leaves: list[tuple[str, npt.NDArray[Any]]] = []
        if blocks.observations is not None:
            self._leaves = [
                ("observation" + "".join(f"[{key!r}]" for key in leaf.path), array)
                for leaf, array in zip(leaves(space), blocks.observations, strict=True)
                if leaf.dtype.kind in "fc"
            ]

    def is_fine(self) -> bool:
        """Return whether no row has anything wrong."""
        if np.vdot(self._rewards, self._zeros) != 0.0:  # infinity times 0 is NaN
            return False
        for _, array in self._leaves:  # noqa: SIM110 (`any` takes as long as the look itself)
            if _has_nan(array):
                return False
        return True

    def wrong(
        self, slots: Sequence[int], finals: Mapping[int, Element]
    ) -> list[tuple[int, str, str]]:
        """Return slot, field and what it is, of each field of `slots` that is wrong.

        Args:
            slots: Which rows.
            finals: By slot, last observations of episodes that have ended.
        """
        found = []
        for slot in slots:
            reward = self._rewards[slot]
            if not np.isfinite(reward):
                found.append((slot, "reward", str(reward)))
            found += [(slot, name, "nan") for name, array in self._leaves if _has_nan(array[slot])]
        found += [(slot, "final_obs", "nan") for slot in finals if _holds_nan(finals[slot])]
        return found

    def clear(self, slot: int) -> None:
        """Write 0 where a row holds what nobody should read."""
        self._rewards[slot] = 0.0
        for _, array in self._leaves:
            array[slot] = np.where(np.isnan(array[slot]), 0, array[slot])


def _has_nan(array: npt.NDArray[Any]) -> bool:
    """Return whether an array of floats holds NaN.

    Then NaN is its product with itself, a sum of squares, which no infinity makes NaN; and its
    least element, which takes longer to find in a small array, and no threads in a large one.
    """
    if array.size <= _SMALL and array.dtype.kind == "f":
        return bool(np.isnan(np.vdot(array, array)))
    return bool(array.size and np.isnan(array.min()))


def _holds_nan(element: Element) -> bool:
    if isinstance(element, Mapping):
        return any(map(_holds_nan, element.values()))
    if isinstance(element, tuple | list):
        return any(map(_holds_nan, element))
    array = np.asarray(element)
    return array.dtype.kind in "fc" and _has_nan(array)
