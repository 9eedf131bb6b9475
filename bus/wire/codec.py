"""Messages <-> frames: `[header]` and `[payload][buffer 0][buffer 1]...`.

The wire format is described in `docs/wire-protocol.md`. Arrays and bytes of 4096 bytes or more
travel as frames of their own, without a copy. Nothing here is pickled; what MessagePack cannot
express goes to an `Outbox`, if there is one. Leaves out sockets, and who gets what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar, get_args

import msgspec
import numpy as np

from envbus.bus.brief import brief
from envbus.bus.errors import DecodeError, EncodeError, EnvbusError, VersionMismatchError
from envbus.bus.wire import limits
from envbus.bus.wire.arrays import SCALAR_TYPES
from envbus.bus.wire.dynamic_values import OUT_OF_BAND_BYTES, TreeDecoder, TreeEncoder, Value
from envbus.bus.wire.ext import (
    Ext,
    Inbox,
    Outbox,
    Placeholder,
    Placeholders,
    register_struct,
)
from envbus.bus.wire.frames import Buffer
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind, Payload, Tree

__all__ = [
    "OUT_OF_BAND_BYTES",
    "Ext",
    "Inbox",
    "Outbox",
    "Placeholder",
    "Placeholders",
    "constant",
    "decode",
    "decode_header",
    "encode",
    "encode_header",
    "message",
    "readable_request_id",
    "register_struct",
]

P = TypeVar("P", bound=Payload)


class _HookNeededError(Exception):
    """The payload holds a tree or an array: the fast path does not do."""


def _hook_needed(*_: object) -> NoReturn:
    raise _HookNeededError


#: NumPy scalars that typed fields of plain Python types take.
_PLAIN_SCALARS = frozenset(t for t in SCALAR_TYPES if np.dtype(t).kind in "biufUS")

_encode_plain = msgspec.msgpack.Encoder(enc_hook=_hook_needed).encode
#: Decoders for payloads without trees and arrays, by class.
_plain_decoders: dict[type[Payload], Callable[[Buffer], Any]] = {}
#: What `constant` was given, and its bytes, by id; never forgotten, so that no id comes again.
_constants: dict[int, tuple[Payload, bytes]] = {}


def constant(payload: P) -> P:
    """Encode once what this process sends again and again, and return it.

    For the few payloads that a module has as constants: plain ones that never change.

    Raises:
        EncodeError: It holds a tree or an array, or cannot be expressed.
    """
    try:
        _constants[id(payload)] = (payload, _encode_plain(payload))
    except Exception as exc:
        raise EncodeError(f"{payload} cannot be a constant: {exc}") from exc
    return payload


def encode(payload: Payload, outbox: Outbox | Placeholders | None = None) -> list[Buffer]:
    """Return `[payload bytes, buffer 0, buffer 1, ...]`.

    Args:
        payload: Arrays of 4096 bytes or more are not copied: do not write to them until the
            frames are sent. Strings in typed fields are UTF-8; lone surrogates in them are
            replaced by their escapes (those inside a `Tree` survive).
        outbox: Takes the objects in trees that MessagePack cannot express. None: such an
            object is an error. `Placeholders`: it is replaced by one.

    Raises:
        EncodeError: Something cannot be expressed, or is over a limit; names place and type.
            The outbox may have taken some objects before.
    """
    known = _constants.get(id(payload))
    if known is not None:
        return [known[1]]
    data: bytes | None
    try:
        data = _encode_plain(payload)
    except Exception:  # a tree or array, or something wrong: the slow path knows which
        data = None
    if data is None:  # outside the `except`, so that errors do not chain to the fast path's
        return _encode_with_hooks(payload, outbox)
    if len(data) > limits.MAX_FRAME_BYTES:
        raise _too_large(payload, len(data), "max_frame_bytes", limits.MAX_FRAME_BYTES)
    return [data]


def message(
    kind: Kind,
    payload: Payload,
    request_id: int = 0,
    *,
    ttl: float = 0.0,
    incarnation: int = 0,
    to: str = "",
) -> list[Buffer]:
    """Return all frames of a message, the header's first. Errors as `encode`, `encode_header`."""
    name = type(payload).__name__
    header = Header(PROTOCOL_VERSION, kind, request_id, name, ttl, incarnation, to)
    return [encode_header(header), *encode(payload)]


