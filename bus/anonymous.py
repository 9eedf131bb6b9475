"""Files without a name: memory that can be handed to another process as a descriptor.

Leaves out how it is mapped (`arena.py`) and how it travels (`pipe.py`).
"""

from __future__ import annotations

import os
import tempfile

__all__ = ["anonymous_file"]


def anonymous_file(label: str) -> int:
    """Return the descriptor of a new, empty file in memory that has no name in any folder.

    Nothing can stay behind: the file is gone with the last descriptor and mapping of it,
    however their processes end. Linux's memfd is not bounded by the size of `/dev/shm`, which
    is 64 MB in many containers. Where Python was built without it, a file under `/dev/shm` is
    opened with `O_TMPFILE`, so it never has a name either; on systems without both (macOS) a
    temporary file is unlinked before this function returns.

    Args:
        label: Shown in `/proc/<pid>/maps`, for people.

    Returns:
        A descriptor that child processes do not inherit. The caller closes it.

    Raises:
        OSError: No descriptor or no space is left.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 (never gets a name)
    with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
        return os.dup(file.fileno())
