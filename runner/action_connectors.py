"""What actions go through on their way from the policy to the env. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors.spaces import Space
from envbus.bus.errors import ConfigError
from envbus.runner.connectors import Connector, Keys, map_leaf_spaces, map_space
from envbus.runner.nested import Tree, map_tree

__all__ = ["ClipActions", "FreezeActions", "RescaleActions"]


class ClipActions(Connector):
    """Box parts brought into their bounds, in the space's dtype.

    Args:
        space: The env's action space; parts that are no Box stay as they are.
    """

    def __init__(self, space: Space) -> None:
        self.space = space

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return actions that the space contains."""
        del keys
        return map_space(_clip, self.space, batch)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions themselves: they are inside."""
        del keys
        return batch


class RescaleActions(Connector):
    """Box parts from [-1, 1] to the bounds of the space, in its dtype; what is outside is clipped.

    Args:
        space: The env's action space; parts that are no Box stay as they are.

    Raises:
        ConfigError: A Box has an infinite bound.
    """

    def __init__(self, space: Space) -> None:
        self._env_space = space
        self.space = map_leaf_spaces(_unit_space, space)

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return actions that the space contains."""
        del keys

        def rescale(space: Space, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if not isinstance(space, spaces.Box):
                return leaf
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            scaled = low + (np.asarray(leaf, np.float64) + 1.0) * (0.5 * (high - low))
            # The centre of a Box of integers may lie between two of them.
            if np.issubdtype(space.dtype, np.integer):
                scaled = np.rint(scaled)
            return _clip(space, scaled)

        return map_space(rescale, self._env_space, batch)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions in [-1, 1], as float32; of a bound that is a point, 0."""
        del keys

        def scale(space: Space, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if not isinstance(space, spaces.Box):
                return leaf
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            width = np.where(high > low, high - low, 1.0)
            inside = 2.0 * (np.asarray(leaf, np.float64) - low) / width - 1.0
            return np.where(high > low, inside, 0.0).astype(np.float32)

        return map_space(scale, self._env_space, batch)


class FreezeActions(Connector):
    """Read-only copies: neither an env nor a callback changes what the policy or the batch holds.

    Goes last; `space` is the env's action space.
    """

    def __init__(self, space: Space) -> None:
        self.space = space

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return the same values in new memory that refuses to be written."""
        del keys

        def freeze(leaf: Any) -> npt.NDArray[Any]:
            frozen = np.array(leaf)
            frozen.flags.writeable = False
            return frozen

        return map_tree(freeze, batch)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions themselves."""
        del keys
        return batch


def _clip(space: Space, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not isinstance(space, spaces.Box):
        return leaf
    clipped: npt.NDArray[Any] = np.clip(leaf, space.low, space.high).astype(space.dtype)
    return clipped


def _unit_space(space: Space) -> Space:
    if not isinstance(space, spaces.Box):
        return space
    if not space.is_bounded():
        raise ConfigError(f"actions cannot be rescaled to infinite bounds: {space}; clip them")
    return spaces.Box(-1.0, 1.0, space.shape, np.float32)
