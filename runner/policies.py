"""Policies that need no learning: random, zero, and a function of the user's.

Leaves out everything with weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium import Space, spaces

from envbus.bus.errors import ConfigError

__all__ = ["Policy", "parse_policy", "random_policy", "zero_action", "zero_policy"]

#: `(observations, action_space) -> actions`, both batched over the envs.
Policy: TypeAlias = Callable[[Any, "Space[Any]"], Any]


def parse_policy(text: str) -> Policy:
    """Return the policy that `text` names: "random", "zero" or "module:function".

    Raises:
        ConfigError: There is no such policy, or its module cannot be imported.
    """
    if text == "random":
        return random_policy
    if text == "zero":
        return zero_policy
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"policy must be random, zero or module:function, not {text!r}")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as exc:
        raise ConfigError(
            f"cannot import the policy's module {module_name!r}: {type(exc).__name__}: {exc}"
        ) from exc
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"module {module_name!r} has no {name!r} to use as policy")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"policy {text!r} is not a function but a {type(target).__name__}")
    return cast("Policy", target)


def random_policy(observations: object, action_space: Space[Any]) -> Any:
    """Return a sample of the batched action space; seed the space to repeat it."""
    del observations
    return action_space.sample()


def zero_policy(observations: object, action_space: Space[Any]) -> Any:
    """Return zeros, or where the space has none, its lowest value.

    Raises:
        ConfigError: The space knows no zero.
    """
    del observations
    return zero_action(action_space)


def zero_action(space: Space[Any]) -> Any:
    """Return the member of `space` that is closest to zero.

    Raises:
        ConfigError: The space, or a part of it, knows no zero.
    """
    match space:
        case spaces.Box():
            zeros = np.zeros(space.shape, space.dtype)
            return np.clip(zeros, space.low, space.high).astype(space.dtype)
        case spaces.Discrete():
            inside = int(space.start) <= 0 < int(space.start) + int(space.n)
            return space.dtype.type(0 if inside else space.start)
        case spaces.MultiDiscrete():
            has_zero = (space.start <= 0) & (space.start + space.nvec > 0)
            return np.where(has_zero, 0, space.start).astype(space.dtype)
        case spaces.MultiBinary():
            return np.zeros(space.shape, space.dtype)
        case spaces.Dict():
            return {key: zero_action(part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(zero_action(part) for part in space.spaces)
        case spaces.Text():
            return space.character_list[0] * space.min_length if space.min_length else ""
        case spaces.OneOf():
            return (np.int64(0), zero_action(space.spaces[0]))
    raise ConfigError(
        f"no zero action is known for {type(space).__name__}; use another policy than zero"
    )
