"""Which files were changed: by what a look at them tells, without reading them.

Leaves out when one looks, and what is in the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

__all__ = ["FileStamp", "FileWatch", "stamp_of"]

#: What differs once a file was changed.
FileStamp: TypeAlias = tuple[int, int, int, int]


def stamp_of(file: str | os.PathLike[str]) -> FileStamp:
    """Return what differs once a file was changed, or is another one.

    Raises:
        OSError: It cannot be looked at.
    """
    status = os.stat(file)
    # The second one also tells of changes of the mode, and of content under a time that was kept.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


class FileWatch:
    """Remembers how some files looked last.

    One that is missing, as may be while another takes its place, counts when it is there again.

    Args:
        files: Which.
        look: Returns what differs once a file was changed; raises OSError.
    """

    def __init__(self, files: Iterable[Path], look: Callable[[Path], object] = stamp_of) -> None:
        self._look = look
        self._seen: dict[Path, object] = {}
        for file in files:
            self._seen[file] = self._stamp(file)

    def changed(self) -> list[Path]:
        """Return the files that were changed since the last call, or since the begin."""
        found = []
        for file, before in self._seen.items():
            now = self._stamp(file)
            if now not in (None, before):
                self._seen[file] = now
                found.append(file)
        return found

    def _stamp(self, file: Path) -> object:
        try:
            return self._look(file)
        except OSError:
            return None