def _encode_with_hooks(payload: Payload, outbox: Outbox | Placeholders | None) -> list[Buffer]:
    """Encode a payload that holds trees or arrays, or diagnose one that cannot be encoded."""
    trees = TreeEncoder(payload, outbox)

    def hook(value: Value) -> object:
        if type(value) is Tree:
            return msgspec.msgpack.Ext(Ext.TREE, trees.pack(value.value))
        if type(value) is np.ndarray:
            return msgspec.msgpack.Ext(Ext.ARRAY, trees.array(value))
        if type(value) in _PLAIN_SCALARS:
            return value.item()
        raise EncodeError(f"{trees.place(value)}: a {type(value)} does not belong into this field")

    encoder = msgspec.msgpack.Encoder(enc_hook=hook)
    try:
        try:
            data = encoder.encode(payload)
        except UnicodeEncodeError:
            trees.buffers.clear()
            data = encoder.encode(_without_surrogates(payload))
    except EnvbusError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise EncodeError(f"cannot encode {type(payload).__name__}: {exc}") from exc
    frames = [data, *trees.buffers]
    _check_sizes(payload, frames)
    return frames


def _without_surrogates(value: Value) -> Value:
    """Return `value` with lone surrogates in typed strings replaced by their escapes.

    They come from file names in messages for people, which must not stop an error report.
    """
    if type(value) is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        changed = {
            name: _without_surrogates(getattr(value, name)) for name in value.__struct_fields__
        }
        return msgspec.structs.replace(value, **changed)
    if type(value) is list:
        return [_without_surrogates(item) for item in value]
    if type(value) is dict:
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _check_sizes(payload: Payload, frames: list[Buffer]) -> None:
    sizes = [_size(frame) for frame in frames]
    if (size := max(sizes)) > limits.MAX_FRAME_BYTES:
        raise _too_large(payload, size, "max_frame_bytes", limits.MAX_FRAME_BYTES)
    if (total := sum(sizes)) > limits.MAX_MESSAGE_BYTES:
        raise _too_large(payload, total, "max_message_bytes", limits.MAX_MESSAGE_BYTES)


def _too_large(payload: Payload, size: int, name: str, limit: int) -> EncodeError:
    return EncodeError(
        f"{type(payload).__name__} needs {size} bytes, over {name} = {limit}; send less at a "
        "time, or raise the limit on both sides"
    )


def decode(
    payload_type: type[P],
    frames: Sequence[Buffer],
    inbox: Inbox | None = None,
    *,
    writable: bool = False,
) -> P:
    """Return the payload that `frames` hold.

    Args:
        payload_type: Class of the payload, as the header names it.
        frames: `[payload, buffer 0, ...]`: bytes, memoryviews or `zmq.Frame`s.
        inbox: Has the objects that came another way. None: a reference to one is an error,
            as it should be for whatever comes over a socket.
        writable: Arrays are the caller's own: over frames that nobody else has (see
            `transport.Buffer`), else copies. Otherwise they are read-only views that keep their
            frame alive (small or unaligned ones are read-only copies).

    Raises:
        DecodeError: The frames are malformed, over a limit, or not of this type.
    """
    if len(frames) == 1:
        decoder = _plain_decoders.get(payload_type)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(
                payload_type, dec_hook=_hook_needed, ext_hook=_hook_needed
            ).decode
            _plain_decoders[payload_type] = decoder
        if _size(frames[0]) <= limits.MAX_FRAME_BYTES:
            try:  # `contextlib.suppress` would double the time
                payload: P = decoder(frames[0])
                return payload
            except Exception:  # noqa: S110  a tree, an array or an error: the slow path tells
                pass
    return _decode_with_hooks(payload_type, frames, inbox, writable)


def _decode_with_hooks(
    payload_type: type[P],
    frames: Sequence[Buffer],
    inbox: Inbox | None,
    writable: bool,
) -> P:
    _check_frames(frames)
    trees = TreeDecoder(frames[1:], inbox, writable)

    def ext_hook(code: int, data: memoryview) -> object:
        if code == Ext.TREE:
            return Tree(trees.unpack(data))
        if code == Ext.ARRAY:
            return trees.array(data)
        raise DecodeError(f"ext type {code} cannot stand in a typed field")

    try:
        return msgspec.msgpack.decode(
            frames[0], type=payload_type, dec_hook=_checked, ext_hook=ext_hook
        )
    except DecodeError as exc:
        raise DecodeError(f"{payload_type.__name__}: {exc}") from exc
    except EnvbusError:
        raise
    except Exception as exc:  # whatever the libraries make of bytes that somebody else chose
        raise DecodeError(f"{payload_type.__name__}: {brief(exc)}") from exc


