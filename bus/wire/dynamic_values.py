"""Free-form values <-> MessagePack, keeping exact types. One encoder or decoder per message.

The decoder takes bytes that anybody may have chosen. Leaves out typed payloads and headers
(`codec.py`) and how objects travel (`process/pipe.py`). Nothing is pickled or unpickled here, nor
by msgpack-numpy, which only sees plain dtypes and maps that were checked.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgpack
import msgpack_numpy
import msgspec
import numpy as np

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.wire import arrays, limits
from envbus.bus.wire.ext import (
    Ext,
    Inbox,
    KeyCheck,
    Outbox,
    Placeholder,
    Placeholders,
    struct_by_class,
    struct_by_name,
)
from envbus.bus.wire.frames import Buffer
from envbus.bus.wire.messages import Tree

__all__ = [
    "CONTAINERS",
    "OUT_OF_BAND_BYTES",
    "TreeDecoder",
    "TreeEncoder",
    "Value",
    "place_of",
    "short_repr",
    "survey",
]

#: Whatever may stand in a `Tree`.
Value: TypeAlias = Any

#: Arrays and bytes of at least this size get a frame of their own. Below, copying them is
#: cheaper than ZeroMQ's handling of one more frame.
OUT_OF_BAND_BYTES = 4096
#: Kinds of dtype that msgpack-numpy gets right; it fails on, or alters, M, m, V, U and S.
_NUMPY_KINDS = frozenset("biufc")

#: Types that msgpack packs as they are and that hold nothing.
_LEAVES = frozenset({type(None), bool, int, float, str})
CONTAINERS = frozenset({dict, list, tuple})


class _Mark:
    """What `Ext.TUPLE` and `Ext.STRUCT` decode to until their array is complete."""

    __slots__ = ("name",)

    def __init__(self, name: str | None) -> None:
        self.name = name


#: Types that msgpack packs without asking, though some of their values need treatment, and
#: those that it must not see, or that must not be left over.
_SPECIAL = frozenset({bytes, bytearray, memoryview, msgpack.ExtType, _Mark})

#: Infos are full of NumPy scalars, and msgpack-numpy takes 1.5 us to turn one into bytes, of
#: which all but the last few depend on its type only: what stands before them, by type.
_SCALAR_HEADS: dict[type[Any], bytes] = {
    kind: msgpack.packb(msgpack_numpy.encode(kind()))[: -np.dtype(kind).itemsize]
    for kind in arrays.SCALAR_TYPES
    if np.dtype(kind).kind in _NUMPY_KINDS
}


def survey(value: object, opaque: Collection[int] = ()) -> tuple[bool, list[object]]:
    """Walk `value` level by level: is it deeper than `MAX_DEPTH`, and what in it is special?

    Iterative, so that no depth can exhaust the stack. Objects whose id is in `opaque` are
    not looked into.
    """
    special: list[object] = []
    found: list[Any] = [value]
    for _ in range(limits.MAX_DEPTH + 1):
        special += [item for item in found if type(item) in _SPECIAL]
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


# --- to MessagePack ---------------------------------------------------------------------------

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
    """

    def __init__(self, root: object, outbox: Outbox | Placeholders | None) -> None:
        self.buffers: list[Buffer] = []
        self._root = root
        self._outbox = outbox
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
        too_deep, special = survey(value)
        if too_deep:
            return self._prepare_deep(value)
        if any(type(s) is not bytes or len(s) >= OUT_OF_BAND_BYTES for s in special):
            return self._wrap(value, limits.MAX_DEPTH)
        return value

    def _prepare_deep(self, value: object) -> object:
        reason = f"nested deeper than {limits.MAX_DEPTH} levels, or contains itself"
        if self._outbox is None:
            raise EncodeError(f"{self.place(value)} is {reason}")
        if isinstance(self._outbox, Placeholders):
            return self._wrap(value, limits.MAX_DEPTH)
        return _Wrapped(value, reason)

    def _wrap(self, value: Value, levels: int) -> Value:
        kind = type(value)
        if kind in CONTAINERS:
            if not levels:
                return _Wrapped(value, f"nested deeper than {limits.MAX_DEPTH} levels")
            if kind is dict:
                return {
                    self._wrap(key, levels - 1): self._wrap(item, levels - 1)
                    for key, item in value.items()
                }
            return kind([self._wrap(item, levels - 1) for item in value])
        if kind is bytes:
            return _Wrapped(value) if len(value) >= OUT_OF_BAND_BYTES else value
        return _Wrapped(value) if kind in _SPECIAL else value

    def _default(self, value: Value) -> object:
        """Called by msgpack for whatever it does not pack itself."""
        kind = type(value)
        if kind is tuple:
            return [_TUPLE_MARK, *value]
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value)
        head = _SCALAR_HEADS.get(kind)
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
            and dtype.kind in _NUMPY_KINDS
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
        return len(self.buffers) + 1 < limits.MAX_FRAMES

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
    """Return the path from `root` to `target`, found by identity, or None: `infos[3]['env']`."""
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


# --- from MessagePack -------------------------------------------------------------------------

