"""Gymnasium spaces as plain data, and the arrays that fixed-size spaces consist of.

Pure: no socket, process or env in this file. What a space means for shared memory (offsets,
rows) is in `blocks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import concatenate

from envbus.actors.spaces.agent_spaces import AgentSpaces, RecordSpace
from envbus.bus.brief import brief, cut
from envbus.bus.wire.codec import register_struct

__all__ = [
    "Element",
    "Leaf",
    "Plain",
    "Space",
    "from_plain",
    "is_fixed_size",
    "leaves",
    "shown",
    "structurer",
    "to_plain",
]

Space: TypeAlias = gymnasium.Space[Any]
#: An element of a space, or a batch of elements: arrays, numbers, nested dicts and tuples.
Element: TypeAlias = Any
#: Dicts, lists, numbers, strings and arrays; or an object that has no such form.
Plain: TypeAlias = Any

#: One entry per space class that has a plain form: its attributes as plain data. The second
#: argument describes the spaces within it.
_DESCRIBE: dict[type[Any], Callable[[Any, Callable[[Space], Plain]], dict[str, Any]]] = {
    spaces.Box: lambda space, _: _describe_box(space),
    spaces.Discrete: lambda space, _: {
        "dtype": space.dtype.str,
        "n": int(space.n),
        "start": int(space.start),
    },
    spaces.MultiDiscrete: lambda space, _: {
        "dtype": space.dtype.str,
        "nvec": space.nvec,
        "start": space.start,
    },
    spaces.MultiBinary: lambda space, _: {"shape": list(space.shape), "flat": type(space.n) is int},
    spaces.Text: lambda space, _: {
        "min_length": space.min_length,
        "max_length": space.max_length,
        "characters": "".join(space.character_list),
    },
    spaces.Dict: lambda space, part: {
        "items": [[key, part(sub)] for key, sub in space.spaces.items()],
        "sort_keys": getattr(space, "sort_keys", True),  # since Gymnasium 1.4
    },
    spaces.Tuple: lambda space, part: {"items": [part(sub) for sub in space.spaces]},
    spaces.OneOf: lambda space, part: {"items": [part(sub) for sub in space.spaces]},
    spaces.Sequence: lambda space, part: {
        "item": part(space.feature_space),
        "stack": space.stack,
    },
    spaces.Graph: lambda space, part: {
        "node": part(space.node_space),
        "edge": None if space.edge_space is None else part(space.edge_space),
    },
    AgentSpaces: lambda space, part: _describe_agents(space, part),
    RecordSpace: lambda space, part: _describe_agents(space, part),
}


#: Classes of spaces that have others in `spaces`, and those that have one bound or more per number.
_OF_PARTS = frozenset({spaces.Dict, spaces.Tuple, spaces.OneOf, AgentSpaces, RecordSpace})
_OF_BOUNDS = frozenset({spaces.Box, spaces.MultiDiscrete})
#: Numbers of whose bounds all are shown.
_MOST_SHOWN = 100
#: What nests numbers.
_LISTS = frozenset({list, tuple})
#: Elements of a MultiBinary space, whose description is not the longer for being large.
_MAX_BINARY = 2**24
#: Longest element of a Text space, in characters.
_MAX_TEXT = 2**24


def _number_dtype(plain: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a space's elements: numbers, nothing that has a size of its own."""
    text = plain["dtype"]
    if type(text) is not str or len(text) > 8:
        raise ValueError(f"not the dtype of a space: {brief(text)}")
    dtype = np.dtype(text)
    if dtype.kind not in "biuf":
        raise ValueError(f"a space has no elements of {dtype}")
    return dtype


