"""Elements of spaces on their way over the wire: checked, and converted to the space's own types.

Pure. Whoever sends may write nested lists for arrays and tuples, and plain numbers for those of
the space's width; whoever receives converts by the space, and refuses by name what is outside.

Values may be anybody's. So nothing becomes an array before it is known to have the space's shape
and to consist of numbers, and nothing passes that is not finite or leaves the space's dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import Value
from envbus.actors.spaces.spaces import Element, Space, shown
from envbus.bus.brief import brief
from envbus.bus.wire.messages import Tree

__all__ = ["Take", "is_finite", "leaves", "opened", "taker", "to_wire"]

#: Returns the element that a value is; the second argument is its place, for people.
Take: TypeAlias = Callable[[Value, str], Element]
Array: TypeAlias = npt.NDArray[Any]

#: Arrays of at most so many numbers go as lists: encoding them as arrays takes longer.
_SMALL: Final = 32
#: Rows of an array that has no numbers.
_MAX_EMPTY: Final = 2**16
#: Kinds of numbers whose list says all there is to say.
_PLAIN_KINDS: Final = frozenset("biuf")
#: Kinds that may stand for those of a space's dtype: none of them loses what it means.
_CONVERTIBLE: Final = {"f": "fiu", "i": "iu", "u": "iu", "b": "biu", "c": "cfiu"}
#: Spaces whose elements, stacked, are one array.
_OF_ONE_ARRAY: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_LISTS: Final = frozenset({list, tuple})
#: Types that may stand in lists, by what may be converted.
_NUMBERS: Final = {"b": bool, "i": int, "f": float, "c": complex}


def taker(space: Space) -> Take:
    """Return what checks and converts elements of `space`.

    It returns arrays and scalars of the space's dtypes, dicts in the space's order, and tuples; it
    raises `SpaceMismatchError`, which says what was expected and what came. Arrays may be the
    value's own.
    """
    if isinstance(space, spaces.Discrete):
        return _discrete_taker(space)
    if isinstance(space, _OF_ONE_ARRAY):
        return _array_taker(space, *_limits(space))
    if isinstance(space, spaces.Dict):
        return _dict_taker(space)
    if isinstance(space, spaces.Tuple):
        return _tuple_taker(space)
    if isinstance(space, spaces.OneOf):
        return _one_of_taker(space)
    if isinstance(space, spaces.Sequence) and not space.stack:
        return _sequence_taker(space)
    if isinstance(space, spaces.Sequence) and _consists_of_arrays(space.feature_space):
        return _stack_taker(space)
    if type(space) is spaces.Graph and _is_of_numbers(space):
        return _graph_taker(space)
    return _any_taker(space)


def to_wire(element: Element, *, plain: bool = False) -> Value:
    """Return an element as it is sent.

    Args:
        element: Of any space.
        plain: Without ext types: for a receiver that has none.
    """
    kind = type(element)
    if kind is np.ndarray:
        if element.dtype.hasobject and not plain:
            return Tree(element)
        small = element.size <= _SMALL and element.dtype.itemsize <= 8
        if plain or (small and element.dtype.kind in _PLAIN_KINDS):
            return element.tolist()
        return element
    if isinstance(element, np.generic):
        item = element.item()
        return item if plain or type(item) in _AS_IT_IS else Tree(element)
    if kind is int and not plain and not -(2**63) <= element < 2**64:
        return Tree(element)
    if kind is dict:
        return {key: to_wire(value, plain=plain) for key, value in element.items()}
    if kind is list or kind is tuple:
        return [to_wire(value, plain=plain) for value in element]
    if isinstance(element, Mapping):
        return {key: to_wire(value, plain=plain) for key, value in element.items()}
    if kind in _AS_IT_IS:
        return element
    if plain and isinstance(element, tuple):
        return [to_wire(value, plain=plain) for value in element]
    return Tree(element)


_AS_IT_IS = frozenset({type(None), bool, int, float, str, bytes, Tree})


def _array_taker(
    space: Space, low: Array | np.generic, high: Array | np.generic, allowed: str = ""
) -> Take:
    assert space.dtype is not None
    dtype, shape = np.dtype(space.dtype), space.shape
    assert shape is not None
    check = _checker(space, low, high, allowed)
    kinds = _kinds_for(dtype, allowed)
    size = math.prod(shape)
    numbers = frozenset(kind for code, kind in _NUMBERS.items() if code in kinds)

    def take(value: Value, place: str) -> Element:
        if type(value) is bytes and dtype == np.uint8 and len(value) == size:
            array: Array = np.frombuffer(bytearray(value), dtype).reshape(shape)  # a picture, say
        else:
            array = value if type(value) is np.ndarray else to_array(value, place)
        if array.shape != shape:
            if array.size or size:
                raise _mismatch(space, place, value, f"of shape {array.shape}")
            return np.empty(shape, dtype)  # an empty list does not say how it is empty
        return check(array, value, place)

    def to_array(value: Value, place: str) -> Array:
        if shape and type(value) is list and not size and not any(value):
            return np.empty(0)
        if not is_nested(value):
            check_nested(value, 0, value, place)
        try:
            array: Array = np.array(value)
            if array.dtype.kind == "f" and numbers == {int} and (array >= 0).all():
                array = np.array(value, np.uint64)  # on both sides of 2**63 NumPy makes floats
        except (ValueError, OverflowError) as error:
            raise _mismatch(space, place, value, "which is no array of it") from error
        return array

    def is_nested(value: Value) -> bool:
        """Return whether it is lists of numbers, nested as `shape` says, and nothing else."""
        level: list[Value] = [value]
        for length in shape:
            if not _LISTS.issuperset(map(type, level)) or any(len(x) != length for x in level):
                return False
            level = list(itertools.chain.from_iterable(level))
        return numbers.issuperset(map(type, level))

    def check_nested(part: Value, depth: int, value: Value, place: str) -> None:
        """Refuse what is not nested as `shape` says, or holds more than numbers and arrays."""
        if isinstance(part, np.ndarray | np.generic):
            if part.shape != shape[depth:] or part.dtype.kind not in kinds:
                raise _mismatch(space, place, value, "with an array in it that does not fit")
        elif depth == len(shape):
            if type(part) not in numbers:
                raise _mismatch(space, place, value, f"with a {type(part).__name__} in it")
        elif not isinstance(part, list | tuple) or len(part) != shape[depth]:
            came = f"{len(part)}" if isinstance(part, list | tuple) else "no list"
            raise _mismatch(
                space, place, value, f"with {came} where {shape[depth]} numbers or lists belong"
            )
        else:
            for item in part:
                check_nested(item, depth + 1, value, place)

    if dtype.kind == "f" and len(shape) == 1 and size <= _SMALL:
        return _small_taker(dtype, *_finite(dtype, low, high), take)
    return take


def _kinds_for(dtype: np.dtype[Any], allowed: str) -> str:
    return allowed or _CONVERTIBLE.get(dtype.kind, dtype.kind)


def _finite(dtype: np.dtype[Any], low: Any, high: Any) -> tuple[Any, Any]:
    """Return bounds without infinity, which is no number that may be sent."""
    if dtype.kind not in "fc":
        return low, high
    most = np.finfo(dtype).max
    return np.maximum(low, -most), np.minimum(high, most)


def _checker(
    space: Space, low: Any, high: Any, allowed: str = ""
) -> Callable[[Array, Value, str], Array]:
    """Return what checks and converts the numbers of an element, or of several, stacked."""
    dtype = np.dtype(space.dtype)
    kinds, is_float = _kinds_for(dtype, allowed), dtype.kind == "f"
    holds_all = dtype.kind in "iu" and _is_whole_range(dtype, low, high)
    low, high = _finite(dtype, low, high)

    def check(array: Array, value: Value, place: str) -> Array:
        if array.dtype == dtype:
            if holds_all:  # of pixels: comparing them takes longer than moving them
                return array
        else:
            if array.dtype.kind not in kinds:
                if not array.size:
                    return np.empty(array.shape, dtype)
                raise _mismatch(space, place, value, f"of {array.dtype}")
            if is_float:
                with np.errstate(over="ignore"):  # it becomes infinite, which is refused below
                    array = array.astype(dtype)
        inside = (array >= low) & (array <= high)
        if not inside.all():
            index = np.unravel_index(int(np.argmin(inside)), array.shape) if array.shape else ()
            where = f" at {[int(i) for i in index]}" if index else ""
            raise _mismatch(space, place, value, f"with {array[index]}{where}")
        return array if array.dtype == dtype else array.astype(dtype)

    return check


def _small_taker(dtype: np.dtype[Any], low: Any, high: Any, otherwise: Take) -> Take:
    """Return a `Take` for what most simulators send, a few floats: a third of the time.

    What is outside, or may become infinite, is left to `otherwise`.
    """
    most = float(np.finfo(dtype).max)
    bounds = [
        (max(a, -most), min(b, most)) for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
    size = len(bounds)

    def take(value: Value, place: str) -> Element:
        if type(value) is not list or len(value) != size:
            return otherwise(value, place)
        for number, (least, largest) in zip(value, bounds, strict=True):
            if type(number) is not float or not least <= number <= largest:
                return otherwise(value, place)
        return np.array(value, dtype)

    return take


def _limits(space: Space) -> tuple[Any, Any, str]:
    """Return the least and the largest numbers of an element, and kinds that may stand for them."""
    if isinstance(space, spaces.Box):
        return space.low, space.high, ""
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + (space.nvec - 1), ""
    if isinstance(space, spaces.Discrete):
        last = int(space.start) + int(space.n) - 1
        return space.start, np.dtype(space.dtype).type(last), ""
    assert isinstance(space, spaces.MultiBinary)
    return np.int8(0), np.int8(1), "biu"


def _is_whole_range(
    dtype: np.dtype[Any], low: Array | np.generic, high: Array | np.generic
) -> bool:
    limits = np.iinfo(dtype)
    return bool((low == limits.min).all() and (high == limits.max).all())


def _discrete_taker(space: spaces.Discrete) -> Take:
    first, last = int(space.start), int(space.start) + int(space.n) - 1
    scalar: Any = np.dtype(space.dtype).type

    def take(value: Value, place: str) -> Element:
        kind = type(value)
        if kind is scalar:  # as policies choose them
            if first <= value <= last:
                return value
            raise _mismatch(space, place, value)
        if kind is not int:
            is_integer = isinstance(value, np.integer | np.ndarray) and value.dtype.kind in "iu"
            if not is_integer or value.shape:
                raise _mismatch(space, place, value)
            value = int(value)
        if not first <= value <= last:
            raise _mismatch(space, place, value)
        return scalar(value)

    return take


def _dict_taker(space: spaces.Dict, part_taker: Callable[[Space], Take] = taker) -> Take:
    parts = [(key, part_taker(sub)) for key, sub in space.spaces.items()]

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, Mapping):
            raise _mismatch(space, place, value)
        if len(value) != len(parts) or any(key not in value for key, _ in parts):
            keys = sorted(map(brief, itertools.islice(value, 20)))
            raise _mismatch(space, place, value, f"with the keys {', '.join(keys) or 'none'}")
        return {key: sub(value[key], f"{place}[{key!r}]") for key, sub in parts}

    return take


def _tuple_taker(space: spaces.Tuple[Any], part_taker: Callable[[Space], Take] = taker) -> Take:
    parts = [part_taker(sub) for sub in space.spaces]

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise _mismatch(space, place, value)
        return tuple([sub(value[i], f"{place}[{i}]") for i, sub in enumerate(parts)])

    return take


def _one_of_taker(space: spaces.OneOf[Any]) -> Take:
    parts = [taker(sub) for sub in space.spaces]

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise _mismatch(space, place, value)
        choice = value[0]
        if isinstance(choice, bool) or not isinstance(choice, int | np.integer):
            raise _mismatch(space, place, value)
        if not 0 <= choice < len(parts):
            raise _mismatch(space, place, value)
        return np.int64(choice), parts[int(choice)](value[1], f"{place}[1]")

    return take


def _sequence_taker(space: spaces.Sequence) -> Take:
    part = taker(space.feature_space)

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, list | tuple):
            raise _mismatch(space, place, value)
        return tuple([part(item, f"{place}[{i}]") for i, item in enumerate(value)])

    return take


def _consists_of_arrays(space: Space) -> bool:
    if isinstance(space, spaces.Dict):
        return all(map(_consists_of_arrays, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_consists_of_arrays, space.spaces))
    return isinstance(space, _OF_ONE_ARRAY)


def _stack_taker(space: spaces.Sequence) -> Take:
    stack = _stacked_taker(space.feature_space)

    def take(value: Value, place: str) -> Element:
        element = stack(value, place)
        if len(set(_lengths(element))) > 1:
            raise _mismatch(space, place, value, "with parts of different lengths")
        return element

    return take


def _lengths(element: Element) -> list[int]:
    if isinstance(element, dict | tuple):
        parts = element.values() if isinstance(element, dict) else element
        return [length for part in parts for length in _lengths(part)]
    return [len(element)]


def _stacked_taker(space: Space) -> Take:
    """Return what takes several elements of `space`, stacked as Sequence stacks them."""
    if isinstance(space, spaces.Dict):
        return _dict_taker(space, _stacked_taker)
    if isinstance(space, spaces.Tuple):
        return _tuple_taker(space, _stacked_taker)
    part, shape, dtype = taker(space), space.shape, space.dtype
    assert shape is not None
    check = _checker(space, *_limits(space))

    def take(value: Value, place: str) -> Element:
        if isinstance(value, np.ndarray):
            if value.shape[1:] != shape or not value.shape or not (value.size or len(value) == 0):
                raise _mismatch(space, place, value)
            return check(value, value, place)  # at one go: rows may be millions
        elif not isinstance(value, list | tuple):
            raise _mismatch(space, place, value)
        items = [part(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return np.stack(items) if items else np.empty((0, *shape), dtype)

    return take


def _is_of_numbers(space: spaces.Graph) -> bool:
    parts = (space.node_space, space.edge_space)
    return all(part is None or isinstance(part, spaces.Box | spaces.Discrete) for part in parts)


def _graph_taker(space: spaces.Graph) -> Take:
    """Look at all nodes and edges at one go: `contains` takes twenty microseconds for each."""
    parts = [(space.node_space, *_limits(space.node_space)[:2])]
    if space.edge_space is not None:
        parts.append((space.edge_space, *_limits(space.edge_space)[:2]))
    take_any, assert_short = _any_taker(space), _empty_rows_check(space)

    def are_inside(rows: Array, part: Space, low: Any, high: Any) -> bool:
        """Return whether they are elements, as each space's own `contains` has it."""
        kinds = "iu" if isinstance(part, spaces.Discrete) else "biufc"
        if rows.shape[1:] != part.shape or not rows.ndim or rows.dtype.kind not in kinds:
            return False
        return bool(
            np.can_cast(rows.dtype, np.dtype(part.dtype)) and ((rows >= low) & (rows <= high)).all()
        )

    def is_inside(graph: Value) -> bool:
        nodes, edges, links = graph
        if not are_inside(nodes, *parts[0]):
            return False
        if edges is None or links is None:
            return edges is None and links is None
        return (
            len(parts) > 1
            and are_inside(edges, *parts[1])
            and links.dtype.kind in "iu"
            and links.shape == (len(edges), 2)
            and bool(((links >= 0) & (links < len(nodes))).all())
        )

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        if not isinstance(value, spaces.GraphInstance):
            raise _mismatch(space, place, value)
        if not all(part is None or type(part) is np.ndarray for part in value):
            if any(isinstance(part, list | tuple) and len(part) > _MAX_EMPTY for part in value):
                raise _mismatch(space, place, value, "with so many rows that are no array")
            return take_any(value, place)
        assert_short(value, place)
        nodes: Value = value.nodes
        if nodes is None or not is_inside(value):
            raise _mismatch(space, place, value)
        if not is_finite(value):
            raise _mismatch(space, place, value, "with a number that is not finite")
        return value

    return take


