"""Folders for sockets, which do not outlive the processes that they are for.

A nursery removes its folder at its end, or its fork server does after a killed driver. A driver
that is itself a child of a nursery is killed together with its own fork server, so it makes its
folders inside that nursery's. The path of a socket has 107 bytes at most, so that a long TMPDIR
is left alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["FOLDER_VARIABLE", "make_folder"]

#: Environment variable of a nursery's children: its folder.
FOLDER_VARIABLE: Final = "ENVBUS_FOLDER"

#: Bytes of the longest folder in which there is room for a folder of ours and a socket's name.
_LONGEST: Final = 70
#: Where sockets may be instead, on the systems that envbus runs on.
_SHORT_PLACES: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (`mkdtemp` makes what is used)


def make_folder() -> Path:
    """Return a new folder that only this user can enter, for the `directory` of a nursery."""
    above: str | None = os.environ.get(FOLDER_VARIABLE, "")
    if above is None or not os.path.isdir(above):
        above = next(filter(_has_room, (tempfile.gettempdir(), *_SHORT_PLACES)), None)
    return Path(tempfile.mkdtemp(prefix="envbus-", dir=above))


def _has_room(place: str) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)
