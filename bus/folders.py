"""Names of folders for sockets, which do not outlive the processes that they are for.

A process group makes its folder, and removes it at its end, or its fork server does after a killed
driver. A driver that is itself a child of a process group is killed together with its own fork
server, so it makes its folders inside that process group's. The path of a socket has 107 bytes at
most, so that a long TMPDIR is left alone. What cleans TMPDIR up may remove folders and sockets of a
program that runs: those that something may still look for are made again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from envbus.bus.descriptors import opening
from envbus.bus.errors import StartError, TransportError

__all__ = ["FOLDER_VARIABLE", "is_own_folder", "keep_endpoint", "make_folder", "name_folder"]

#: Environment variable of a process group's children: its folder.
FOLDER_VARIABLE: Final = "ENVBUS_FOLDER"

_PREFIX: Final = "envbus-"
#: Bytes of the longest folder in which there is room for a folder of ours and a socket's name.
_LONGEST: Final = 70
#: Where sockets may be instead, on the systems that envbus runs on.
_SHORT_PLACES: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (names there cannot be guessed)


def name_folder() -> Path:
    """Return a name that nobody has or can guess, for the `directory` of a process group.

    Raises:
        StartError: There is no place for it.
    """
    above: str | None = os.environ.get(FOLDER_VARIABLE)
    if not above or not make_folder(above):
        with opening("set TMPDIR to a folder that can be written to", StartError):
            temporary = tempfile.gettempdir()
        above = next(filter(_has_room, (temporary, *_SHORT_PLACES)), temporary)
    return Path(above, f"{_PREFIX}{secrets.token_urlsafe(6)}")


def make_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder that is gone, and those of process groups in which it stands.

    Returns:
        Whether they are there, and this user's own: by now others may know their names.
    """
    above = Path(path).parent
    if above.name.startswith(_PREFIX) and not make_folder(above):
        return False
    with contextlib.suppress(OSError):
        os.mkdir(path, 0o700)
    return is_own_folder(path)


def is_own_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is there, and this user's own."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def keep_endpoint(endpoint: str, bind: Callable[[str], object]) -> None:
    """Bind an `ipc://` endpoint in a folder once more if its file is gone.

    The former socket is kept with it: to unbind it would end the connections of all who came in
    there.

    Raises:
        TransportError: It cannot be bound.
    """
    path = endpoint.removeprefix("ipc://")
    if not make_folder(folder := os.path.dirname(path)):
        raise TransportError(f"{folder} was removed, and cannot be made again")
    if not os.path.exists(path):
        bind(endpoint)


def _has_room(place: str) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)
