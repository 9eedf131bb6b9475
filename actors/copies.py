"""Copies that an env may keep and change without harm to anybody.

What the codec decodes is read-only and may be meant for several envs; what an env returns it
may go on changing.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

__all__ = ["own", "own_deeply"]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


def own(value: Any) -> Any:
    """Return `value` with its containers and arrays copied; arrays are writable.

    Other objects stay what they are: they may not be copyable, or not be meant to be.
    """
    kind = type(value)
    if kind in _ATOMS or isinstance(value, np.generic):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    if kind is list:
        return [own(item) for item in value]
    if kind is tuple:
        return tuple([own(item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[own(item) for item in value])  # a named tuple, e.g. a GraphInstance
    return value


def own_deeply(value: Any) -> Any:
    """Return a deep copy of `value`, or, where an object in it refuses, what `own` gives."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - __deepcopy__ is anybody's code; the value is usable as it is
        return own(value)
