"""How a batch of actions reaches the envs: through the blocks if it fits them as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import iterate

from envbus.actors.arrays.copies import own
from envbus.actors.protocol import Step
from envbus.bus.wire.codec import constant

__all__ = ["STEP_ALL", "ActionStore"]

#: What an actor is asked to advance all of its envs by actions that are in the arena.
STEP_ALL: Final = constant(Step())


class ActionStore:
    """Writes batches of actions into the blocks, or splits them into single actions.

    An env sees its action as `gymnasium.vector.utils.iterate` hands it out: same type and shape.
    A batch goes through the blocks where that follows from its arrays having the batched space's
    shape and dtype, or a smaller dtype of the same kind (int32 for int64), which it gets then.

    Args:
        action_space: The batched space.
        num_envs: Actions in a batch.
        leaves: The blocks' arrays, one per leaf of the space, each `(num_envs, *leaf_shape)`;
            None if the space has no fixed size.
    """

    def __init__(
        self,
        action_space: gymnasium.Space[Any],
        num_envs: int,
        leaves: Sequence[npt.NDArray[Any]] | None,
    ) -> None:
        self._space = action_space
        self._num_envs = num_envs
        self._leaves = leaves
        #: The only array of a space that is one, e.g. Box or Discrete.
        self._only = leaves[0] if leaves is not None and not _is_nested(action_space) else None
        self._only_shape = () if self._only is None else self._only.shape[1:]

    def store(self, actions: Any, rows: npt.NDArray[np.int64] | None = None) -> list[Any] | None:
        """Write `actions` into `rows` of the blocks; if they do not fit, return them one by one.

        Args:
            actions: A batch, or a sequence of single actions of a space that is no Dict or Tuple.
            rows: As many as there are actions; None: all.

        Returns:
            None if all were written, else the list of single actions, which the caller may keep;
            nothing was written then.

        Raises:
            ValueError: There is not one action per env, or a part is missing.
            TypeError: `actions` is not a batch at all, e.g. a scalar, or a list for a Dict.
        """
        count = self._num_envs if rows is None else len(rows)
        where = slice(None) if rows is None else rows
        only = self._only
        if (  # the usual case, on the path of every step
            only is not None
            and type(actions) is np.ndarray
            and (actions.dtype == only.dtype or _casts(actions.dtype, only.dtype))
            and actions.shape[:1] == (count,)
            and actions.shape[1:] == self._only_shape
        ):
            only[where] = actions
            return None
        if self._leaves is not None:
            arrays: list[Any] = []
            if _collect(self._space, actions, arrays) and all(
                type(array) is np.ndarray
                and (array.dtype == leaf.dtype or _casts(array.dtype, leaf.dtype))
                and array.shape == (count, *leaf.shape[1:])
                for array, leaf in zip(arrays, self._leaves, strict=True)
            ):
                for array, leaf in zip(arrays, self._leaves, strict=True):
                    leaf[where] = array
                return None
        try:
            singles = list(iterate(self._space, actions))
        except (ValueError, TypeError, LookupError) as exc:  # not of this form, or parts too short
            kind = TypeError if isinstance(exc, TypeError) else ValueError
            raise kind(
                f"expected {count} actions, one per env, as a batch of {self._space}: {exc}"
            ) from exc
        if len(singles) != count:
            raise ValueError(f"expected {count} actions, one per env, but got {len(singles)}")
        # Copies: what is sent must not change under the sender's hands.
        return [own(single) for single in singles]


def _casts(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether numbers of one dtype are numbers of the same kind in another, unchanged."""
    same_kind = given.kind == wanted.kind or (given.kind == "u" and wanted.kind == "i")
    return same_kind and np.can_cast(given, wanted, "safe")


def _is_nested(space: gymnasium.Space[Any]) -> bool:
    return isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)


def _collect(space: gymnasium.Space[Any], actions: Any, arrays: list[Any]) -> bool:
    """Append the batch's leaves in the order of the space's; False if it has another form."""
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(actions, dict):
            return False
        return all(
            key in actions and _collect(subspace, actions[key], arrays)
            for key, subspace in space.spaces.items()
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        if not isinstance(actions, tuple) or len(actions) != len(space.spaces):
            return False
        return all(
            _collect(subspace, part, arrays)
            for subspace, part in zip(space.spaces, actions, strict=True)
        )
    arrays.append(actions)
    return True
