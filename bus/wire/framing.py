"""A message's frames as one piece of bytes, and a byte stream cut into such pieces.

`[header][payload][buffer 0]...` becomes one MessagePack array of bin; on a stream its length
stands before it, in 4 bytes, big endian. LocalLinks and gateways use it. Pure: no socket, clock,
thread or process in this file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgpack
import msgspec

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.wire.codec import readable_request_id
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES

__all__ = [
    "BEGINNING",
    "MAX_FRAMES_WITH_HEADER",
    "StreamReader",
    "TooLarge",
    "begun_request",
    "lengths_of",
    "pack",
    "pack_for_stream",
    "unpack",
]

#: Frames of one message here, where its header is one of them: `MAX_FRAMES` counts those behind it.
MAX_FRAMES_WITH_HEADER: Final = 1 + MAX_FRAMES
#: First bytes of MessagePack's arrays, and of how many bytes the count behind each is.
_FIXARRAY: Final = 0x90
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[memoryview]).decode
_LENGTH: Final = struct.Struct(">I")
#: Bytes at the beginning of a message that hold its header for sure: with what MessagePack puts
#: before it, an array's and a bin's first bytes.
BEGINNING: Final = MAX_HEADER_BYTES + 10


class TooLarge(NamedTuple):
    """Stands for a message that is over the limit and was passed over."""

    size: int
    #: Of the request that it was; 0: it was none, or that is not to be read.
    request_id: int


def lengths_of(frames: Frames) -> list[int]:
    """Return the bytes of each frame."""
    return [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]


def pack(frames: Frames) -> bytes:
    """Return frames as one MessagePack array of bin.

    Raises:
        EncodeError: They are too many, or too large for MessagePack.
    """
    if not 1 <= len(frames) <= MAX_FRAMES_WITH_HEADER:
        raise EncodeError(f"a message has 1 to {MAX_FRAMES_WITH_HEADER} frames, not {len(frames)}")
    try:
        return _encode([f if type(f) is bytes else memoryview(f) for f in frames])
    except msgspec.EncodeError as exc:
        raise EncodeError(f"a frame is too large for MessagePack: {exc}") from exc


def pack_for_stream(frames: Frames) -> bytes:
    """Return frames as `pack` does, behind their length.

    Raises:
        EncodeError: They are too many, or too large.
    """
    packed = pack(frames)
    if len(packed) >= 2**32:
        raise EncodeError(f"a message of {len(packed)} bytes is too large for a stream")
    return _LENGTH.pack(len(packed)) + packed


def unpack(data: bytes | memoryview) -> list[memoryview]:
    """Return the frames in `data`, without a copy.

    Raises:
        DecodeError: It is not one array of 1 to `MAX_FRAMES_WITH_HEADER` bins, or something
            follows it.
    """
    # Before anything is built: many frames, which may be empty, would take much more memory.
    first = data[0] if data else 0
    count = 1  # or it is no array, which is told below
    if first & 0xF0 == _FIXARRAY:
        count = first & 0x0F
    elif first in _ARRAYS:
        count = int.from_bytes(data[1 : 1 + _ARRAYS[first]], "big")
    if not 1 <= count <= MAX_FRAMES_WITH_HEADER:
        raise DecodeError(f"a message has 1 to {MAX_FRAMES_WITH_HEADER} frames, not {count}")
    try:
        return _decode(data)
    except msgspec.DecodeError as exc:
        raise DecodeError(f"a message is a MessagePack array of bin: {exc}") from exc


def begun_request(data: bytes | memoryview) -> int:
    """Return the id of the request that a message's first `BEGINNING` bytes are of; 0: of none."""
    unpacker = msgpack.Unpacker(max_bin_len=MAX_HEADER_BYTES)
    unpacker.feed(data)
    try:
        unpacker.read_array_header()
        return readable_request_id(unpacker.unpack())
    except (ValueError, TypeError, msgpack.UnpackException):  # whatever stands there instead
        return 0


class StreamReader:
    """Cuts a byte stream into messages. Holds one unfinished message at most.

    Args:
        max_message_bytes: Longest message that is accepted, in bytes without its length.
        on_too_large: Told of each message over the limit, of which nothing is kept; then those
            behind it are read. None: it is an error. May be set later.
    """

    def __init__(
        self, max_message_bytes: int, on_too_large: Callable[[TooLarge], object] | None = None
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self.on_too_large = on_too_large
        self._rest = bytearray()
        #: Bytes that `_rest` must have before it is worth a look.
        self._wanted = _LENGTH.size
        #: Bytes still to come of a message that is over the limit.
        self._passed_over = 0

    @property
    def missing(self) -> int:
        """Bytes that a message which has begun lacks, as far as is known; 0: none has begun."""
        return self._wanted - len(self._rest) if self._rest else 0

    def feed(self, data: bytes) -> Iterator[list[memoryview]]:
        """Yield the messages, as their frames, that `data` completes.

        To be exhausted before the next call. Nothing can be read after an error.

        Raises:
            DecodeError: A message is over the limit, which shows before it was received, or
                malformed. Those before it were yielded.
        """
        if self._passed_over:
            count = min(self._passed_over, len(data))
            self._passed_over -= count
            data = data[count:]
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        view, at = memoryview(data), 0
        self._wanted = _LENGTH.size
        while len(view) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(view, at)
            begin = at + _LENGTH.size
            if size > self._max_message_bytes:
                if self.on_too_large is None:
                    raise DecodeError(
                        f"a message of {size} bytes is announced; at most "
                        f"{self._max_message_bytes} are allowed"
                    )
                needed = min(size, BEGINNING)
                if begin + needed > len(view):
                    self._wanted = _LENGTH.size + needed
                    break
                at = min(begin + size, len(view))
                self._passed_over = begin + size - at
                request_id = begun_request(view[begin : begin + needed])
                self.on_too_large(TooLarge(size, request_id))
                continue
            if begin + size > len(view):
                self._wanted = _LENGTH.size + size
                break
            at = begin + size
            yield unpack(view[begin:at])
        self._rest += view[at:]
