"""Memory for arrays of many rows, used again when nobody refers to what was in it before."""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["LARGE", "RowMemory"]

#: Bytes from which arrays are worth keeping: the system gives smaller ones without new pages.
LARGE: Final = 64 * 1024


class RowMemory:
    """Memory for large batches, used again when nobody refers to the former batch any more.

    Fresh pages from the system cost several times what a copy into old ones does. Not thread-safe.

    Attributes:
        most_kept: Arrays that are kept; a batch has one per leaf.
    """

    def __init__(self) -> None:
        self.most_kept = 8
        self._kept: list[npt.NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array to be filled: C-contiguous, writable, and nobody else's."""
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE or dtype.hasobject:
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
        del kept[: max(len(kept) - self.most_kept, 0)]
        return found[:size].view(dtype).reshape(shape)
