"""Kills a server's children, and takes note of how they ended.

Leaves out which are killed and to whom their ends are told (`forkserver.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Container
from typing import Final, NamedTuple

from envbus.bus.autopsy import OomWatch, explain_kill
from envbus.bus.cgroup import memory_limit, oom_kills

__all__ = ["KillExplainer", "Reaped", "kill", "reap_one"]

#: Seconds between looks at the kernel's counter of out-of-memory kills.
_OOM_INTERVAL: Final = 1.0


class Reaped(NamedTuple):
    """A child that has ended."""

    pid: int
    #: Its exit code, or minus the signal's number.
    status: int
    #: The most memory that it ever had, in bytes.
    peak: int


def reap_one(leaders: Container[int]) -> Reaped | None:
    """Reap a child that has ended, if any; kill its process group if it is one of `leaders`."""
    try:
        if hasattr(os, "waitid"):
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return None
            if info.si_pid in leaders:
                _kill_group(info.si_pid)  # while the id is certain to be still its own
            pid, status, usage = os.wait4(info.si_pid, 0)
        else:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in leaders:
                _kill_group(pid)
    except ChildProcessError:
        return None
    if not pid:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return Reaped(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * unit)


def kill(pid: int) -> None:
    """Kill a child that is not reaped yet, and its process group."""
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


class KillExplainer:
    """Knows what the kernel has lately killed for want of memory.

    Args:
        count_kills: Returns how many processes it has killed so far; None where that is not known.
        limit: Returns how many bytes there may be in use; None: no limit is known.
    """

    def __init__(
        self,
        count_kills: Callable[[], int | None] = oom_kills,
        limit: Callable[[], int | None] = memory_limit,
    ) -> None:
        self._count_kills = count_kills
        self._limit = limit
        self._watch = OomWatch(count_kills())
        self._next_look = 0.0

    def look(self) -> None:
        """Read the kernel's counter, once per second at most; to be called again and again."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _OOM_INTERVAL
            self._watch.observe(self._count_kills(), now)

    def explain(self, ended: Reaped) -> str:
        """Return what is to be said of a SIGKILL that was not ours; empty if nothing."""
        if ended.status != -signal.SIGKILL:
            return ""
        now = time.monotonic()
        self._watch.observe(self._count_kills(), now)
        rose = self._watch.rose_lately(now)
        return explain_kill(rose=rose, peak=ended.peak, limit=self._limit())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
