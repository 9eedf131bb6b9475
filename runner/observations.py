"""How a batch of observations is put together from the blocks, or from single observations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array

from envbus.actors import spaces

__all__ = ["ObservationStore"]


class ObservationStore:
    """The latest observation of each env, batched as Gymnasium batches them.

    Args:
        space: The single observation space.
        num_envs: Envs in the batch.
        leaves: The blocks' arrays, one per leaf of the space, each `(num_envs, *leaf_shape)`;
            None if the space has no fixed size: then `put` collects single observations.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        num_envs: int,
        leaves: Sequence[npt.NDArray[Any]] | None,
    ) -> None:
        self._space = space
        self._num_envs = num_envs
        self._leaves = leaves
        self._singles: list[Any] = [None] * num_envs
        self._batch: Any = None
        #: The only array of a space that is one.
        self._only: npt.NDArray[Any] | None = None
        #: What `remember` has kept: leaves, or single observations.
        self._kept: list[Any] | None = None
        if leaves is not None:
            self._structure = spaces.structurer(space)
            self._batch = self._structure(leaves)
            if isinstance(self._batch, np.ndarray):
                self._only = self._batch

    def put_arrays(self, rows: Any, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write leaves that came in a message, each `(len(rows), *leaf_shape)`."""
        assert self._leaves is not None
        for leaf, array in zip(self._leaves, arrays, strict=True):
            leaf[rows] = array

    def put_singles(self, env_ids: Sequence[int], observations: Sequence[Any]) -> None:
        """Remember single observations of a space without a fixed size."""
        for env_id, observation in zip(env_ids, observations, strict=True):
            self._singles[env_id] = observation

    def batch(self, *, copy: bool) -> Any:
        """Return the observations of all envs.

        Args:
            copy: Return arrays of the caller's own; else views that the next step overwrites.
        """
        if self._leaves is None:
            batch = _concatenate(self._space, self._singles)
            return deepcopy(batch) if copy else batch
        if not copy:
            return self._batch
        if self._only is not None:
            return self._only.copy()
        return self._structure([leaf.copy() for leaf in self._leaves])

    def select(self, env_ids: npt.NDArray[np.int64], *, copy: bool = True) -> Any:
        """Return a batch of the observations of `env_ids`.

        Args:
            env_ids: Which, in this order.
            copy: Return arrays of the caller's own; else views where the envs are neighbours in
                order.
        """
        if self._leaves is not None:
            rows: Any = env_ids
            # Not `np.diff`, which takes longer than all else here.
            if not copy and len(env_ids) and not np.count_nonzero(env_ids[1:] - env_ids[:-1] != 1):
                rows = slice(int(env_ids[0]), int(env_ids[-1]) + 1)
            return self._structure([leaf[rows] for leaf in self._leaves])
        singles = [self._singles[env_id] for env_id in env_ids]
        return deepcopy(_concatenate(self._space, singles))

    def remember(self, env_ids: Sequence[int] | npt.NDArray[np.int64] | None = None) -> None:
        """Keep the present observations of some envs for `before`; None: of all."""
        present = self._singles if self._leaves is None else self._leaves
        if self._kept is None:
            self._kept = deepcopy(list(present))
        elif self._leaves is None:
            for env_id in range(self._num_envs) if env_ids is None else env_ids:
                self._kept[env_id] = self._singles[env_id]
        else:
            rows: Any = slice(None) if env_ids is None else env_ids
            for kept, leaf in zip(self._kept, self._leaves, strict=True):
                kept[rows] = leaf[rows]

    def before(self, env_id: int) -> Any:
        """Return one env's observation as it was remembered, the caller's own."""
        assert self._kept is not None, "nothing was remembered"
        if self._leaves is None:
            return deepcopy(self._kept[env_id])
        return self._structure([leaf[env_id].copy() for leaf in self._kept])

    def single(self, env_id: int) -> Any:
        """Return one env's observation, the caller's own."""
        if self._leaves is None:
            return self._singles[env_id]
        return self._structure([leaf[env_id].copy() for leaf in self._leaves])


def _concatenate(space: gymnasium.Space[Any], singles: Sequence[Any]) -> Any:
    out: Any = create_empty_array(space, n=len(singles), fn=np.zeros)
    return concatenate(space, singles, out)
