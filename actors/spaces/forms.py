"""Whether a value has the form of a space's elements: keys, lengths, shapes and kinds of dtype.

Pure. For values that may be anybody's: nothing becomes an array, and what a check costs is bounded
by the size of the value. Leaves out whether numbers are within bounds: those of an env on this host
may be outside, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium import spaces

from envbus.actors.spaces.spaces import Element, Space
from envbus.bus.brief import brief

__all__ = ["CheckForm", "check_form_of"]

#: Returns what is wrong with a value, for people, beginning with its place (`['pos'][0]`) where it
#: stands in others; None: nothing is.
CheckForm: TypeAlias = Callable[[Element], "str | None"]
#: None: any length.
_Shape: TypeAlias = "tuple[int | None, ...]"

_NUMBERS: Final = frozenset("biuf")
_ARRAYS: Final = (np.ndarray, np.generic)
#: Spaces whose elements are one array each.
_OF_ONE_ARRAY: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_PLAIN: Final = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


def check_form_of(space: Space) -> CheckForm:
    """Return what checks elements of `space`; of a space of the user's nothing is known.

    Arrays may be whatever `np.stack(..., out=...)` takes for an array of the space's dtype, as
    Gymnasium batches them: numbers, and lists of numbers, of a dtype that can be cast to it as
    "same_kind".
    """
    return _check_of(space, stacked=False)


def _check_of(space: Space, *, stacked: bool) -> CheckForm:
    """Return what checks elements of `space`, or `stacked` several of them, as Sequence does."""
    check: CheckForm
    if isinstance(space, _OF_ONE_ARRAY):
        assert space.dtype is not None
        assert space.shape is not None
        shape = (None, *space.shape) if stacked else space.shape
        return _array_check(np.dtype(space.dtype), shape)
    if isinstance(space, spaces.Dict):
        return _dict_check({k: _check_of(s, stacked=stacked) for k, s in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return _tuple_check([_check_of(s, stacked=stacked) for s in space.spaces])
    if isinstance(space, spaces.Text):
        check = _check_text
    elif isinstance(space, spaces.OneOf):
        check = _one_of_check([check_form_of(sub) for sub in space.spaces])
    elif isinstance(space, spaces.Sequence) and space.stack:
        check = _check_of(space.feature_space, stacked=True)
    elif isinstance(space, spaces.Sequence):
        check = _items_check(check_form_of(space.feature_space))
    elif isinstance(space, spaces.Graph):
        check = _graph_check(space)
    else:
        return lambda _: None
    return _items_check(check) if stacked else check


def _array_check(dtype: np.dtype[Any], shape: _Shape) -> CheckForm:
    def check(value: Element) -> str | None:
        if type(value) is np.ndarray and value.dtype is dtype and value.shape == shape:
            return None
        dtypes: set[np.dtype[Any]] = set()
        if _is_nested(value, shape, dtypes) and all(_fits(one, dtype) for one in dtypes):
            return None
        wanted = str(shape).replace("None", "any")
        return f"{_what(value)}, where shape {wanted} and {dtype} belong"

    return check


def _is_nested(value: Element, shape: _Shape, dtypes: set[np.dtype[Any]]) -> bool:
    """Return whether arrays, or lists of them, have this shape, and collect their dtypes."""
    if isinstance(value, _ARRAYS):
        dtypes.add(value.dtype)
        return len(value.shape) == len(shape) and all(
            wanted is None or wanted == length
            for wanted, length in zip(shape, value.shape, strict=True)
        )
    kind = type(value)
    if not shape:
        dtypes.add(_PLAIN.get(kind, np.dtype(object)))
        return kind is not int or -(2**63) <= value < 2**63
    if kind is not list and kind is not tuple:
        return False
    if shape[0] is None and not value:
        return True  # an empty list does not say how it is empty
    return shape[0] in (None, len(value)) and all(
        _is_nested(item, shape[1:], dtypes) for item in value
    )


def _fits(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return dtype.kind in _NUMBERS and np.can_cast(dtype, wanted, "same_kind")


def _dict_check(parts: Mapping[Any, CheckForm]) -> CheckForm:
    def check(value: Element) -> str | None:
        if not isinstance(value, Mapping):
            return f"{_what(value)}, where a dict belongs"
        if value.keys() != parts.keys():
            return f" with the keys {brief(list(value))}, where {brief(list(parts))} belong"
        for key, part in parts.items():
            if (wrong := part(value[key])) is not None:
                return f"[{key!r}]{wrong}"
        return None

    return check


def _tuple_check(parts: list[CheckForm]) -> CheckForm:
    def check(value: Element) -> str | None:
        if not isinstance(value, tuple | list) or len(value) != len(parts):
            return f"{_what(value)}, where a tuple of {len(parts)} belongs"
        for index, (part, item) in enumerate(zip(parts, value, strict=True)):
            if (wrong := part(item)) is not None:
                return f"[{index}]{wrong}"
        return None

    return check


def _items_check(part: CheckForm) -> CheckForm:
    def check(value: Element) -> str | None:
        if not isinstance(value, tuple | list):
            return f"{_what(value)}, where a tuple belongs"
        for index, item in enumerate(value):
            if (wrong := part(item)) is not None:
                return f"[{index}]{wrong}"
        return None

    return check


def _one_of_check(parts: list[CheckForm]) -> CheckForm:
    def check(value: Element) -> str | None:
        if not isinstance(value, tuple) or len(value) != 2:
            return f"{_what(value)}, where a tuple of 2 belongs"
        choice = value[0]
        if isinstance(choice, np.ndarray) and not choice.shape:
            choice = choice[()]
        is_number = isinstance(choice, int | np.integer) and not isinstance(choice, bool)
        if not is_number or not 0 <= choice < len(parts):
            return f"[0]{_what(choice)}, where the number of one of {len(parts)} spaces belongs"
        wrong = parts[int(choice)](value[1])
        return None if wrong is None else f"[1]{wrong}"

    return check


def _graph_check(space: spaces.Graph) -> CheckForm:
    nodes = _check_of(space.node_space, stacked=True)
    edges = None if space.edge_space is None else _check_of(space.edge_space, stacked=True)
    links = _array_check(np.dtype(np.int64), (None, 2))

    def check(value: Element) -> str | None:
        if type(value) is not spaces.GraphInstance:
            return f"{_what(value)}, where a GraphInstance belongs"
        parts = {"nodes": nodes, "edges": edges, "edge_links": links}
        for name, part in parts.items():
            item = getattr(value, name)
            if item is None and name != "nodes":  # it has no edges
                continue
            wrong = f"{_what(item)}, where None belongs" if part is None else part(item)
            if wrong is not None:
                return f".{name}{wrong}"
        return None

    return check


def _check_text(value: Element) -> str | None:
    return None if isinstance(value, str) else f"{_what(value)}, where a string belongs"


def _what(value: Element) -> str:
    if isinstance(value, _ARRAYS):
        return f" of shape {value.shape} and {value.dtype}"
    return f" that is {brief(value)}"
