"""Copies that an env may keep and change without harm to anybody.

What the codec decodes is read-only and may be meant for several envs; what an env returns it
may go on changing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = ["own", "own_deeply"]

T = TypeVar("T")

#: What nobody can change. NumPy's scalars cannot be changed, but for records (`void`).
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {kind for kind in np.sctypeDict.values() if kind not in (np.void, np.object_)}
)

_copy_dict: Callable[[Any], Any] = dict.copy
#: What is copied. As a tuple: a union would be made anew at each look.
_CONTAINERS = (np.ndarray, np.void, dict, list, tuple, set, deque, bytearray)


def own(value: T) -> T:
    """Return `value` with its containers and arrays copied; arrays are writable.

    Containers are dicts, lists, sets, deques, bytearrays, what is derived from these, and tuples.
    Other objects stay what they are: they may not be copyable, or not be meant to be. So does a
    container that contains itself: who is to read it will say that it cannot.
    """
    flat: Any = value
    owned: T = value  # no `cast`, which takes as long as the copy of a small dict
    if type(flat) is dict and _ATOMS.issuperset(map(type, flat.values())):
        owned = _copy_dict(flat)  # most infos, in a third of the time
    elif type(flat) is not tuple or not _ATOMS.issuperset(map(type, flat)):
        try:
            owned = _own(flat)
        except RecursionError:
            return value
    return owned


def own_deeply(value: T) -> T:
    """Return a deep copy of `value`, or, where an object in it refuses, what `own` gives."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        copied: T = value.copy()
        return copied
    try:
        return copy.deepcopy(value)
    except Exception:  # __deepcopy__ is anybody's code; the value is usable as it is
        return own(value)


def _own(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: _own(item) for key, item in value.items()}
    if kind is list:
        return [_own(item) for item in value]
    if kind is tuple:
        return tuple([_own(item) for item in value])
    if isinstance(value, _CONTAINERS):
        try:
            return _own_other(value)
        except (RecursionError, MemoryError):  # the first: it contains itself
            raise
        except Exception:  # a derived class's code; the value is usable as it is
            return value
    return value


def _own_other(value: Any) -> Any:
    """As `_own`, of an array or what may be of a derived class, whose code may raise anything."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        copied: Any = value.copy()
        if value.dtype.hasobject:
            _own_items(np.asarray(copied))
        return copied
    if isinstance(value, np.void):  # a record is often a view of its array
        return _own_other(np.array(value))[()]
    if isinstance(value, tuple):
        # Named, e.g. a GraphInstance, whose constructor may take other things.
        return kind._make([_own(item) for item in value]) if hasattr(kind, "_make") else value
    copied = copy.copy(value)
    if copied is value or type(copied) is not kind:
        return value
    if isinstance(copied, dict):
        for key, item in value.items():
            dict.__setitem__(copied, key, _own(item))
    elif isinstance(copied, list):
        list.__setitem__(copied, slice(None), [_own(item) for item in value])
    elif isinstance(copied, deque):
        deque.clear(copied)
        deque.extend(copied, [_own(item) for item in value])
    return copied


def _own_items(array: Any) -> None:
    """Have an array's objects, also those in fields of its records, be copies."""
    if array.dtype == object:
        owned = np.empty(array.size, object)
        for index, item in enumerate(array.reshape(-1)):
            owned[index] = _own(item)
        array[...] = owned.reshape(array.shape)
    for field in array.dtype.names or ():
        if array[field].dtype.hasobject:
            _own_items(array[field])
