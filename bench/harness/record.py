"""How often things are timed, what it comes to, and result files, without host name and path."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "FULL",
    "QUICK",
    "REQUESTS",
    "REQUESTS_QUICK",
    "Keep",
    "Record",
    "Say",
    "Schedule",
    "Spread",
    "forget",
    "load",
    "new_record",
    "save",
    "spread_of",
]

#: A result as it stands in its JSON file. Keys: `kind`, `date`, `commit`, `machine`,
#: `schedule`, `versions` (by library) and `rows`; the rows' keys depend on `kind`.
Record: TypeAlias = dict[str, Any]


#: Takes lines of progress.
Say: TypeAlias = Callable[[str], None]
#: Takes a record that is not complete yet: a run of an hour should survive its end.
Keep: TypeAlias = Callable[[Record], None]


def forget(_: Record) -> None:
    """Keep nothing."""


@dataclass(frozen=True)
class Schedule:
    """How long and how often everything is timed."""

    #: Rounds per case; in each, every variant runs once.
    rounds: int
    #: Seconds of one timed run, and of the untimed steps before it: caches and cores wake up.
    seconds: float
    warm_up: float
    #: Starts of each variant in the start-up benchmark.
    starts: int
    #: Decides the order within each round.
    seed: int = 0
    #: Workloads whose rounds are longer, and how many times.
    times_as_long: Mapping[str, float] = field(default_factory=dict)

    def of(self, workload: str) -> Schedule:
        """Return the schedule of one workload's rounds."""
        times = self.times_as_long.get(workload, 1.0)
        return replace(self, seconds=times * self.seconds, warm_up=times * self.warm_up)

    def order(self, name: object) -> random.Random:
        """Return what shuffles the rounds of the case of that name: the same each time."""
        return random.Random(f"{self.seed} {name}")  # noqa: S311 - not for secrets


#: 5 rounds: quartiles mean something, one bad round cannot move the median, and all cases
#: together take an hour and a half.
FULL = Schedule(rounds=5, seconds=1.0, warm_up=0.15, starts=3)
QUICK = Schedule(rounds=3, seconds=0.3, warm_up=0.05, starts=2)
#: For single requests: a second holds thousands, enough for a 99th percentile. Some minutes.
REQUESTS = Schedule(rounds=7, seconds=1.0, warm_up=0.3, starts=0)
REQUESTS_QUICK = Schedule(rounds=3, seconds=0.3, warm_up=0.1, starts=0)


@dataclass(frozen=True)
class Spread:
    """What several measurements of one thing came to, in the unit of the measurements."""

    min: float
    q1: float
    median: float
    q3: float
    max: float
    n: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the five-number summary of `values`; quartiles by linear interpolation.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no measurement to summarise")
    if len(values) == 1:
        q1 = median = q3 = float(values[0])
    else:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    low, q1, median, q3, high = (
        float(f"{value:.5g}") for value in (min(values), q1, median, q3, max(values))
    )
    return Spread(min=low, q1=q1, median=median, q3=q3, max=high, n=len(values))


def new_record(kind: str, schedule: Schedule, versions: dict[str, dict[str, str]]) -> Record:
    """Return a record of this machine and this code, without rows."""
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        "machine": _machine(),
        "schedule": asdict(schedule),
        "versions": versions,
        "rows": [],
    }


def save(record: Record, path: Path) -> None:
    """Write a record; the rows one a line, so that a diff shows which changed."""
    head = {key: value for key, value in record.items() if key != "rows"}
    lines = ",\n  ".join(json.dumps(row) for row in record["rows"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a result of this benchmark.
    """
    record = json.loads(path.read_text("utf-8"))
    if not isinstance(record, dict) or not {"kind", "rows"} <= record.keys():
        raise ValueError(f"{path.name} is not a result file of envbus bench")
    return record


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit of the checkout, with `+changes` if files differ from it."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603 - fixed arguments
            ["git", *arguments],  # noqa: S607 - the user's git
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=10.0,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
