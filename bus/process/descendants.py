"""Find and kill what a process has left behind.

Processes carry a *mark* in their environment, which their own children inherit, also those that
left the session and the process group. Leaves out who is to be killed, and when
(`forkserver.py`, `server_process.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

__all__ = [
    "MARK_VARIABLE",
    "Orphan",
    "adopt_orphans",
    "die_with_parent",
    "kill_marked",
    "orphans",
    "outlive_parent",
    "parent_of",
    "process_state",
    "wait_until_gone",
]

#: Environment variable that holds a process' marks, the innermost last.
MARK_VARIABLE: Final = "ENVBUS_ACTOR"
_LINUX: Final = sys.platform.startswith("linux")
#: Numbers of <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Seconds between looks whether killed processes, which need a moment, are gone.
_KILL_INTERVAL: Final = 0.005


class Orphan(NamedTuple):
    """A process whose parent has died."""

    pid: int
    #: Process group that it is in; 0 if unknown.
    process_group: int
    #: Its environment at its start; empty if unknown.
    environ: bytes


def adopt_orphans() -> bool:
    """Make descendants whose parents die children of this process; False where impossible."""
    return _LINUX and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when the *thread* that forked it ends; exit if it has already.

    Only for children of a process with one thread: a thread that ends in a parent with several
    would take its children with it.

    Args:
        parent: The process id that `os.getppid` gives while the parent lives.
    """
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, 0)


def orphans(known: Collection[int], mark: bytes) -> list[Orphan]:
    """Return the processes below this one that are not among its `known` children.

    On Linux, with `adopt_orphans`, these are this process' other children, whatever they carry.
    Elsewhere it is whoever carries `mark`.
    """
    if not _LINUX:
        return [Orphan(pid, 0, environ) for pid, environ in _marked([mark]) if pid not in known]
    return [Orphan(pid, _stat(pid)[1], _environ(pid)) for pid in _children() if pid not in known]


def kill_marked(marks: Collection[bytes], timeout: float) -> bool:
    """Kill every process that carries one of `marks`, but for this one, until none is left.

    Returns:
        Whether all were gone within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    killed: set[int] = set()
    while True:
        found = [pid for pid, _ in _marked(marks)]
        for pid in found:
            _kill_if_marked(pid, marks)
        killed.update(found)
        if not found:
            return wait_until_gone(killed, deadline - time.monotonic())
        if time.monotonic() >= deadline:
            return False
        time.sleep(_KILL_INTERVAL)


def wait_until_gone(pids: Iterable[int], timeout: float) -> bool:
    """Wait for killed processes, of whatever parent, to be gone or zombies.

    Returns:
        Whether all were within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    left = set(pids)
    while left := {pid for pid in left if _is_alive(pid)}:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_KILL_INTERVAL)
    return True


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process is doing; empty if it is gone or unknown."""
    fields = _stat_fields(pid) if _LINUX else []
    return fields[0].decode() if fields else ""


def parent_of(pid: int) -> int:
    """Return the process id of a process' parent; 0 if the process is gone or that is unknown."""
    return _stat(pid)[0]


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def _children() -> list[int]:
    """Return the process ids of all children of this process, which has one thread."""
    pid = os.getpid()
    with contextlib.suppress(OSError), open(f"/proc/self/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    # Kernels without CONFIG_PROC_CHILDREN: look at everybody's parent.
    return [other for other in _all_pids() if _stat(other)[0] == pid]


def _all_pids() -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def _stat(pid: int) -> tuple[int, int]:
    """Return parent and process group of a process, zeros if it is gone."""
    fields = _stat_fields(pid)
    return (int(fields[1]), int(fields[2])) if fields else (0, 0)


def _stat_fields(pid: int) -> list[bytes]:
    """Return state, parent, process group and more; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Before these, the program's name stands in brackets and may hold anything.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    if _LINUX:
        fields = _stat_fields(pid)
        return bool(fields) and fields[0] not in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:  # gone, or of another user
        return b""


def _marked(marks: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield pid and environment of all other processes of this user that carry one of `marks`."""
    own = os.getpid()
    if _LINUX:
        for pid in _all_pids():
            if pid != own and _carries(environ := _environ(pid), marks):
                yield pid, environ
        return
    import psutil  # only here: Linux's /proc is read directly, several times as fast

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ().get(MARK_VARIABLE, "").encode(errors="replace")
            if process.pid != own and _carries(environ, marks):
                yield process.pid, environ


def _carries(environ: bytes, marks: Collection[bytes]) -> bool:
    return any(mark in environ for mark in marks)


def _kill_if_marked(pid: int, marks: Collection[bytes]) -> None:
    """Kill a process found before, unless its id has passed to another one since."""
    with contextlib.suppress(OSError):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it is gone: whoever has its id next is another one
            return
        except (AttributeError, OSError):  # not this system, or a sandbox
            os.kill(pid, signal.SIGKILL)
            return
        try:
            if _carries(_environ(pid), marks):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
