"""Open files of this process: how many there are and may be, and what to do where none is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from envbus.bus.errors import EnvbusError, TransportError

__all__ = ["descriptors_advice", "descriptors_in_use", "descriptors_left", "opening"]


def descriptors_in_use() -> int:
    """Return how many there are; if none is left to look by, how many there may be."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # which takes one
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors_left(pid: int) -> int | None:
    """Return how many more a process of this user may open; None: this system does not tell."""
    try:
        allowed, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
    except (AttributeError, OSError):  # it is not Linux, or the process is not to be looked at
        return None
    return None if allowed == resource.RLIM_INFINITY else allowed - used


def descriptors_advice(needed: int | None = None) -> str:
    """Say how many there are and may be, and what to do.

    Args:
        needed: How many there must be at least; None: more.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = "more" if needed is None else f"{needed} at least"
    more = "" if most in (resource.RLIM_INFINITY, allowed) else f" (up to {most})"
    return (
        f"this process has {descriptors_in_use()} descriptors and may have {allowed}. Allow "
        f"{least}: `ulimit -n` in the shell before{more}"
    )


@contextlib.contextmanager
def opening(what: str, error: type[EnvbusError] = TransportError) -> Iterator[None]:
    """Raise `error` where the system refuses a descriptor within; also a decorator.

    Args:
        what: Cannot be done then: `"env-3 cannot be started"`.
        error: What is raised for an OSError; where too many files are open, with advice.
    """
    try:
        yield
    except OSError as exc:
        too_many = exc.errno in (errno.EMFILE, errno.ENFILE)
        advice = f"; {descriptors_advice()}" if too_many else ""
        raise error(f"{what}: {exc}{advice}") from exc
