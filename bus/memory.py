"""How much memory processes use, each with all below it.

Leaves out what follows from it (`runner/memory.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

__all__ = ["tree_memory"]

_LINUX: Final = sys.platform.startswith("linux")
#: A kernel may be built without `/proc/<pid>/task/<tid>/children`.
_HAS_CHILDREN: Final = _LINUX and os.path.exists(f"/proc/self/task/{os.getpid()}/children")


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
    import psutil  # only here, as in `descendants.py`

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
