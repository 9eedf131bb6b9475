"""Result files: what was measured, with what, on what, when. No host name and no path."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from envbus.bench.cases import Schedule

__all__ = ["Record", "load", "new_record", "save"]

#: A result as it stands in its JSON file. Keys: `kind`, `date`, `commit`, `machine`,
#: `schedule`, `versions` (by library) and `rows`; the rows' keys depend on `kind`.
Record: TypeAlias = dict[str, Any]


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
        return subprocess.run(  # noqa: S603
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
