"""What a message consists of on its way: frames, which are bytes. Vocabulary only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

__all__ = ["Buffer", "Frames"]

#: One frame: bytes, or anything with the buffer protocol (a memoryview, a `zmq.Frame`). One that
#: was received, and whose type is not Python's or NumPy's own, is its receiver's to write into.
Buffer: TypeAlias = Any
#: Header, payload, then the raw buffers.
Frames: TypeAlias = Sequence[Buffer]
