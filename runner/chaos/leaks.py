"""What a driver and its processes hold over time, and what is left when they are gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil

from envbus.runner.chaos.envs import SLEEPER

__all__ = ["Growth", "ResourceSample", "growth_of", "marked_processes", "sample", "shared_files"]

#: Part of a run whose samples are not fitted: pools, caches and the allocator warm up.
_WARM_UP = 0.25
#: Seconds that a fit must span at least; a shorter one says nothing about a leak.
_SHORTEST_SPAN = 60.0
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to


class ResourceSample(msgspec.Struct, frozen=True, kw_only=True):
    """What is held at one time. Memory in bytes."""

    seconds: float
    #: Of the driver.
    driver_memory: int
    driver_descriptors: int
    #: Of those: files in memory without a name.
    driver_memory_files: int
    #: Of the fork server.
    server_memory: int
    server_descriptors: int
    #: Fork server and actors, what envs have started not counted.
    processes: int
    zombies: int
    #: Names in the folder of shared memory that they have mapped.
    shared_files: list[str]


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A line through what was held over time."""

    #: Per minute; None if the run was too short to tell.
    per_minute: float | None
    first: float
    last: float


def sample(pid: int, seconds: float) -> ResourceSample | None:
    """Return what the driver `pid` and its processes hold; None if it is gone."""
    try:
        driver = psutil.Process(pid)
        descendants = driver.children(recursive=True)
        servers = [process for process in descendants if _parent(process) == pid]
        processes = zombies = 0
        for process in descendants:
            state, started_by_env = _look_at(process)
            processes += state not in (None, psutil.STATUS_ZOMBIE) and not started_by_env
            zombies += state == psutil.STATUS_ZOMBIE
        return ResourceSample(
            seconds=seconds,
            driver_memory=driver.memory_info().rss,
            driver_descriptors=driver.num_fds(),
            driver_memory_files=_memory_files(pid),
            server_memory=sum(server.memory_info().rss for server in servers),
            server_descriptors=sum(server.num_fds() for server in servers),
            processes=processes,
            zombies=zombies,
            shared_files=sorted(set().union(*map(_mapped, (driver, *descendants)))),
        )
    except (psutil.Error, OSError):
        return None


def growth_of(samples: Sequence[ResourceSample], field: str) -> Growth:
    """Return how `field` grew, warm-up left out. `samples` must not be empty."""
    end = samples[-1].seconds
    fitted = [s for s in samples if s.seconds >= _WARM_UP * end]
    times = np.array([s.seconds for s in fitted])
    values = np.array([getattr(s, field) for s in fitted], np.float64)
    slope = None
    if len(fitted) > 2 and times[-1] - times[0] >= _SHORTEST_SPAN:
        slope = float(np.polyfit(times / 60.0, values, 1)[0])
    return Growth(per_minute=slope, first=float(values[0]), last=float(values[-1]))


def marked_processes(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes that were started with this environment variable, zombies not."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(entry.name)))
            except (OSError, psutil.Error):
                continue
    return found


def shared_files() -> set[str]:
    """Return the names in the folder of shared memory, where there is one."""
    return {path.name for path in _SHM.iterdir()} if _SHM.is_dir() else set()


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def _look_at(process: psutil.Process) -> tuple[str | None, bool]:
    """Return a process' state, None if it is gone, and whether an env started it."""
    try:
        state = str(process.status())
        return state, state != psutil.STATUS_ZOMBIE and process.cmdline() == list(SLEEPER)
    except psutil.NoSuchProcess:
        return None, False


def _mapped(process: psutil.Process) -> set[str]:
    try:
        lines = Path("/proc", str(process.pid), "maps").read_text("utf-8").splitlines()
    except OSError:
        return set()
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if str(_SHM) in line]
    return {path.name for path in paths if path.parent == _SHM}


def _memory_files(pid: int) -> int:
    count = 0
    for link in Path("/proc", str(pid), "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(link).startswith("/memfd:")
    return count
