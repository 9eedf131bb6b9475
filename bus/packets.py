"""Frames in one piece of bytes: a table of their lengths, then the frames. Pure.

```
count: uint32, length of each: count x uint32 (all little-endian), frames
```
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from envbus.bus.errors import DecodeError
from envbus.bus.limits import MAX_FRAMES, MAX_MESSAGE_BYTES
from envbus.bus.transport import Buffer, Frames

__all__ = ["Assembler", "lengths_of", "pack", "table_of", "unpack"]

_COUNT: Final = struct.Struct("<I")
#: Layouts of the usual counts; two is a message without arrays.
_TABLES: Final = {count: struct.Struct(f"<{count + 1}I") for count in range(1, 9)}


def table_of(count: int) -> struct.Struct:
    """Return the layout of the table of so many frames.

    Raises:
        DecodeError: No message has that many.
    """
    table = _TABLES.get(count)
    if table is None:
        if not 0 < count <= MAX_FRAMES + 1:
            raise DecodeError(f"a packet of {count} frames is none")
        table = struct.Struct(f"<{count + 1}I")
    return table


def lengths_of(frames: Frames) -> list[int]:
    """Return the bytes of each frame."""
    return [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]


def pack(frames: Frames) -> bytes:
    """Return the packet that carries `frames`."""
    lengths = lengths_of(frames)
    return b"".join((table_of(len(frames)).pack(len(frames), *lengths), *frames))


def unpack(packet: bytes) -> list[Buffer]:
    """Return the frames that one packet carries, as views of it.

    Raises:
        DecodeError: It is not one of `pack`.
    """
    try:
        table = table_of(_COUNT.unpack_from(packet)[0])
        lengths = table.unpack_from(packet)[1:]
    except struct.error as exc:
        raise DecodeError(f"a packet of {len(packet)} bytes has no readable table") from exc
    frames, end = _cut(memoryview(packet), table.size, lengths)
    if end != len(packet):
        raise DecodeError(f"a packet has {len(packet)} bytes, its table says {end}")
    return frames


class Assembler:
    """Takes packets out of a stream of bytes, however that was cut.

    Args:
        max_packet_bytes: Larger ones are refused when their table is there, before they are kept.
    """

    def __init__(self, max_packet_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._limit = max_packet_bytes
        self._partial = bytearray()
        self._needed = 0

    @property
    def missing(self) -> int:
        """Bytes that the packet that has begun lacks, as far as is known; 0: none has begun."""
        return self._needed - len(self._partial)

    def take(self, data: Buffer) -> list[list[Buffer]]:
        """Return the messages that are whole now; their frames are views.

        Args:
            data: What has come, not empty. It is viewed: do not write to it.

        Raises:
            DecodeError: It is no packet, or too large a one. Nothing can be read behind it.
        """
        if self._needed:
            self._partial += data
            if len(self._partial) < self._needed:
                return []
            data, self._partial, self._needed = self._partial, bytearray(), 0
        messages: list[list[Buffer]] = []
        view = memoryview(data)
        begin, size = 0, len(data)
        while begin < size:
            needed, frames = self._frames(view, begin, size - begin)
            if frames is None:
                self._partial += view[begin:]
                self._needed = needed
                break
            messages.append(frames)
            begin += needed
        return messages

    def _frames(self, view: memoryview, begin: int, there: int) -> tuple[int, list[Buffer] | None]:
        """Return the bytes of the packet that begins there, and its frames if it is whole."""
        if there < _COUNT.size:
            return _COUNT.size, None
        table = table_of(_COUNT.unpack_from(view, begin)[0])
        if there < table.size:
            return table.size, None
        lengths = table.unpack_from(view, begin)[1:]
        needed = table.size + sum(lengths)
        if needed > self._limit:
            raise DecodeError(f"a packet of {needed} bytes is larger than {self._limit}")
        if there < needed:
            return needed, None
        return needed, _cut(view, begin + table.size, lengths)[0]


def _cut(view: memoryview, start: int, lengths: Iterable[int]) -> tuple[list[Buffer], int]:
    """Return frames of these lengths, and where the last one ends."""
    frames: list[Buffer] = []
    for length in lengths:
        end = start + length
        frames.append(view[start:end])
        start = end
    return frames, start
