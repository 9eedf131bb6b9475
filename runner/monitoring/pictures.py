"""An observation as a picture, if it is one, and a picture as the bytes of a PNG. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["picture_of", "to_png"]

#: Rows and columns of a picture; less is a grid of something else, more is not shown.
_LEAST: Final = 8
_MOST: Final = 2048
#: Channels of pictures: grey, colours, colours and how opaque they are.
_CHANNELS: Final = (1, 3, 4)
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_GREY, _COLOUR = 0, 2


def picture_of(leaves: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.uint8] | None:
    """Return the first leaf of an observation that is a picture; None: there is none.

    Args:
        leaves: Arrays `(height, width)`, `(height, width, channels)` or `(channels, height,
            width)`; of other channels than 1, 3 or 4, and of 4 grey frames on top of each other,
            the last is taken. What is not uint8 is scaled from its lowest to its highest number.

    Returns:
        uint8 `(height, width)` or `(height, width, 3)`.
    """
    for leaf in leaves:
        planes = _planes(leaf)
        if planes is not None:
            return _bytes(planes)
    return None


def to_png(picture: npt.NDArray[np.uint8]) -> bytes:
    """Return the PNG of uint8 `(height, width)` or `(height, width, 3)`."""
    height, width = picture.shape[:2]
    kind = _GREY if picture.ndim == 2 else _COLOUR
    rows = picture.reshape(height, -1)
    filtered = np.zeros((height, rows.shape[1] + 1), np.uint8)  # 0 before each row: as it is
    filtered[:, 1:] = rows
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(filtered.tobytes(), 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, data) for name, data in chunks)


def _planes(leaf: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return numbers as `(height, width)` or `(height, width, 3)`."""
    if leaf.dtype.kind not in "buif" or leaf.ndim not in (2, 3):
        return None
    if leaf.ndim == 3:
        if leaf.shape[-1] not in _CHANNELS:  # (channels, height, width)
            if leaf.shape[0] > min(leaf.shape[1:]):
                return None
            leaf = np.moveaxis(leaf, 0, -1)
        leaf = leaf if leaf.shape[-1] == 3 else leaf[..., -1]
    sides = leaf.shape[:2]
    return leaf if min(sides) >= _LEAST and max(sides) <= _MOST else None


def _bytes(planes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if planes.dtype == np.uint8:
        return np.ascontiguousarray(planes)
    numbers = np.nan_to_num(planes.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(np.min(numbers)), float(np.max(numbers))
    scaled = (numbers - low) * (255.0 / (high - low) if high > low else 0.0)
    return np.ascontiguousarray(scaled.astype(np.uint8))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