_TUPLE = _Mark(None)
#: `_SCALAR_HEADS` backwards, for dtypes spelled with three characters: their heads have one length.
_SCALAR_HEAD_BYTES = len(_SCALAR_HEADS[np.float64])
_SCALAR_DTYPES: dict[bytes, np.dtype[Any]] = {
    head: np.dtype(np.dtype(kind).str)  # so that `long long` comes back as int64
    for kind, head in _SCALAR_HEADS.items()
    if len(head) == _SCALAR_HEAD_BYTES
}
#: Layouts of arrays with buffers, and which: by the ext's body, which is the same each time that an
#: array of that form comes. Whoever sends chooses them, so there is an end to how many are kept.
_known_layouts: dict[bytes, tuple[arrays.Layout, int]] = {}
_MAX_KNOWN = 256
#: Fields of all structured dtypes in one message: ten bytes are one, which takes seven microseconds
#: and 160 bytes.
_MAX_FIELDS = 1 << 16
_LONGEST_KEY = 64
#: Bytes of a message's first trees, whose maps are made without a look at their keys.
_FEW_BYTES = 1 << 14


class TreeDecoder:
    """Unpacks the trees and arrays of one payload.

    Args:
        buffers: The frames behind the payload.
        inbox: Has the objects that went another way; None: a reference to one is an error.
        writable: Arrays are copies that the caller owns, instead of read-only views.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        inbox: Inbox | None,
        writable: bool,
    ) -> None:
        self._buffers = buffers
        self._inbox = inbox
        self._writable = writable
        #: Objects of the inbox: what stood twice in the sender's tree is one object here too.
        self._objects: dict[tuple[int, int], object] = {}
        #: Of the dtypes so far.
        self._fields = 0
        #: Buffers that are named already: each is one value, which may be a copy.
        self._named: set[int] = set()
        #: Their ids: how deep they are is not the wire's matter.
        self._opaque: set[int] = set()
        #: Bytes of all trees so far.
        self._tree_bytes = 0
        self._keys = KeyCheck()

    def unpack(self, data: Buffer) -> Value:
        """Return the value that `data` holds.

        Raises:
            DecodeError: It is not MessagePack, too deep, or uses the ext types wrongly. Other
                exceptions are to be taken for the same; `codec.decode` does so.
        """
        self._tree_bytes += memoryview(data).nbytes
        value = msgpack.unpackb(
            data,
            ext_hook=self._ext,
            list_hook=self._list,
            object_pairs_hook=None if self._tree_bytes <= _FEW_BYTES else self._map,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        too_deep, special = survey(value, self._opaque)
        if too_deep:
            raise DecodeError(f"nested deeper than {limits.MAX_DEPTH} levels")
        if any(type(item) is _Mark for item in special):
            raise DecodeError("the mark of a tuple or struct stands outside an array's beginning")
        return value

    def array(self, body: Buffer) -> np.ndarray[Any, Any]:
        """Return the array that the body of an `Ext.ARRAY` describes.

        Raises:
            DecodeError: The description is malformed or does not fit the bytes.
        """
        key = bytes(body) if len(body) <= _LONGEST_KEY else b""
        known = _known_layouts.get(key)
        if known is None:
            descriptor, shape, order, data = _parts(body, 4)
            layout = arrays.layout_of(self._dtype(descriptor), shape, order)
            if type(data) is bytes:
                return arrays.from_buffer(layout, data, writable=self._writable)
            if type(data) is not int:
                raise DecodeError("an array's data must be bytes or the index of a buffer")
            if key and len(_known_layouts) < _MAX_KNOWN:
                _known_layouts[key] = layout, data
        else:
            layout, data = known
        return arrays.from_buffer(layout, self._buffer(data), writable=self._writable)

    def _list(self, items: list[Any]) -> Value:
        """Called by msgpack for each array, innermost first."""
        if not items or type(items[0]) is not _Mark:
            return items
        name = items[0].name
        if name is None:
            return tuple(items[1:])
        codec = struct_by_name.get(name)
        if codec is None:
            raise DecodeError(f"no struct {reprlib.repr(name)} is registered here")
        if len(items) != 2:
            raise DecodeError(f"struct {name!r} must have one content")
        too_deep, _ = survey(items[1], self._opaque)
        if too_deep:
            raise DecodeError(f"nested deeper than {limits.MAX_DEPTH} levels")
        try:
            if codec.keys_of is not None:
                self._keys.check(codec.keys_of(items[1]))
            return codec.from_plain(items[1])
        except Exception as exc:
            raise DecodeError(f"content does not fit struct {name!r}: {exc}") from exc

    def _map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Called by msgpack for each map, innermost first, once there are many bytes of them."""
        self._keys.check_map(pairs)
        return dict(pairs)

    def _ext(self, code: int, data: bytes) -> Value:
        handler = _EXT_HANDLERS.get(code)
        if handler is None:
            raise DecodeError(f"unknown ext type {code}")
        return handler(self, data)

    def _mark(self, data: bytes) -> _Mark:
        if data:
            raise DecodeError("the mark of a tuple is empty")
        return _TUPLE

    def _numpy(self, data: bytes) -> Value:
        """Let msgpack-numpy decode what cannot make it unpickle or allocate anything else."""
        scalar = _SCALAR_DTYPES.get(data[:_SCALAR_HEAD_BYTES])
        if scalar is not None and len(data) == _SCALAR_HEAD_BYTES + scalar.itemsize:
            return np.frombuffer(data, scalar, 1, _SCALAR_HEAD_BYTES)[0]
        fields = msgpack.unpackb(data)
        if type(fields) is not dict or type(fields.get(b"type")) is not str:
            raise DecodeError("not a map of msgpack-numpy")
        dtype = arrays.parse_dtype(fields[b"type"])
        raw, is_array = fields.get(b"data"), fields.get(b"nd")
        if dtype.kind not in _NUMPY_KINDS or type(raw) is not bytes or type(is_array) is not bool:
            raise DecodeError("not a map of msgpack-numpy for a plain dtype")
        if is_array:
            if fields.get(b"kind", b"") != b"":
                raise DecodeError("msgpack-numpy's structured and object arrays are not decoded")
            arrays.checked_shape(dtype, fields.get(b"shape"), raw)
        elif len(raw) != dtype.itemsize:
            raise DecodeError(f"a scalar of {dtype} has {dtype.itemsize} bytes, not {len(raw)}")
        value = msgpack_numpy.decode(fields)
        return value.copy() if is_array and self._writable else value

    def _struct_mark(self, data: bytes) -> _Mark:
        return _Mark(data.decode())

    def _big_int(self, data: bytes) -> int:
        return int.from_bytes(data, "big", signed=True)

    def _complex(self, data: bytes) -> complex:
        return complex(*struct.unpack(">dd", data))

    def _bytes(self, data: bytes) -> bytes:
        return bytes(self._buffer(msgpack.unpackb(data)))

    def _scalar(self, data: bytes) -> Value:
        descriptor, shape, order, raw = _parts(data, 4)
        if shape != [] or type(raw) is not bytes:
            raise DecodeError("a scalar has no shape and its own bytes")
        layout = arrays.layout_of(self._dtype(descriptor), shape, order)
        return arrays.from_buffer(layout, raw)[()]

    def _dtype(self, descriptor: object) -> np.dtype[Any]:
        if type(descriptor) is not str:
            self._fields += arrays.num_fields(descriptor)
            if self._fields > _MAX_FIELDS:
                raise DecodeError(f"dtypes of more than {_MAX_FIELDS} fields in one message")
        return arrays.parse_dtype(descriptor)

    def _numpy_str(self, data: bytes) -> np.str_:
        text: np.str_ = np.str_(data.decode("utf-8", "surrogatepass"))
        return text

    def _numpy_bytes(self, data: bytes) -> np.bytes_:
        text: np.bytes_ = np.bytes_(data)
        return text

    def _object(self, data: bytes) -> object:
        number, index = _parts(data, 2)
        if type(number) is not int or type(index) is not int:
            raise DecodeError("an object is named by two integers")
        if self._inbox is None:
            raise DecodeError("a Python object came over a socket; these are never unpickled")
        key = number, index
        if key not in self._objects:
            self._objects[key] = value = self._inbox.get(number, index)
            self._opaque.add(id(value))
        return self._objects[key]

    def _placeholder(self, data: bytes) -> Placeholder:
        type_name, text = _parts(data, 2)
        if type(type_name) is not str or type(text) is not str:
            raise DecodeError("a placeholder has two texts")
        return Placeholder(type_name, text)

    def _buffer(self, index: object) -> Buffer:
        if type(index) is not int or not 0 <= index < len(self._buffers):
            raise DecodeError(
                f"no buffer {reprlib.repr(index)}: the message has {len(self._buffers)}"
            )
        if index in self._named:
            raise DecodeError(f"buffer {index} is named more than once")
        self._named.add(index)
        return self._buffers[index]


_EXT_HANDLERS: dict[int, Callable[[TreeDecoder, bytes], Any]] = {
    Ext.ARRAY: TreeDecoder.array,
    Ext.NUMPY: TreeDecoder._numpy,
    Ext.TUPLE: TreeDecoder._mark,
    Ext.STRUCT: TreeDecoder._struct_mark,
    Ext.BIG_INT: TreeDecoder._big_int,
    Ext.COMPLEX: TreeDecoder._complex,
    Ext.BYTES: TreeDecoder._bytes,
    Ext.SCALAR: TreeDecoder._scalar,
    Ext.NUMPY_STR: TreeDecoder._numpy_str,
    Ext.NUMPY_BYTES: TreeDecoder._numpy_bytes,
    Ext.OBJECT: TreeDecoder._object,
    Ext.PLACEHOLDER: TreeDecoder._placeholder,
}


def _parts(body: Buffer, count: int) -> list[Any]:
    parts = msgpack.unpackb(body, unicode_errors="surrogatepass")
    if type(parts) is not list or len(parts) != count:
        raise DecodeError(f"expected an array of {count}")
    return parts
