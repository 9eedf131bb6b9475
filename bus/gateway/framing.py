"""A message's frames as one piece of bytes, and a byte stream cut into such pieces.

`[header][payload][buffer 0]...` becomes one MessagePack array of bin; on a stream its length
stands before it, in 4 bytes, big endian. Pure: no socket, clock, thread or process in this file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.headers import readable_request_id
from envbus.bus.limits import MAX_HEADER_BYTES
from envbus.bus.transport import Buffer, Frames

__all__ = [
    "BEGINNING",
    "MAX_FRAMES",
    "StreamReader",
    "TooLarge",
    "begun_request",
    "pack",
    "pack_for_stream",
    "unpack",
]

#: Frames of one message: the header and what `CodecLimits.max_frames` allows behind it.
MAX_FRAMES: Final = 1 + 1024
#: MessagePack's first bytes.
_FIXARRAY, _ARRAY16, _ARRAY32 = 0x90, 0xDC, 0xDD
_BIN8, _BIN16, _BIN32 = 0xC4, 0xC5, 0xC6
#: Bytes of the number behind the first one.
_NUMBER: Final = {_ARRAY16: 2, _ARRAY32: 4, _BIN8: 1, _BIN16: 2, _BIN32: 4}
_LENGTH: Final = struct.Struct(">I")
#: Bytes at the beginning of a message that hold its header for sure: with what MessagePack puts
#: before it, an array's and a bin's first bytes.
BEGINNING: Final = MAX_HEADER_BYTES + 10


class TooLarge(NamedTuple):
    """Stands for a message that is over the limit and was passed over."""

    size: int
    #: Of the request that it was; 0: it was none, or that is not to be read.
    request_id: int


def pack(frames: Frames) -> bytes:
    """Return frames as one MessagePack array of bin.

    Raises:
        EncodeError: They are too many, or too large for MessagePack.
    """
    return b"".join(_pieces(frames))


def pack_for_stream(frames: Frames) -> bytes:
    """Return frames as `pack` does, behind their length.

    Raises:
        EncodeError: They are too many, or too large.
    """
    pieces = _pieces(frames)
    size = sum(memoryview(piece).nbytes for piece in pieces)
    if size >= 2**32:
        raise EncodeError(f"a message of {size} bytes is too large for a stream")
    return b"".join((_LENGTH.pack(size), *pieces))


def unpack(data: bytes | memoryview) -> list[memoryview]:
    """Return the frames in `data`, without a copy.

    Raises:
        DecodeError: It is not one array of 1 to `MAX_FRAMES` bins, or something follows it.
    """
    view = memoryview(data)
    first, at = _byte(view, 0), 1
    if first & 0xF0 == _FIXARRAY:
        count = first & 0x0F
    elif first in (_ARRAY16, _ARRAY32):
        count, at = _number(view, at, _NUMBER[first])
    else:
        raise DecodeError(f"a message is a MessagePack array of bin; it begins with {first:#04x}")
    if not 1 <= count <= MAX_FRAMES:
        raise DecodeError(f"a message has 1 to {MAX_FRAMES} frames, not {count}")
    frames = []
    for index in range(count):
        kind = _byte(view, at)
        if kind not in (_BIN8, _BIN16, _BIN32):
            raise DecodeError(f"frame {index} is no MessagePack bin; it begins with {kind:#04x}")
        size, begin = _number(view, at + 1, _NUMBER[kind])
        at = begin + size
        if at > len(view):
            raise DecodeError(f"frame {index} has {size} bytes; only {len(view) - begin} are left")
        frames.append(view[begin:at])
    if at != len(view):
        raise DecodeError(f"{len(view) - at} bytes follow the last frame")
    return frames


def begun_request(data: bytes | memoryview) -> int:
    """Return the id of the request that a message's first `BEGINNING` bytes are of; 0: of none."""
    view = memoryview(data)
    try:
        first = _byte(view, 0)
        at = 1 if first & 0xF0 == _FIXARRAY else 1 + _NUMBER[first]
        size, begin = _number(view, at + 1, _NUMBER[_byte(view, at)])
    except (DecodeError, KeyError):
        return 0
    return readable_request_id(view[begin : begin + size]) if size <= MAX_HEADER_BYTES else 0


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


def _pieces(frames: Frames) -> list[Buffer]:
    count = len(frames)
    if not 1 <= count <= MAX_FRAMES:
        raise EncodeError(f"a message has 1 to {MAX_FRAMES} frames, not {count}")
    pieces: list[Buffer] = [
        bytes([_FIXARRAY | count]) if count < 16 else struct.pack(">BH", _ARRAY16, count)
    ]
    for frame in frames:
        pieces += (_bin_head(memoryview(frame).nbytes), frame)
    return pieces


def _bin_head(size: int) -> bytes:
    if size < 2**8:
        return struct.pack(">BB", _BIN8, size)
    if size < 2**16:
        return struct.pack(">BH", _BIN16, size)
    if size < 2**32:
        return struct.pack(">BI", _BIN32, size)
    raise EncodeError(f"a frame of {size} bytes is too large for MessagePack")


def _byte(view: memoryview, at: int) -> int:
    if at >= len(view):
        raise DecodeError("a message is cut short")
    return view[at]


def _number(view: memoryview, at: int, size: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends."""
    if at + size > len(view):
        raise DecodeError("a message is cut short")
    return int.from_bytes(view[at : at + size], "big"), at + size
