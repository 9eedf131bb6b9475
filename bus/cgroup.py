"""What memory the kernel gives this process and those beside it, and whom it has killed for it.

Linux only; elsewhere nothing is known. Leaves out what follows from it (`autopsy.py`, `arena.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["memory_limit", "oom_kills"]

#: cgroup v2's and v1's names: a file with the limit, and one with the counter `oom_kill`.
_V2 = ("memory.max", "memory.events")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")


def memory_limit(root: str = "/") -> int | None:
    """Return the bytes that this process' cgroup may use; None if there is no limit.

    Args:
        root: Where `/proc` and `/sys` are; for tests.
    """
    limits = []
    for folder, (name, _) in _memory_folders(root):
        # ValueError: "max". A limit of v1 that nobody set is a number that no machine has.
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/{name}") as file:
            limits.append(int(file.read()))
    return min((limit for limit in limits if limit < 2**60), default=None)


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes the kernel has killed for want of memory; None if unknown.

    Those of this process' cgroup, or, without one, those of the machine.
    """
    for folder, (_, name) in _memory_folders(root):
        if (count := _read_counter(f"{folder}/{name}")) is not None:
            return count
    return _read_counter(os.path.join(root, "proc/vmstat"))


def _memory_folders(root: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the folders of this process' memory cgroup and those above it, innermost first."""
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = os.path.join(root, "sys/fs/cgroup", "memory" if controllers else "")
        names = _V1 if controllers else _V2
        # In a container the path may be the host's, of which only the mount's root is here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        while True:
            folder = os.path.join(mount, *parts)
            if os.path.exists(f"{folder}/{names[1]}"):
                yield folder, names
            if not parts:
                break
            parts.pop()


def _read_counter(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
