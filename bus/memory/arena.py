"""Shared memory without a name: made by one process, mapped by those it is handed to.

Leaves out what is stored where (`actors/arrays/blocks.py`) and how the descriptor reaches another
process (`process/pipe.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import psutil

from envbus.bus.errors import ClosedError, ConfigError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.memory.usage import memory_left

__all__ = ["Arena"]


class Arena:
    """A piece of memory that several processes of one host read and write.

    Attributes:
        size: Bytes that were asked for; the buffer is exactly that long.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map: mmap.mmap | None = mmap.mmap(fd, size)
        # Through an array, which holds on to the mapping: of a plain memoryview `np.ndarray` only
        # remembers whose it is, and the mapping could be closed under its feet.
        memory: Any = np.frombuffer(self._map, np.uint8)
        self._buffer: memoryview | None = memoryview(memory)
        self._fd = fd  # last: what could not be mapped has nothing to close

    @classmethod
    @uninterrupted_call  # or the descriptor is closed twice
    def create(cls, size: int) -> Arena:
        """Return a new arena of `size` zero bytes.

        All its memory is reserved here, so that a full machine shows as an error now and not
        as a SIGBUS at some later write.

        Raises:
            ConfigError: `size` is not positive, or there is not that much shared memory.
        """
        if size <= 0:
            raise ConfigError(f"an arena needs at least one byte, not {size}")
        available = _available_memory()
        if size > available:
            raise ConfigError(_too_little(size, f"{available} bytes of memory are available"))
        try:
            fd = create_memfd("envbus-arena")
            try:
                _reserve(fd, size)
                return cls(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            limit = " (ulimit -f counts memory, too)" if error.errno == errno.EFBIG else ""
            raise ConfigError(_too_little(size, f"{error.strerror}{limit}")) from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """Return a view of an arena that another process made; takes over `fd`.

        Raises:
            ConfigError: The memory behind `fd` is smaller than `size`.
        """
        try:
            found = os.fstat(fd).st_size
            if not 0 < size <= found:
                raise ConfigError(f"an arena of {size} bytes was announced, {found} are there")
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def buffer(self) -> memoryview:
        """The memory, writable. Arrays made from it keep the mapping alive after `close`.

        Raises:
            ClosedError: The arena was closed.
        """
        if self._buffer is None:
            raise ClosedError("this arena was closed")
        return self._buffer

    @property
    def fd(self) -> int:
        """Descriptor to hand to another process; it stays this arena's own.

        Raises:
            ClosedError: The arena was closed.
        """
        if self._fd < 0:
            raise ClosedError("this arena was closed")
        return self._fd

    def close(self) -> None:
        """Let go of the memory. Idempotent.

        Arrays that still look into it stay valid: the mapping goes with the last of them.
        """
        buffer, mapping, fd = self._buffer, self._map, self._fd
        self._buffer, self._map, self._fd = None, None, -1
        if fd >= 0:
            os.close(fd)
        if buffer is None or mapping is None:
            return
        try:
            buffer.release()
            mapping.close()
        except BufferError:
            pass  # somebody's array looks into it; garbage collection unmaps it later

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._fd < 0 else f"fd={self._fd}"
        return f"<Arena {self.size} bytes, {state}>"


def _too_little(size: int, why: str) -> str:
    return (
        f"no {size} bytes of shared memory: {why}; use fewer envs, give the container more memory "
        "(docker run --memory, --shm-size), or say shared_memory=False"
    )


def _available_memory() -> int:
    """Return the bytes that can be reserved at most.

    Asked first, because the kernel reserves a memfd page by page and, having nothing to compare
    with, would have the whole machine's memory taken before it gives up.
    """
    available = int(psutil.virtual_memory().available)
    left = memory_left()
    return available if left is None else min(available, left)


def _reserve(fd: int, size: int) -> None:
    """Make the file behind `fd` `size` bytes long and back all of them with memory."""
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    if hasattr(fcntl, "F_ADD_SEALS"):
        # Nobody, by accident or not, can shrink it under another process' feet (SIGBUS). Files
        # that are no memfds take no seals.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
