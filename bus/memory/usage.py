"""How much memory processes use, how much the kernel gives them, and whom it has killed for it.

Leaves out what follows from it (`arena.py`, `process/exit_report.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

__all__ = ["memory_left", "memory_limit", "oom_kills", "tree_memory"]

_LINUX: Final = sys.platform.startswith("linux")
#: A kernel may be built without `/proc/<pid>/task/<tid>/children`.
_HAS_CHILDREN: Final = _LINUX and os.path.exists(f"/proc/self/task/{os.getpid()}/children")
#: cgroup v2's and v1's names: files with the limit, the counter `oom_kill`, and what is in use.
_V2 = ("memory.max", "memory.events", "memory.current")
_V1 = ("memory.limit_in_bytes", "memory.oom_control", "memory.usage_in_bytes")
#: A limit of v1 that nobody set is a number that no machine has.
_NO_LIMIT = 2**60
#: What of that which is in use the kernel gives back when it is wanted, in `memory.stat`.
_CACHE = ("active_file", "inactive_file")


def tree_memory(pids: Iterable[int]) -> dict[int, int]:
    """Return the resident bytes of each process and of all that descend from it.

    Pages that several processes of one tree share are counted in each of them. A process whose
    parents have died is in no tree any more. 0 for one that is gone.
    """
    children, resident = _readers()
    totals = {}
    for root in pids:
        seen: set[int] = set()
        found = [root]
        total = 0
        while found:
            pid = found.pop()
            if pid not in seen:  # a pid may be given anew while one looks
                seen.add(pid)
                total += resident(pid)
                found += children(pid)
        totals[root] = total
    return totals


def _readers() -> tuple[Callable[[int], list[int]], Callable[[int], int]]:
    """Return how to read a process' children, and its own resident bytes."""
    if _HAS_CHILDREN:  # 0.1 ms per process, where psutil reads of all processes on the machine
        return _children, _resident
    import psutil  # only here, as in `process/descendants.py`

    below: defaultdict[int, list[int]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for process in psutil.process_iter(["ppid", "memory_info"]):
        below[process.info["ppid"]].append(process.pid)
        memory = process.info["memory_info"]
        sizes[process.pid] = 0 if memory is None else memory.rss
    return lambda pid: below.get(pid, []), lambda pid: sizes.get(pid, 0)


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it, or one of its threads, has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# --- what the kernel gives: Linux only, elsewhere nothing is known --------------------------------


def memory_limit(root: str = "/") -> int | None:
    """Return the bytes that this process' cgroup may use; None if there is no limit.

    Args:
        root: Where `/proc` and `/sys` are; for tests.
    """
    return min((limit for limit, _ in _limits(root)), default=None)


def memory_left(root: str = "/") -> int | None:
    """Return the bytes that this process' cgroup may still take; None if there is no limit."""
    return min((max(limit - used, 0) for limit, used in _limits(root)), default=None)


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes the kernel has killed for want of memory; None if unknown.

    Those of this process' cgroup, or, without one, those of the machine.
    """
    for folder, (_, name, _) in _memory_folders(root):
        if (count := _read_counter(f"{folder}/{name}")) is not None:
            return count
    return _read_counter(os.path.join(root, "proc/vmstat"))


def _limits(root: str) -> Iterator[tuple[int, int]]:
    """Yield each limit that holds for this process, and what is in use under it."""
    for folder, (name, _, used_name) in _memory_folders(root):
        limit = _read_number(f"{folder}/{name}")
        if limit is not None and limit < _NO_LIMIT:
            used = _read_number(f"{folder}/{used_name}") or 0
            cached = [_read_counter(f"{folder}/memory.stat", name) or 0 for name in _CACHE]
            yield limit, used - sum(cached)


def _memory_folders(root: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
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


def _read_number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:  # ValueError: "max"
        return int(file.read())
    return None


def _read_counter(path: str, wanted: str = "oom_kill") -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == wanted:
                return int(value)
    return None