def _numbers(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array of `dtype` that takes no more memory than what it is made of."""
    if type(value) is np.ndarray:
        if value.dtype.kind not in "biuf":
            raise ValueError(f"bounds are numbers, not of {value.dtype}")
    else:
        level, kinds = [value], {type(value)}
        while kinds and kinds <= _LISTS:  # their depth was bounded by who decoded
            level = list(chain.from_iterable(level))
            kinds = set(map(type, level))
        if not all(issubclass(kind, int | float | np.number) for kind in kinds):
            raise ValueError("bounds are numbers, or lists of them, of one depth")
    with np.errstate(over="raise", invalid="raise"):
        return np.array(value, dtype)


def _int(value: Any) -> int:
    if not isinstance(value, int | np.integer):
        raise TypeError(f"expected an integer, not {brief(value)}")
    return int(value)


def _describe_box(space: spaces.Box) -> dict[str, Any]:
    plain = {"dtype": space.dtype.str, "low": space.low, "high": space.high}
    # What the bounds say themselves need not be told.
    if not np.array_equal(space.bounded_below, -np.inf < space.low):
        plain["bounded_below"] = space.bounded_below
    if not np.array_equal(space.bounded_above, space.high < np.inf):
        plain["bounded_above"] = space.bounded_above
    return plain


def _build_box(plain: Mapping[str, Any]) -> Space:
    dtype = _number_dtype(plain)
    low, high = _numbers(plain["low"], dtype), _numbers(plain["high"], dtype)
    space = spaces.Box(low, high, dtype=dtype.type)
    # An integer box with an infinite bound stores the dtype's limit: it cannot be told again.
    for name in ("bounded_below", "bounded_above"):
        if name in plain:
            bounded = _numbers(plain[name], np.dtype(np.bool_))
            if bounded.shape != space.shape:
                raise ValueError(f"{name} has shape {bounded.shape}, the bounds {space.shape}")
            setattr(space, name, bounded)
    return space


def _build_dict(plain: Mapping[str, Any]) -> Space:
    # Pairs keep their order; a mapping would be sorted.
    space = spaces.Dict([(key, from_plain(sub)) for key, sub in plain["items"]])
    if hasattr(space, "sort_keys"):
        space.sort_keys = bool(plain["sort_keys"])
    return space


def _describe_agents(space: AgentSpaces, part: Callable[[Space], Plain]) -> dict[str, Any]:
    # Each object once: agents that share a space, with its random generator, go on sharing it.
    distinct = {id(sub): sub for sub in space.spaces.values()}
    places = {key: place for place, key in enumerate(distinct)}
    return {
        "distinct": [part(sub) for sub in distinct.values()],
        "agents": [[agent_id, places[id(sub)]] for agent_id, sub in space.spaces.items()],
    }


def _build_agents(plain: Mapping[str, Any]) -> dict[Any, Space]:
    distinct = [from_plain(sub) for sub in plain["distinct"]]
    return {agent_id: distinct[place] for agent_id, place in plain["agents"]}


def _build_discrete(plain: Mapping[str, Any]) -> Space:
    n, start, dtype = _int(plain["n"]), _int(plain["start"]), _number_dtype(plain)
    limits = np.iinfo(dtype)
    if not limits.min <= start <= start + n - 1 <= limits.max:
        raise ValueError(f"{n} numbers from {start} on do not fit {dtype}")
    if dtype == np.int64:  # the only one before Gymnasium 1.2.2
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _build_multi_discrete(plain: Mapping[str, Any]) -> Space:
    dtype = _number_dtype(plain)
    nvec, start = _numbers(plain["nvec"], dtype), _numbers(plain["start"], dtype)
    if nvec.size and not (start <= np.iinfo(dtype).max - (nvec - 1)).all():
        raise ValueError(f"not all elements fit {dtype}")
    return spaces.MultiDiscrete(nvec, dtype=dtype, start=start)


def _build_multi_binary(plain: Mapping[str, Any]) -> Space:
    shape = [_int(size) for size in plain["shape"]]
    if not all(size > 0 for size in shape) or math.prod(shape) > _MAX_BINARY:
        raise ValueError(f"shape {brief(shape)}: 1 to {_MAX_BINARY} elements are allowed")
    return spaces.MultiBinary(shape[0] if plain["flat"] else shape)


def _build_text(plain: Mapping[str, Any]) -> Space:
    longest, shortest = _int(plain["max_length"]), _int(plain["min_length"])
    if longest > _MAX_TEXT or type(plain["characters"]) is not str:
        raise ValueError(f"a text has at most {_MAX_TEXT} characters of a string")
    return spaces.Text(longest, min_length=shortest, charset=plain["characters"])


#: The way back, by class name.
_BUILD: dict[str, Callable[[Mapping[str, Any]], Space]] = {
    "Box": _build_box,
    "Discrete": _build_discrete,
    "MultiDiscrete": lambda plain: _build_multi_discrete(plain),
    "MultiBinary": lambda plain: _build_multi_binary(plain),
    "Text": lambda plain: _build_text(plain),
    "Dict": _build_dict,
    "Tuple": lambda plain: spaces.Tuple([from_plain(sub) for sub in plain["items"]]),
    "OneOf": lambda plain: spaces.OneOf([from_plain(sub) for sub in plain["items"]]),
    "Sequence": lambda plain: spaces.Sequence(from_plain(plain["item"]), stack=plain["stack"]),
    "Graph": lambda plain: spaces.Graph(
        from_plain(plain["node"]),
        None if plain["edge"] is None else from_plain(plain["edge"]),
    ),
    "AgentSpaces": lambda plain: AgentSpaces(_build_agents(plain)),
    "RecordSpace": lambda plain: RecordSpace(_build_agents(plain)),
}


def to_plain(space: Space) -> Plain:
    """Return `space` as dicts, lists, numbers, strings and arrays, or as it is.

    Only the very classes of `gymnasium.spaces` and `agent_spaces.py` have a plain form. An
    instance of a subclass, and one with attributes of its own, stays the object it is (also
    inside a container): it can go over a local actor's pipe, not over a socket. The state of the
    space's random generator travels too, so that both sides sample the same.

    Raises:
        TypeError: `space` is not a Gymnasium space.
    """
    if not isinstance(space, gymnasium.Space):
        raise TypeError(f"expected a gymnasium.Space, got {type(space).__qualname__}: {space!r}")
    return _describe(space)


def from_plain(plain: Plain) -> Space:
    """Return the space that `to_plain` described.

    It takes no more memory than a small multiple of what describes it, whoever has written that.

    Raises:
        ValueError: `plain` does not describe a space.
    """
    if isinstance(plain, gymnasium.Space):
        return plain
    name = plain.get("space") if isinstance(plain, Mapping) else None
    if not isinstance(name, str) or name not in _BUILD:
        raise ValueError(f"not the plain form of a space: {brief(plain)}")
    try:
        space = _BUILD[name](plain)
        if plain.get("random") is not None:
            space._np_random = _build_generator(plain["random"])
    except (
        LookupError,
        TypeError,
        AssertionError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ValueError(f"bad plain form of a {name} space: {brief(error)}") from error
    return space


def shown(space: Space, longest: int = 400) -> str:
    """Return `str(space)`, cut, in a time that does not grow with it.

    Whoever tells a space may have given it thousands of parts, and millions of bounds.
    """
    text = ""
    for piece in _shown(space):
        text += piece
        if len(text) > longest:
            break
    return cut(text, longest)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a fixed-size space."""

    #: Keys (of Dict) and positions (of Tuple) that lead to it; `()` for the space itself.
    path: tuple[Any, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def is_fixed_size(space: Space) -> bool:
    """Return whether each element of `space` is made of arrays of one shape and dtype.

    True for Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those, and for
    subclasses for which Gymnasium itself uses these classes' functions.
    """
    kind = concatenate.dispatch(type(space))
    if kind is _STACKED:
        return space.shape is not None and space.dtype is not None and not space.dtype.hasobject
    if kind is _OF_DICT or kind is _OF_TUPLE:
        return all(is_fixed_size(sub) for _, sub in _children(space))
    return False


def leaves(space: Space) -> list[Leaf]:
    """Return the arrays that an element of the fixed-size `space` consists of, depth first.

    Raises:
        TypeError: `space` is not of fixed size.
    """
    if not is_fixed_size(space):
        raise TypeError(f"{space} is not of fixed size: its elements have no fixed arrays")
    return _leaves(space, ())


def structurer(space: Space) -> Callable[[Sequence[npt.NDArray[Any]]], Element]:
    """Return what nests arrays, one per leaf of `space`, in dicts and tuples as `space` does.

    For arrays of shape `(n, *leaf_shape)` this is what Gymnasium's `create_empty_array(space,
    n)` gives; nothing is copied. What is returned raises ValueError if the number of arrays is
    not the number of leaves.
    """
    count = len(_leaves(space, ()))
    nest = _nester(space)

    def structure(arrays: Sequence[npt.NDArray[Any]]) -> Element:
        if len(arrays) != count:
            raise ValueError(f"{len(arrays)} arrays for the {count} leaves of {space}")
        return nest(iter(arrays))

    return structure


# Gymnasium chooses by `singledispatch`, to which users may add: ask it, not the class tree.
_STACKED = concatenate.dispatch(spaces.Box)
_OF_DICT = concatenate.dispatch(spaces.Dict)
_OF_TUPLE = concatenate.dispatch(spaces.Tuple)


def _shown(space: Space) -> Iterator[str]:
    kind = type(space)
    parts: Any = getattr(space, "spaces", None)
    if kind in _OF_PARTS and isinstance(parts, Mapping):
        yield f"{kind.__name__}("
        for index, (key, part) in enumerate(parts.items()):
            yield f"{', ' if index else ''}{brief(key)}: "
            yield from _shown(part)
        yield ")"
    elif kind in _OF_PARTS:
        yield f"{kind.__name__}("
        for index, part in enumerate(parts):
            yield ", " if index else ""
            yield from _shown(part)
        yield ")"
    elif isinstance(space, spaces.Sequence) and kind is spaces.Sequence:
        yield "Sequence("
        yield from _shown(space.feature_space)
        yield f", stack={space.stack})"
    elif isinstance(space, spaces.Graph) and kind is spaces.Graph:
        yield "Graph("
        yield from _shown(space.node_space)
        yield ", "
        yield from ["None"] if space.edge_space is None else _shown(space.edge_space)
        yield ")"
    elif kind in _OF_BOUNDS and not all(map(_is_short, _bounds(space))):
        yield f"{kind.__name__}(shape {space.shape}, {space.dtype})"
    else:
        yield str(space)


def _bounds(space: Any) -> tuple[npt.NDArray[Any], ...]:
    return (space.low, space.high) if type(space) is spaces.Box else (space.nvec, space.start)


def _is_short(bound: npt.NDArray[Any]) -> bool:
    return bool(bound.size <= _MOST_SHOWN or bound.min() == bound.max())


def _describe(space: Space) -> Plain:
    describe = _DESCRIBE.get(type(space))
    if describe is None:
        return space
    name = type(space).__name__
    # With its parts as they are: made anew for each space around them, many would take minutes.
    rebuilt = from_plain({"space": name, **describe(space, lambda part: part)})
    if not vars(space).keys() <= vars(rebuilt).keys():
        return space
    plain = {"space": name, **describe(space, _describe)}
    generator = space._np_random
    if generator is not None:
        plain["random"] = _describe_generator(generator)
        if plain["random"] is None:
            return space
    return plain


def _describe_generator(generator: object) -> list[Any] | None:
    """State of a generator of Gymnasium's kind, or None for another kind.

    The two 128-bit numbers go as hexadecimal text: MessagePack's integers have 64 bits.
    """
    bits = getattr(generator, "bit_generator", None)
    if type(generator) is not np.random.Generator or type(bits) is not np.random.PCG64:
        return None
    state: Any = bits.state
    inner = state["state"]
    return [hex(inner["state"]), hex(inner["inc"]), state["has_uint32"], state["uinteger"]]


def _build_generator(plain: Sequence[Any]) -> np.random.Generator:
    state, inc, has_uint32, uinteger = plain
    bits = np.random.PCG64(0)
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state, 16), "inc": int(inc, 16)},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
    return np.random.Generator(bits)


