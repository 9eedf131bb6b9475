"""Free-form values -> MessagePack, keeping exact types. One encoder per message.

Leaves out typed payloads and headers (`codec.py`) and how objects travel (`pipe.py`). Nothing is
pickled here, nor by msgpack-numpy, which only sees plain dtypes.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgpack
import msgpack_numpy
import msgspec
import numpy as np

from envbus.bus import arrays
from envbus.bus.errors import EncodeError
from envbus.bus.ext import Ext, Outbox, Placeholder, Placeholders, struct_by_class
from envbus.bus.limits import CodecLimits
from envbus.bus.messages import Tree
from envbus.bus.transport import Buffer
from envbus.bus.tree import (
    CONTAINERS,
    NUMPY_KINDS,
    OUT_OF_BAND_BYTES,
    SCALAR_HEADS,
    SPECIAL,
    Value,
    survey,
)

__all__ = ["TreeEncoder", "place_of", "short_repr"]

#: Like calling `ExtType`, without its checks: 0.2 instead of 0.4 us.
_ext = partial(tuple.__new__, msgpack.ExtType)
_TUPLE_MARK = msgpack.ExtType(Ext.TUPLE, b"")


class _Wrapped:
    """Hides a value from msgpack, which would pack it as plain bytes or as an ext of ours."""

    __slots__ = ("reason", "value")

    def __init__(self, value: object, reason: str = "") -> None:
        self.value = value
        self.reason = reason


class TreeEncoder:
    """Packs the trees and arrays of one payload, and collects its buffer frames.

    Args:
        root: The payload; places in error messages are counted from here.
        outbox: Takes what MessagePack cannot express; None: that is an error.
        limits: Bounds for what is encoded.
    """

    def __init__(self, root: object, outbox: Outbox | None, limits: CodecLimits) -> None:
        self.buffers: list[Buffer] = []
        self._root = root
        self._outbox = outbox
        self._limits = limits
        #: Objects that are in the outbox already: id -> (object, index). Holding the object
        #: keeps the id its own.
        self._sent: dict[int, tuple[object, int]] = {}

    def pack(self, value: object) -> bytes:
        """Return `value` as MessagePack.

        Raises:
            EncodeError: Something in it cannot be expressed; names place and type.
        """
        buffers = len(self.buffers)
        try:
            value = self._prepare(value)
            try:
                return self._packed(value, None)
            except UnicodeEncodeError:  # lone surrogates: rare, and slow if always allowed
                del self.buffers[buffers:]
                return self._packed(value, "surrogatepass")
        except EncodeError:
            raise
        except (ValueError, OverflowError, RecursionError, UnicodeError) as exc:
            raise EncodeError(f"cannot encode {self.place(value)}: {exc}") from exc

    def array(self, value: np.ndarray[Any, Any]) -> bytes:
        """Return the body of an `Ext.ARRAY`; big arrays go to `buffers` without a copy.

        Raises:
            EncodeError: The dtype holds Python objects, or values of other packages.
        """
        descriptor = arrays.describe(value.dtype)
        if descriptor is None:
            raise EncodeError(f"{self.place(value)}: {_unfit(value)}")
        shape, order, data = arrays.to_parts(value)
        body: list[object] = [descriptor, shape, order, data]
        if value.nbytes >= OUT_OF_BAND_BYTES and self._has_room():
            body[3] = self._add_buffer(data)
        return _pack_flat(body)

    def _packed(self, value: object, unicode_errors: str | None) -> bytes:
        packer = msgpack.Packer(
            strict_types=True, default=self._default, unicode_errors=unicode_errors
        )
        packed: bytes = packer.pack(value)
        return packed

    def _prepare(self, value: object) -> object:
        """Return `value`, or a copy with wrappers where msgpack would not ask `_default`."""
        too_deep, special = survey(value, self._limits.max_depth)
        if too_deep:
            return self._prepare_deep(value)
        if any(type(s) is not bytes or len(s) >= OUT_OF_BAND_BYTES for s in special):
            return self._wrap(value, self._limits.max_depth)
        return value

    def _prepare_deep(self, value: object) -> object:
        reason = f"nested deeper than {self._limits.max_depth} levels, or contains itself"
        if self._outbox is None:
            raise EncodeError(f"{self.place(value)} is {reason}")
        if isinstance(self._outbox, Placeholders):
            return self._wrap(value, self._limits.max_depth)
        return _Wrapped(value, reason)

    def _wrap(self, value: Value, levels: int) -> Value:
        kind = type(value)
        if kind in CONTAINERS:
            if not levels:
                return _Wrapped(value, f"nested deeper than {self._limits.max_depth} levels")
            if kind is dict:
                return {
                    self._wrap(key, levels - 1): self._wrap(item, levels - 1)
                    for key, item in value.items()
                }
            return kind([self._wrap(item, levels - 1) for item in value])
        if kind is bytes:
            return _Wrapped(value) if len(value) >= OUT_OF_BAND_BYTES else value
        return _Wrapped(value) if kind in SPECIAL else value

    def _default(self, value: Value) -> object:
        """Called by msgpack for whatever it does not pack itself."""
        kind = type(value)
        if kind is tuple:
            return [_TUPLE_MARK, *value]
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value)
        head = SCALAR_HEADS.get(kind)
        if head is not None:
            return _ext((Ext.NUMPY, head + value.tobytes()))
        if kind in arrays.SCALAR_TYPES:
            return self._scalar(value)
        codec = struct_by_class.get(kind)
        if codec is not None:
            mark = msgpack.ExtType(Ext.STRUCT, codec.name.encode())
            return [mark, self._prepare(codec.to_plain(value))]
        return self._object(value)

    def _tree_array(self, value: np.ndarray[Any, Any]) -> object:
        dtype = value.dtype
        if (
            0 < value.nbytes < OUT_OF_BAND_BYTES
            and dtype.kind in NUMPY_KINDS
            and dtype.type in arrays.SCALAR_TYPES
            and value.ndim
            and (value.flags.c_contiguous or not value.flags.f_contiguous)
        ):
            return _numpy(value)
        if arrays.describe(dtype) is None:
            return self._object(value, _unfit(value))
        return msgpack.ExtType(Ext.ARRAY, self.array(value))

    def _scalar(self, value: np.generic) -> object:
        array = np.asarray(value)
        descriptor = arrays.describe(array.dtype)
        if descriptor is None:
            return self._object(value, _unfit(array))
        shape, order, data = arrays.to_parts(array)
        return msgpack.ExtType(Ext.SCALAR, _pack_flat([descriptor, shape, order, data]))

    def _wrapped(self, wrapped: _Wrapped) -> object:
        value = wrapped.value
        if type(value) is not bytes:
            return self._object(value, wrapped.reason)
        if not self._has_room():
            return value
        return msgpack.ExtType(Ext.BYTES, _pack_flat(self._add_buffer(value)))

    def _placeholder(self, value: Placeholder) -> object:
        return msgpack.ExtType(Ext.PLACEHOLDER, _pack_flat([value.type_name, value.text]))

    def _object(self, value: object, reason: str = "") -> object:
        """Send `value` another way, or replace it, or refuse it."""
        outbox = self._outbox
        if isinstance(outbox, Placeholders) and self._may_replace(outbox, value):
            return self._placeholder(Placeholder(_type_name(value), short_repr(value)))
        if outbox is None or isinstance(outbox, Placeholders):
            reason = reason or f"a {_type_name(value)} cannot cross a socket"
            raise EncodeError(
                f"{self.place(value)}: {reason}; use numbers, str, bytes, lists, tuples, dicts "
                "or NumPy arrays there, or a local actor"
            )
        sent = self._sent.get(id(value))
        if sent is None:
            try:
                sent = value, outbox.add(value)
            except EncodeError as exc:
                raise EncodeError(f"{self.place(value)}: {exc}") from exc
            self._sent[id(value)] = sent
        return msgpack.ExtType(Ext.OBJECT, _pack_flat([outbox.number, sent[1]]))

    def _may_replace(self, outbox: Placeholders, value: object) -> bool:
        if outbox.fields is None and outbox.on_replace is None:
            return True  # without looking for the place, which is slow
        place = self.place(value)
        if not outbox.covers(place):
            return False
        if outbox.on_replace is not None:
            outbox.on_replace(place, _type_name(value))
        return True

    def place(self, value: object) -> str:
        """Return where `value` stands in the payload, e.g. `infos[3]['env']`."""
        return place_of(self._root, value) or f"a {_type_name(value)} in {_type_name(self._root)}"

    def _has_room(self) -> bool:
        return len(self.buffers) + 1 < self._limits.max_frames

    def _add_buffer(self, data: Buffer) -> int:
        self.buffers.append(data)
        return len(self.buffers) - 1


def _numpy(value: object) -> object:
    """msgpack-numpy's map, wrapped in an ext so that a user's dict is never taken for one."""
    return msgpack.ExtType(Ext.NUMPY, msgpack.packb(msgpack_numpy.encode(value)))


_HANDLERS: dict[type[Any], Callable[[TreeEncoder, Any], object]] = {
    _Wrapped: TreeEncoder._wrapped,
    np.ndarray: TreeEncoder._tree_array,
    Placeholder: TreeEncoder._placeholder,
    np.str_: lambda _, value: msgpack.ExtType(
        Ext.NUMPY_STR, str.encode(value, errors="surrogatepass")
    ),
    np.bytes_: lambda _, value: msgpack.ExtType(Ext.NUMPY_BYTES, bytes(value)),
    int: lambda _, value: msgpack.ExtType(
        Ext.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    ),
    complex: lambda _, value: msgpack.ExtType(
        Ext.COMPLEX, struct.pack(">dd", value.real, value.imag)
    ),
}


def _pack_flat(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unfit(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        return f"an array of dtype {array.dtype} holds Python objects, which are never sent as such"
    return f"an array of dtype {array.dtype} has no form on the wire"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# --- where a value stands; slow, and asked only when something cannot be sent ----------------


def place_of(root: object, target: object) -> str | None:
    """Return the path from `root` to `target`, found by identity, or None: `infos[3]['env']`.

    Args:
        root: A struct, `Tree`, dict, list or tuple; other objects are not looked into.
        target: What to look for.
    """
    pending: list[tuple[str, object]] = [("", root)]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop()
        if value is target:
            return path.lstrip(".")
        if id(value) in seen:  # a value may contain itself
            continue
        seen.add(id(value))
        pending += [(path + step, child) for step, child in _children(value)]
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Tree):
        yield "", value.value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{short_repr(key)}]", item
            yield f", in the key {short_repr(key)}", key
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item


def short_repr(value: object) -> str:
    """Return the beginning of `repr(value)`, valid as UTF-8; never fails."""
    try:
        text = reprlib.repr(value)
    except Exception as exc:  # its `__repr__` is anybody's code; big ints refuse, too
        return f"<repr failed: {type(exc).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()[:200]
