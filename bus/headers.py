"""Headers <-> the first frame of each message. Leaves out payloads (`codec.py`)."""

from __future__ import annotations

import math

import msgspec

from envbus.bus.errors import DecodeError, EncodeError, VersionMismatchError
from envbus.bus.limits import MAX_HEADER_BYTES
from envbus.bus.messages import PROTOCOL_VERSION, Header, Kind
from envbus.bus.transport import Buffer

__all__ = ["decode_header", "encode_header", "readable_request_id"]


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
    if len(data) > MAX_HEADER_BYTES:
        raise EncodeError(f"header has {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    return data


def decode_header(frame: Buffer) -> Header:
    """Return the header that `frame` holds.

    Raises:
        DecodeError: It holds none, or one that makes no sense.
        VersionMismatchError: The sender speaks another protocol version; carries it.
    """
    size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
    if size > MAX_HEADER_BYTES:
        raise DecodeError(f"header has {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
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
