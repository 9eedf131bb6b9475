"""What the two directions of free-form values share: which types are what, and a bounded walk.

Used by `tree_encoder.py` and `tree_decoder.py`, and `survey` by who bounds values himself. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import msgpack
import msgpack_numpy
import numpy as np

from envbus.bus import arrays

__all__ = [
    "CONTAINERS",
    "NUMPY_KINDS",
    "OUT_OF_BAND_BYTES",
    "SCALAR_HEADS",
    "SPECIAL",
    "Mark",
    "Value",
    "survey",
]

#: Whatever may stand in a `Tree`.
Value: TypeAlias = Any

#: Arrays and bytes of at least this size get a frame of their own. Below, copying them is
#: cheaper than ZeroMQ's handling of one more frame.
OUT_OF_BAND_BYTES = 4096
#: Kinds of dtype that msgpack-numpy gets right; it fails on, or alters, M, m, V, U and S.
NUMPY_KINDS = frozenset("biufc")

#: Types that msgpack packs as they are and that hold nothing.
_LEAVES = frozenset({type(None), bool, int, float, str})
CONTAINERS = frozenset({dict, list, tuple})


class Mark:
    """What `Ext.TUPLE` and `Ext.STRUCT` decode to until their array is complete."""

    __slots__ = ("name",)

    def __init__(self, name: str | None) -> None:
        self.name = name


#: Types that msgpack packs without asking, though some of their values need treatment, and
#: those that it must not see, or that must not be left over.
SPECIAL = frozenset({bytes, bytearray, memoryview, msgpack.ExtType, Mark})

#: Infos are full of NumPy scalars, and msgpack-numpy takes 1.5 us to turn one into bytes, of
#: which all but the last few depend on its type only: what stands before them, by type.
SCALAR_HEADS: dict[type[Any], bytes] = {
    kind: msgpack.packb(msgpack_numpy.encode(kind()))[: -np.dtype(kind).itemsize]
    for kind in arrays.SCALAR_TYPES
    if np.dtype(kind).kind in NUMPY_KINDS
}


def survey(
    value: object, max_depth: int, opaque: Collection[int] = ()
) -> tuple[bool, list[object]]:
    """Walk `value` level by level: is it deeper than allowed, and what in it is special?

    Iterative, so that no depth can exhaust the stack. Objects whose id is in `opaque` are
    not looked into.
    """
    special: list[object] = []
    found: list[Any] = [value]
    for _ in range(max_depth + 1):
        special += [item for item in found if type(item) in SPECIAL]
        level = [c for c in found if type(c) in CONTAINERS and id(c) not in opaque]
        if not level:
            return False, special
        found = []
        for container in level:
            if type(container) is dict:
                found += [key for key in container if type(key) not in _LEAVES]
                found += [item for item in container.values() if type(item) not in _LEAVES]
            else:
                found += [item for item in container if type(item) not in _LEAVES]
    return True, special