def _children(space: Space) -> list[tuple[Any, Space]]:
    if concatenate.dispatch(type(space)) is _OF_DICT:
        return list(cast("spaces.Dict", space).spaces.items())
    return list(enumerate(cast("spaces.Tuple[Any]", space).spaces))


def _leaves(space: Space, path: tuple[Any, ...]) -> list[Leaf]:
    if concatenate.dispatch(type(space)) is _STACKED:
        assert space.shape is not None
        assert space.dtype is not None
        return [Leaf(path, np.dtype(space.dtype), tuple(space.shape))]
    return [leaf for key, sub in _children(space) for leaf in _leaves(sub, (*path, key))]


def _nester(space: Space) -> Callable[[Iterator[npt.NDArray[Any]]], Element]:
    kind = concatenate.dispatch(type(space))
    if kind is not _OF_DICT and kind is not _OF_TUPLE:
        return next
    parts = [(key, _nester(sub)) for key, sub in _children(space)]
    if kind is _OF_DICT:
        return lambda arrays: {key: nest(arrays) for key, nest in parts}
    return lambda arrays: tuple([nest(arrays) for _, nest in parts])


def _build_graph_instance(plain: Sequence[Any]) -> spaces.GraphInstance:
    nodes, edges, edge_links = plain
    return spaces.GraphInstance(nodes, edges, edge_links)


# Elements of Graph spaces keep their class on the wire; a bare tuple is not in the space.
register_struct(spaces.GraphInstance, "gymnasium.GraphInstance", tuple, _build_graph_instance)