def _check_frames(frames: Sequence[Buffer]) -> None:
    if not 1 <= len(frames) <= limits.MAX_FRAMES:
        raise DecodeError(
            f"message has {len(frames)} frames behind its header; 1 to {limits.MAX_FRAMES} "
            "are allowed"
        )
    sizes = [_size(frame) for frame in frames]
    if (size := max(sizes)) > (most := limits.MAX_FRAME_BYTES):
        raise DecodeError(f"frame of {size} bytes is over max_frame_bytes = {most}")
    if (total := sum(sizes)) > limits.MAX_MESSAGE_BYTES:
        raise DecodeError(
            f"message of {total} bytes is over max_message_bytes = {limits.MAX_MESSAGE_BYTES}"
        )


def _checked(kind: object, value: Value) -> Value:
    """Called by msgspec for fields that are trees or arrays: is `value` what `kind` says?"""
    if kind is Tree:
        if type(value) is Tree:
            return value
        raise TypeError(f"expected a tree, got {type(value).__name__}")
    if type(value) is not np.ndarray:
        raise TypeError(f"expected an array, got {type(value).__name__}")
    expected = _scalar_type(kind)
    if not issubclass(value.dtype.type, expected):
        raise TypeError(f"expected an array of {expected.__name__}, got {value.dtype}")
    return value


@lru_cache(maxsize=256)  # a process has some dozens of array fields
def _scalar_type(kind: object) -> type[np.generic]:
    """Return the scalar type that an `NDArray[...]` annotation asks for."""
    arguments = get_args(kind)  # (shape, dtype[scalar type])
    expected = get_args(arguments[1])[0] if len(arguments) == 2 else None
    if isinstance(expected, type) and issubclass(expected, np.generic):
        return expected
    return np.generic  # NDArray[Any]


def _size(frame: Buffer) -> int:
    return len(frame) if type(frame) is bytes else memoryview(frame).nbytes


# --- headers ----------------------------------------------------------------------------------


class _AnyHeader(msgspec.Struct, array_like=True, gc=False):
    """What headers of all protocol versions begin with, for ever."""

    version: int
    kind: int
    request_id: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode
_decode_any = msgspec.msgpack.Decoder(_AnyHeader).decode


def encode_header(header: Header) -> bytes:
    """Return `header` as the bytes of one frame.

    Raises:
        EncodeError: A name in it is too long or not valid text, or a number out of range.
    """
    try:
        data = _encode(header)
    except (ValueError, OverflowError, TypeError) as exc:
        raise EncodeError(f"cannot encode {header}: {exc}") from exc
    if len(data) > limits.MAX_HEADER_BYTES:
        raise EncodeError(
            f"header has {len(data)} bytes; at most {limits.MAX_HEADER_BYTES} are allowed"
        )
    return data


def decode_header(frame: Buffer) -> Header:
    """Return the header that `frame` holds.

    Raises:
        DecodeError: It holds none, or one that makes no sense.
        VersionMismatchError: The sender speaks another protocol version; carries it.
    """
    size = _size(frame)
    if size > limits.MAX_HEADER_BYTES:
        raise DecodeError(f"header has {size} bytes; at most {limits.MAX_HEADER_BYTES} are allowed")
    try:
        header = _decode(frame)
    except Exception as exc:
        _check_version(frame)
        raise DecodeError(f"header: {exc}", request_id=readable_request_id(frame)) from exc
    if header.version != PROTOCOL_VERSION:
        _check_version(frame)
    if not math.isfinite(header.ttl) or header.request_id < 0 or header.incarnation < 0:
        raise DecodeError(
            f"header has a number out of range: {header}", request_id=readable_request_id(frame)
        )
    return header


def readable_request_id(frame: Buffer) -> int:
    """Return the id by which to fail a message whose header cannot be used; 0 if there is none.

    Answers and notices have none: their id is none of the sender's requests.
    """
    try:
        header = _decode_any(frame)
    except Exception:
        return 0
    if header.kind in (Kind.REPLY, Kind.FAILURE, Kind.NOTICE):
        return 0
    return max(header.request_id, 0)


def _check_version(frame: Buffer) -> None:
    try:
        header = _decode_any(frame)
    except Exception:
        return
    if header.version != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the other side speaks protocol version {header.version}, this side version "
            f"{PROTOCOL_VERSION}; install the same version of envbus on both",
            version=header.version,
            request_id=max(header.request_id, 0),
        )
