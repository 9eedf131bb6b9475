"""MessagePack -> free-form values. One decoder per message.

Takes bytes that anybody may have chosen. Leaves out typed payloads and headers (`codec.py`).
Nothing is unpickled here, nor by msgpack-numpy, which only sees maps that were checked.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np

from envbus.bus import arrays
from envbus.bus.errors import DecodeError
from envbus.bus.ext import Ext, Inbox, Placeholder, struct_by_name
from envbus.bus.limits import CodecLimits
from envbus.bus.transport import Buffer
from envbus.bus.tree import NUMPY_KINDS, SCALAR_HEADS, Mark, Value, survey

__all__ = ["TreeDecoder"]

_TUPLE = Mark(None)
#: `SCALAR_HEADS` backwards, for dtypes spelled with three characters: their heads have one length.
_SCALAR_HEAD_BYTES = len(SCALAR_HEADS[np.float64])
_SCALAR_DTYPES: dict[bytes, np.dtype[Any]] = {
    head: np.dtype(np.dtype(kind).str)  # so that `long long` comes back as int64
    for kind, head in SCALAR_HEADS.items()
    if len(head) == _SCALAR_HEAD_BYTES
}
#: Layouts of arrays with buffers, and which: by the ext's body, which is the same each time that an
#: array of that form comes. Whoever sends chooses them, so there is an end to how many are kept.
_known_layouts: dict[bytes, tuple[arrays.Layout, int]] = {}
_MAX_KNOWN = 256
_LONGEST_KEY = 64


class TreeDecoder:
    """Unpacks the trees and arrays of one payload.

    Args:
        buffers: The frames behind the payload.
        inbox: Has the objects that went another way; None: a reference to one is an error.
        limits: Bounds for what is decoded.
        writable: Arrays are copies that the caller owns, instead of read-only views.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        inbox: Inbox | None,
        limits: CodecLimits,
        writable: bool,
    ) -> None:
        self._buffers = buffers
        self._inbox = inbox
        self._limits = limits
        self._writable = writable
        #: Objects of the inbox: what stood twice in the sender's tree is one object here too.
        self._objects: dict[tuple[int, int], object] = {}
        #: Their ids: how deep they are is not the wire's matter.
        self._opaque: set[int] = set()

    def unpack(self, data: Buffer) -> Value:
        """Return the value that `data` holds.

        Raises:
            DecodeError: It is not MessagePack, too deep, or uses the ext types wrongly. Other
                exceptions are to be taken for the same; `codec.decode` does so.
        """
        value = msgpack.unpackb(
            data,
            ext_hook=self._ext,
            list_hook=self._list,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        too_deep, special = survey(value, self._limits.max_depth, self._opaque)
        if too_deep:
            raise DecodeError(f"nested deeper than {self._limits.max_depth} levels")
        if any(type(item) is Mark for item in special):
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
            layout = arrays.layout_of(arrays.parse_dtype(descriptor), shape, order)
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
        if not items or type(items[0]) is not Mark:
            return items
        name = items[0].name
        if name is None:
            return tuple(items[1:])
        codec = struct_by_name.get(name)
        if codec is None:
            raise DecodeError(f"no struct {reprlib.repr(name)} is registered here")
        if len(items) != 2:
            raise DecodeError(f"struct {name!r} must have one content")
        too_deep, _ = survey(items[1], self._limits.max_depth, self._opaque)
        if too_deep:
            raise DecodeError(f"nested deeper than {self._limits.max_depth} levels")
        try:
            return codec.from_plain(items[1])
        except Exception as exc:
            raise DecodeError(f"content does not fit struct {name!r}: {exc}") from exc

    def _ext(self, code: int, data: bytes) -> Value:
        handler = _EXT_HANDLERS.get(code)
        if handler is None:
            raise DecodeError(f"unknown ext type {code}")
        return handler(self, data)

    def _mark(self, data: bytes) -> Mark:
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
        if dtype.kind not in NUMPY_KINDS or type(raw) is not bytes or type(is_array) is not bool:
            raise DecodeError("not a map of msgpack-numpy for a plain dtype")
        if is_array:
            if fields.get(b"kind", b"") != b"":
                raise DecodeError("msgpack-numpy's structured and object arrays are not decoded")
            arrays.checked_shape(dtype, fields.get(b"shape"), raw)
        elif len(raw) != dtype.itemsize:
            raise DecodeError(f"a scalar of {dtype} has {dtype.itemsize} bytes, not {len(raw)}")
        value = msgpack_numpy.decode(fields)
        return value.copy() if is_array and self._writable else value

    def _struct_mark(self, data: bytes) -> Mark:
        return Mark(data.decode())

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
        return arrays.from_parts(arrays.parse_dtype(descriptor), shape, order, raw)[()]

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