def _empty_rows_check(space: Space) -> Callable[[Value, str], None]:
    """Return what refuses rows without bytes, of which a few bytes may tell millions."""

    def check(value: Value, place: str) -> None:
        if any(
            isinstance(part, np.ndarray) and not part.size and part.shape[:1] > (_MAX_EMPTY,)
            for part in leaves(value)
        ):
            raise _mismatch(space, place, value, "with too many rows of nothing")

    return check


def _any_taker(space: Space) -> Take:
    assert_short = _empty_rows_check(space)

    def take(value: Value, place: str) -> Element:
        value = opened(value)
        assert_short(value, place)  # as each row is looked at
        try:
            inside = space.contains(value)
        except Exception:  # a space of the user's, and a value of anybody's
            inside = False
        if not inside:
            raise _mismatch(space, place, value)
        if not is_finite(value):
            raise _mismatch(space, place, value, "with a number that is not finite")
        return value

    return take


def leaves(value: Value) -> Iterator[Value]:
    """Yield what stands in nested dicts, lists and tuples, in no promised order."""
    found = [value]
    while found:
        item = found.pop()
        if isinstance(item, Mapping):
            found += item.values()
        elif isinstance(item, list | tuple):
            found += item
        else:
            yield item


def is_finite(value: Value) -> bool:
    """Return whether no number in nested dicts, lists, tuples and arrays is infinite or NaN."""
    for item in leaves(value):
        if isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif (
            isinstance(item, np.ndarray | np.generic)
            and item.dtype.kind in "fc"
            and not np.isfinite(item).all()
        ):
            return False
    return True


def opened(value: Value) -> Value:
    """Return what a value that came in a `Tree` is."""
    return value.value if type(value) is Tree else value


def _mismatch(space: Space, place: str, value: Value, what: str = "") -> SpaceMismatchError:
    if type(value) is np.ndarray:
        came = f"an array of {value.dtype}, shape {value.shape}"
    else:
        came = f"the {type(value).__name__} {brief(value)}"
    text = f"{shown(space)}, got {came}{f', {what}' if what else ''}"
    return SpaceMismatchError(f"{place}: expected {text}")
