"""Dicts by agent of many envs as a few arrays, for the wire. Pure.

Each small array has its own price for encoding and decoding; those of many agents in one array
have it once. Leaves out who has agents (`env/agents.py`) and when something is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from envbus.actors.arrays.copies import own

__all__ = ["Packed", "pack_by_agent", "pack_records", "unpack_by_agent", "unpack_records"]

#: Lists, dicts, arrays and whatever the values are, as `bus/wire/dynamic_values.py` takes it.
Packed: TypeAlias = Any

#: Parts of a record that are packed. Infos stay: errors and placeholders name a place in them.
_BY_AGENT = ("observations", "rewards", "terminateds", "truncateds")
#: Arrays of at most this size share one; larger ones travel without a copy, each by itself.
_MOST_BYTES = 2048
#: Kinds of dtype of which NumPy makes one array without changing a value.
_NUMBERS = frozenset("biufc")

# How a column of values is packed: the first of a list of two.
_PLAIN, _ROWS, _SCALARS, _DICTS, _FORMS = range(5)


def pack_records(records: Sequence[Mapping[str, Any] | None]) -> Packed:
    """Return what `unpack_records` makes the same records of; `AgentsEnv` says what these are.

    Those of envs that have none yet are None.
    """
    known = [record for record in records if record is not None]
    if len(known) < len(records):  # rare: the first reset of an env has failed
        return list(records)
    packed = {name: pack_by_agent([record[name] for record in known]) for name in _BY_AGENT}
    return {**packed, **{name: [record[name] for record in known] for name in ("infos", "agents")}}


def unpack_records(packed: Packed) -> list[dict[str, Any]]:
    """Return records of the receiver's own; those that were not packed as they are.

    Arrays may be views of one array, where none overlaps another.
    """
    if type(packed) is not dict:
        unpacked: list[dict[str, Any]] = packed
        return unpacked
    parts = [unpack_by_agent(packed[name]) for name in _BY_AGENT]
    return [
        {
            "observations": observations,
            "rewards": rewards,
            "terminateds": terminateds,
            "truncateds": truncateds,
            "infos": infos,
            "agents": agents,
        }
        for observations, rewards, terminateds, truncateds, infos, agents in zip(
            *parts, packed["infos"], packed["agents"], strict=True
        )
    ]


def pack_by_agent(dicts: Sequence[Mapping[Any, Any]], *, copy: bool = False) -> Packed:
    """Return what `unpack_by_agent` makes the same dicts of.

    Args:
        dicts: By agent, one per env.
        copy: Nothing in what is returned changes when a value of `dicts` does.
    """
    layouts: dict[tuple[Any, ...], int] = {}
    which = [layouts.setdefault(tuple(one), len(layouts)) for one in dicts]
    column = _pack([value for one in dicts for value in one.values()], copy=copy)
    return {"layouts": [list(layout) for layout in layouts], "which": which, "values": column}


def unpack_by_agent(packed: Packed) -> list[dict[Any, Any]]:
    """Return dicts by agent; those that were not packed as they are."""
    if type(packed) is not dict:
        unpacked: list[dict[Any, Any]] = packed
        return unpacked
    layouts, which = packed["layouts"], packed["which"]
    if type(layouts) is not list or type(which) is not list:
        raise TypeError("agents are told as lists")
    values = iter(_unpack(packed["values"]))
    # `zip` asks the layout first, so that no value is lost at its end.
    return [dict(zip(layouts[index], values, strict=False)) for index in which]


def _pack(values: list[Any], *, copy: bool) -> list[Any]:
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind is np.ndarray:
            forms = {(value.dtype, value.shape) for value in values}
            if len(forms) == 1:
                dtype, shape = forms.pop()
                if _can_share(dtype, shape):
                    return [_ROWS, np.concatenate(values).reshape(len(values), *shape)]
            elif all(_can_share(*form) for form in forms):
                return [_FORMS, _pack_forms(values)]
        elif issubclass(kind, np.generic):
            if np.dtype(kind).kind in _NUMBERS:
                return [_SCALARS, np.array(values, kind)]
        elif kind is dict and values[0]:
            keys = list(values[0])
            if all(list(value) == keys for value in values):
                columns = [_pack([v[key] for v in values], copy=copy) for key in keys]
                return [_DICTS, [keys, columns]]
    return [_PLAIN, own(values) if copy else values]


def _pack_forms(values: Sequence[Any]) -> list[Any]:
    """Return `[[places, rows], ...]`: arrays of one form in one array."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault((value.dtype, value.shape), []).append(place)
    return [
        [
            alike,
            np.concatenate([values[place] for place in alike]).reshape(len(alike), *shape),
        ]
        for (_, shape), alike in places.items()
    ]


def _unpack(column: Sequence[Any]) -> list[Any]:
    kind, content = column
    if kind in (_ROWS, _SCALARS):
        return list(_with_bytes(content))
    if kind == _FORMS:
        found: dict[int, Any] = {}
        for places, rows in content:
            found.update(zip(places, _with_bytes(rows), strict=True))
        return [found[place] for place in range(len(found))]
    if kind == _DICTS:
        keys, columns = content
        parts = zip(*map(_unpack, columns), strict=True)
        return [dict(zip(keys, part, strict=True)) for part in parts]
    plain: list[Any] = content
    return plain


def _with_bytes(rows: Any) -> Any:
    """Refuse rows of no bytes, which `_can_share` excludes: a few bytes could tell millions."""
    if type(rows) is not np.ndarray or (len(rows) and not rows.nbytes):
        raise ValueError("rows without bytes")
    return rows


def _can_share(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether arrays of this form may be rows of one."""
    if not shape or dtype.kind not in _NUMBERS or not dtype.isnative:
        return False
    size = dtype.itemsize
    for length in shape:
        size *= length
    return 0 < size <= _MOST_BYTES
