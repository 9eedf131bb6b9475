"""Classes that cross the bus as a name plus plain content. Filled at import, never later.

For the few value types besides Python's and NumPy's own that must also reach remote peers, e.g.
Gymnasium's `GraphInstance`, which `actors` registers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["StructCodec", "register_struct", "struct_by_class", "struct_by_name"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StructCodec:
    """How one class is taken apart and rebuilt."""

    cls: type[Any]
    name: str
    to_plain: Callable[[Any], object]
    from_plain: Callable[[Any], object]


#: By exact class, and by name on the wire.
struct_by_class: dict[type[Any], StructCodec] = {}
struct_by_name: dict[str, StructCodec] = {}


def register_struct(
    cls: type[T],
    name: str,
    to_plain: Callable[[T], object],
    from_plain: Callable[[Any], T],
) -> None:
    """Let instances of exactly `cls` cross the bus inside a `Tree`.

    Call it where the class is imported, in both processes. Subclasses are not included.

    Args:
        cls: The class.
        name: Its name on the wire.
        to_plain: Returns the content, as values that a `Tree` may hold.
        from_plain: Rebuilds an instance from such content. It must bear any content, and
            raise `TypeError` or `ValueError` for what does not fit: it comes from a socket.

    Raises:
        ValueError: The name or the class is taken by another registration.
    """
    known = struct_by_name.get(name) or struct_by_class.get(cls)
    if known is not None and (known.name != name or not _same_class(known.cls, cls)):
        raise ValueError(f"cannot register {cls} as {name!r}: {known.cls} is {known.name!r}")
    codec = StructCodec(cls, name, to_plain, from_plain)
    struct_by_class[cls] = struct_by_name[name] = codec


def _same_class(one: type[Any], other: type[Any]) -> bool:
    """Also true for the two lives of a class whose module was reloaded."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _items(plain: object) -> list[Any]:
    if type(plain) is not list:
        raise TypeError(f"expected a list, got {type(plain).__name__}")
    return plain


register_struct(set, "set", list, lambda plain: set(_items(plain)))
register_struct(frozenset, "frozenset", list, lambda plain: frozenset(_items(plain)))
register_struct(
    OrderedDict,
    "OrderedDict",
    lambda value: [[key, item] for key, item in value.items()],
    lambda plain: OrderedDict([(key, item) for key, item in _items(plain)]),
)
