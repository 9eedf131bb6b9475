"""Folders for sockets, which do not outlive the processes that they are for.

A nursery removes its folder at its end, or its fork server does after a killed driver. A driver
that is itself a child of a nursery is killed together with its own fork server, so it makes its
folders inside that nursery's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["FOLDER_VARIABLE", "make_folder"]

#: Environment variable of a nursery's children: its folder.
FOLDER_VARIABLE: Final = "ENVBUS_FOLDER"


def make_folder() -> Path:
    """Return a new folder that only this user can enter, for the `directory` of a nursery."""
    above = os.environ.get(FOLDER_VARIABLE, "")
    return Path(tempfile.mkdtemp(prefix="envbus-", dir=above if os.path.isdir(above) else None))
