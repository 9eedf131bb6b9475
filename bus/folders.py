"""Names of folders for sockets, which do not outlive the processes that they are for.

A process group makes its folder, and removes it at its end, or its fork server does after a killed
driver. A driver that is itself a child of a process group is killed together with its own fork
server, so it makes its folders inside that process group's. The path of a socket has 107 bytes at
most, so that a long TMPDIR is left alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["FOLDER_VARIABLE", "make_folder", "name_folder"]

#: Environment variable of a process group's children: its folder.
FOLDER_VARIABLE: Final = "ENVBUS_FOLDER"

#: Bytes of the longest folder in which there is room for a folder of ours and a socket's name.
_LONGEST: Final = 70
#: Where sockets may be instead, on the systems that envbus runs on.
_SHORT_PLACES: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (names there cannot be guessed)


def name_folder() -> Path:
    """Return a name that nobody has or can guess, for the `directory` of a process group."""
    above: str | None = os.environ.get(FOLDER_VARIABLE, "")
    if above is None or not os.path.isdir(above):
        temporary = tempfile.gettempdir()
        above = next(filter(_has_room, (temporary, *_SHORT_PLACES)), temporary)
    return Path(above, f"envbus-{secrets.token_urlsafe(6)}")


def make_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder that is gone, as what cleans TMPDIR up may have removed it.

    Returns:
        Whether it is there, and this user's own: by now others may know its name.
    """
    with contextlib.suppress(OSError):
        os.mkdir(path, 0o700)
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _has_room(place: str) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)
