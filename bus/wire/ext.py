"""The vocabulary of free-form values: ext codes, what goes another way, placeholders, classes."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from envbus.bus.errors import DecodeError

__all__ = [
    "Ext",
    "Inbox",
    "Outbox",
    "Placeholder",
    "Placeholders",
    "StructCodec",
    "register_struct",
    "struct_by_class",
    "struct_by_name",
]

T = TypeVar("T")

#: So many pairs of keys of one message may have one hash: 362 keys of one map e.g.
_MAX_ALIKE = 1 << 16
#: Keys of a map that are not looked at: no map is in a key, as a set may be in a set.
_FEW_KEYS = 16


class Ext:
    """MessagePack ext types of this protocol. Numbers are part of the wire; never reuse one.

    Plain ints: both MessagePack libraries refuse members of an `IntEnum`.
    """

    TREE: Final = 1  # in a typed payload: one free-form value, MessagePack
    ARRAY: Final = 2  # [dtype, shape, order, bytes or index of a buffer frame]
    NUMPY: Final = 3  # msgpack-numpy's map: a scalar or a small array of a plain dtype
    TUPLE: Final = 4  # empty; first item of an array: the others are a tuple
    STRUCT: Final = 5  # a registered name; first item of an array of two: the other is its content
    BIG_INT: Final = 6  # two's complement, big endian: beyond 64 bit
    COMPLEX: Final = 7  # two float64, big endian
    BYTES: Final = 8  # MessagePack int: index of the buffer frame
    SCALAR: Final = 9  # like ARRAY with an empty shape: NumPy scalars that NUMPY cannot express
    NUMPY_STR: Final = 10  # UTF-8
    NUMPY_BYTES = 11
    OBJECT: Final = 12  # [number of the passed descriptor, index in it]
    PLACEHOLDER: Final = 13  # [type name, text]


class Outbox(Protocol):
    """Takes what MessagePack cannot express, e.g. to send it over a local actor's pipe."""

    @property
    def number(self) -> int:
        """Number of the passed descriptor that the objects of this message go in."""
        ...

    def add(self, obj: object) -> int:
        """Take `obj` and return its index in the passed descriptor.

        Raises:
            EncodeError: It cannot be taken; the codec puts the place before the message.
        """


class Inbox(Protocol):
    """Hands out what an `Outbox` took."""

    def get(self, number: int, index: int) -> object:
        """Return object `index` of passed descriptor `number`; asked once per message for each.

        Raises:
            DecodeError: There is no such object, or it could not be rebuilt here.
        """


class Placeholder(msgspec.Struct, frozen=True, gc=False):
    """Stands where an object was that could not cross a socket."""

    #: Module and qualified name of the object's class.
    type_name: str
    #: Beginning of the object's `repr`.
    text: str


class Placeholders:
    """Instead of an `Outbox`: the codec puts a `Placeholder` in the place of each object.

    Args:
        fields: The payload's fields in which that is done; in others an object is an
            `EncodeError`. Names, or places in them with `[*]` for any index, as in
            `"observations[*]['infos']"`. None: everywhere.
        on_replace: Called with place and type name of each object that is replaced, e.g. to
            warn once.
    """

    def __init__(
        self,
        fields: Iterable[str] | None = None,
        on_replace: Callable[[str, str], None] | None = None,
    ) -> None:
        self.fields = None if fields is None else frozenset(fields)
        self.on_replace = on_replace

    def covers(self, place: str) -> bool:
        """Whether what stands at `place`, e.g. `infos[3]['env']`, is to be replaced."""
        if self.fields is None:
            return True
        general = re.sub(r"\[\d+\]", "[*]", place)
        return any(re.match(re.escape(field) + r"(?!\w)", general) for field in self.fields)


# --- classes that cross the bus as a name plus plain content ----------------------------------
#
# For the few value types besides Python's and NumPy's own that must also reach remote peers, e.g.
# Gymnasium's `GraphInstance`, which `actors` registers. At import, never later.


@dataclass(frozen=True, slots=True)
class StructCodec:
    """How one class is taken apart and rebuilt."""

    cls: type[Any]
    name: str
    to_plain: Callable[[Any], object]
    from_plain: Callable[[Any], object]
    #: Returns what is hashed of the content, if anything is.
    keys_of: Callable[[Any], Sequence[Any]] | None = None


#: By exact class, and by name on the wire.
struct_by_class: dict[type[Any], StructCodec] = {}
struct_by_name: dict[str, StructCodec] = {}


def register_struct(
    cls: type[T],
    name: str,
    to_plain: Callable[[T], object],
    from_plain: Callable[[Any], T],
    keys_of: Callable[[Any], Sequence[Any]] | None = None,
) -> None:
    """Let instances of exactly `cls` cross the bus inside a `Tree`.

    Call it where the class is imported, in both processes. Subclasses are not included.

    Args:
        cls: The class.
        name: Its name on the wire.
        to_plain: Returns the content, as values that a `Tree` may hold.
        from_plain: Rebuilds an instance from such content. It must bear any content, and
            raise `TypeError` or `ValueError` for what does not fit: it comes from a socket.
        keys_of: Returns what `from_plain` will hash of such content; likewise. None: nothing.

    Raises:
        ValueError: The name or the class is taken by another registration.
    """
    known = struct_by_name.get(name) or struct_by_class.get(cls)
    if known is not None and (known.name != name or not _same_class(known.cls, cls)):
        raise ValueError(f"cannot register {cls} as {name!r}: {known.cls} is {known.name!r}")
    codec = StructCodec(cls, name, to_plain, from_plain, keys_of)
    struct_by_class[cls] = struct_by_name[name] = codec


def _same_class(one: type[Any], other: type[Any]) -> bool:
    """Also true for the two lives of a class whose module was reloaded."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


class KeyCheck:
    """Refuses keys that somebody has made to have one hash, in the maps and sets of one message.

    Each is compared with all others of its hash: half a megabyte of them as one map would take a
    minute, and sets of such sets, which are compared by their members, hours.
    """

    def __init__(self) -> None:
        self._alike = 0

    def check_map(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Look at the keys of one map; raises as `check`."""
        if len(pairs) > _FEW_KEYS:
            self.check([key for key, _ in pairs])

    def check(self, keys: Sequence[Any]) -> None:
        """Look at the members of one set.

        Raises:
            DecodeError: Too many have others' hashes.
        """
        hashes = list(map(hash, keys))
        if len(set(hashes)) == len(hashes):
            return
        self._alike += sum(count * (count - 1) // 2 for count in Counter(hashes).values())
        if self._alike > _MAX_ALIKE:
            raise DecodeError(
                f"keys of maps, or members of sets, have others' hashes: {self._alike} pairs of "
                f"them so far, and {_MAX_ALIKE} of one message may"
            )


def _items(plain: object) -> list[Any]:
    if type(plain) is not list:
        raise TypeError(f"expected a list, got {type(plain).__name__}")
    return plain


def _pairs(plain: object) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in _items(plain)]


register_struct(set, "set", list, lambda plain: set(_items(plain)), _items)
register_struct(frozenset, "frozenset", list, lambda plain: frozenset(_items(plain)), _items)
register_struct(
    OrderedDict,
    "OrderedDict",
    lambda value: [[key, item] for key, item in value.items()],
    lambda plain: OrderedDict(_pairs(plain)),
    lambda plain: [key for key, _ in _pairs(plain)],
)
