"""Files without a name: memory that can be handed to another process as a descriptor.

Leaves out how it is mapped (`arena.py`) and how it travels (`process/pipe.py`,
`transport/local_link.py`).
"""

from __future__ import annotations

import os
import stat
import tempfile
from typing import Final

from envbus.bus.errors import TransportError

__all__ = ["FOUND_BY_LABEL", "content_of", "create_memfd", "file_of", "open_labelled"]

#: Whether other processes find such a file by its label: `open_labelled`.
FOUND_BY_LABEL: Final = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def create_memfd(label: str) -> int:
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


def open_labelled(path: str, label: str, flags: int) -> int:
    """Open a file that another process has made by `create_memfd`, and return its descriptor.

    Args:
        path: One of that process' descriptors: `/proc/<pid>/fd/<number>`.
        label: What the file's label must begin with.
        flags: Of `os.open`.

    Raises:
        OSError: It is another file, or the process is gone or of another user.
    """
    if not os.readlink(path).startswith(f"/memfd:{label}"):  # most are others, and soon told
        raise FileNotFoundError(path)
    # Another file may stand there by now, or be called so: what is opened is looked at first,
    # without any effect on it.
    found = os.open(path, os.O_PATH)
    try:
        status = os.fstat(found)
        owner = os.stat(os.path.dirname(os.path.dirname(path))).st_uid
        # A memfd is in no folder, so that no link leads to it.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != owner:
            raise FileNotFoundError(path)
        return os.open(f"/proc/self/fd/{found}", flags)
    finally:
        os.close(found)


def file_of(data: bytes | bytearray | memoryview, label: str) -> int:
    """Return the descriptor of a new file without a name that holds `data`; the caller closes it.

    To be called where Ctrl-C is kept, from here to the close, or the descriptor stays.

    Raises:
        TransportError: There is no memory or descriptor left for it.
    """
    try:
        fd = create_memfd(label)
    except OSError as error:
        raise TransportError(f"no passed descriptor could be made: {error}") from error
    rest = memoryview(data).cast("B")
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, OSError):
            raise
        raise TransportError(
            f"a passed descriptor of {len(rest)} bytes found no memory: {error}"
        ) from error
    return fd


def content_of(fd: int) -> bytes:
    """Return the whole file; its own offset, shared with the sender, is not touched.

    Raises:
        TransportError: It became shorter meanwhile, is no file, or there is no memory for it.
    """
    size = os.fstat(fd).st_size
    chunks, start = [], 0
    while start < size:
        try:
            chunk = os.pread(fd, size - start, start)
        except (OSError, MemoryError) as error:  # it is no file, or far too large
            raise TransportError(
                f"a passed descriptor of {size} bytes cannot be read: {error!r}"
            ) from error
        if not chunk:
            raise TransportError("a passed descriptor was cut short while it was read")
        chunks.append(chunk)
        start += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
