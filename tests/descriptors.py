"""Open files of this process, for tests."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

__all__ = ["CrowdedSocket", "no_more_files", "open_descriptors"]

#: Descriptors below it are of standard streams and of pytest, which closes none of them. As many
#: may be waited for at a time where no more files may be opened.
_FEW: Final = 8


def open_descriptors() -> set[tuple[int, int, int]]:
    """Return number, device and inode of each.

    What is not in an earlier answer was opened since. How many there are says nothing: what tests
    before have left (garbage, ZeroMQ's sockets) closes at any time.
    """
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the folder itself
            stat = os.fstat(int(name))
            found.add((int(name), stat.st_dev, stat.st_ino))
    return found


@contextmanager
def no_more_files() -> Iterator[None]:
    """At the limit of open files; also while others are closed, as those of tests before are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    while taken[-1] < _FEW:
        taken.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


class CrowdedSocket(socket.socket):
    """One of a user whose processes have too many files under way, for a while."""

    refusals = 3

    def sendmsg(self, *args: Any) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return super().sendmsg(*args)
