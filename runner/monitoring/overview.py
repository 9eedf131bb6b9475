"""What a window shows of runs: rows of runs, parts and processes, and what comes first. Pure.

Leaves out where runs come from (`observer.py`), and what draws the rows (`envbus.runner.cli`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgspec

from envbus.bus.brief import printable
from envbus.runner.monitoring.figures import FaultFigures, PartFigures, ProcessFigures
from envbus.runner.monitoring.observer import ObservedRun

__all__ = [
    "COLUMNS",
    "HUNG_AFTER",
    "Overview",
    "OverviewRow",
    "RowKey",
    "as_data",
    "hung_processes",
    "overview_of",
]

#: Seconds without a step, while one is awaited, after which a process counts as one that hangs.
HUNG_AFTER: Final = 1.0
#: The titles of a row's cells, each with whether it is a number.
COLUMNS: Final = (
    ("process", False),
    ("state", False),
    ("envs", True),
    ("env steps/s", True),
    ("stalled s", True),
    ("restarts", True),
    ("CPU", True),
    ("memory", True),
    ("pid", True),
)
#: Characters of a name.
_LONGEST_NAME: Final = 40
#: Rates that differ by less than this factor count as equal in the order of rows.
_CLOSE: Final = 1.5
#: Names of counts that are shown as env steps of a part without processes.
_STEPS: Final = ("env_steps", "actions", "rows")
_READY: Final = "ready"


class RowKey(NamedTuple):
    """Whose row it is. Without a process it is a part's, without a part a run's."""

    run: int
    part: str = ""
    process: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverviewRow:
    """One run, part or process."""

    key: RowKey
    #: How many rows it stands below.
    depth: int
    name: str
    state: str
    envs: str = ""
    #: Env steps per second; None: not known.
    rate: float | None = None
    #: Seconds.
    stalled: float = 0.0
    restarts: int | None = None
    #: Cores.
    cpu: float | None = None
    #: Bytes.
    memory: int | None = None
    pid: int | None = None
    #: The line that it hangs at.
    line: str = ""
    is_hung: bool = False
    #: Whether all is as it should be.
    is_well: bool = True

    def cells(self) -> tuple[str, ...]:
        """Return the texts of `COLUMNS`."""
        # Runs may be other users', and their words are for a terminal.
        name, state, line = printable(self.name), printable(self.state), printable(self.line)
        short = name[: _LONGEST_NAME - 1] + "…" * (len(name) >= _LONGEST_NAME)
        return (
            f"{'  ' * self.depth}{short}",
            f"{state} at {line}" if line else state,
            self.envs,
            _number(self.rate),
            f"{self.stalled:.1f}" if self.stalled > 0.0 else "",
            "" if self.restarts is None else f"{self.restarts:,}",
            "" if self.cpu is None else f"{100 * self.cpu:.0f}%",
            "" if self.memory is None else f"{self.memory / 2**20:,.0f} MiB",
            "" if self.pid is None else str(self.pid),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """All that is shown at one time."""

    #: Runs with what hangs first, parts and processes so too, then the slowest.
    rows: list[OverviewRow] = field(default_factory=list)
    runs: int = 0
    processes: int = 0
    hung: int = 0
    #: Env steps per second of all envs.
    rate: float = 0.0
    #: Since the begin of the runs.
    faults: int = 0
    #: The latest, newest first, each with its run's process id and its part's name.
    latest: list[tuple[int, str, FaultFigures]] = field(default_factory=list)

    def headline(self) -> str:
        """Return the numbers of all runs together."""
        hung = f" ({self.hung:,} hung)" if self.hung else ""
        return (
            f"runs {self.runs:,}   processes {self.processes:,}{hung}   "
            f"env steps/s {_number(self.rate)}   faults {self.faults:,}"
        )


def overview_of(
    runs: Sequence[ObservedRun], lines: Mapping[int, str] | None = None, wanted: str = ""
) -> Overview:
    """Return what is to be shown.

    Args:
        runs: As `Observer.look` returns them.
        lines: By process id: where it hangs.
        wanted: Only rows that have this in a text, whatever its case; with those above and below.
    """
    processes = [
        process for run in runs for part in run.figures.parts for process in part.processes
    ]
    faults = [
        (run.figures.pid, part.name, fault)
        for run in runs
        for part in run.figures.parts
        for fault in part.faults
    ]
    faults.sort(key=lambda told: -told[2].at)
    groups: dict[int, list[_Branch]] = {}
    for run in runs:
        groups.setdefault(run.owner, []).append(_branch_of_run(run, lines or {}))
    ordered = []
    for owner, group in groups.items():
        first, *others = sorted(group, key=lambda branch: branch.row.key.run != owner)
        if first.row.key.run == owner:
            below = [*first.below, *map(_deeper, _in_order(others))]
            ordered.append(_Branch(first.row, below, any(one.is_hung for one in group)))
        else:  # its owner does not answer yet
            ordered += [first, *others]
    found = (_chosen(branch, wanted.casefold()) for branch in _in_order(ordered))
    return Overview(
        rows=[row for branch in found if branch is not None for row in branch.rows()],
        runs=len(runs),
        processes=len(processes),
        hung=sum(stalled > HUNG_AFTER for run in runs for stalled in run.stalled.values()),
        rate=sum(rate for run in runs for rate in run.process_rates.values()),
        faults=sum(_count_faults(part) for run in runs for part in run.figures.parts),
        latest=faults,
    )


def hung_processes(runs: Iterable[ObservedRun]) -> dict[int, float]:
    """Return by process id for how many seconds processes have hung; not the runs themselves."""
    return {
        process.pid: stalled
        for run in runs
        for part in run.figures.parts
        for process in part.processes
        if process.pid is not None
        and process.pid != run.figures.pid
        and (stalled := run.stalled.get((part.name, process.name), 0.0)) > HUNG_AFTER
    }


def as_data(
    runs: Sequence[ObservedRun], lines: Mapping[int, str] | None = None
) -> list[dict[str, Any]]:
    """Return runs as plain data: their figures, with what was seen between two looks beside it."""
    told = []
    for run in runs:
        data = msgspec.to_builtins(run.figures)
        cpu, memory = _usage(run, run.figures.pid)
        data |= {
            "owner": run.owner,
            "answers": run.answers,
            "cpu_cores": cpu,
            "memory_bytes": memory,
        }
        for part in data["parts"]:
            own = part["name"]
            part["rates"] = {name: rate for (of, name), rate in run.rates.items() if of == own}
            for process in part["processes"]:
                key, pid = (own, process["name"]), process["pid"]
                stalled = run.stalled.get(key, 0.0)
                cpu, memory = _usage(run, pid)
                process |= {
                    "env_steps_per_second": run.process_rates.get(key),
                    "stalled_seconds": stalled,
                    "hung": stalled > HUNG_AFTER,
                    "at": (lines or {}).get(pid, ""),
                    "cpu_cores": cpu,
                    "memory_bytes": memory,
                }
        told.append(data)
    return told


# --- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Branch:
    """A row and those below it."""

    row: OverviewRow
    below: list[_Branch]
    is_hung: bool

    def rows(self) -> Iterator[OverviewRow]:
        yield self.row
        for branch in self.below:
            yield from branch.rows()


def _branch_of_run(run: ObservedRun, lines: Mapping[int, str]) -> _Branch:
    pid = run.figures.pid
    parts = _in_order([_branch_of_part(run, part, lines) for part in run.figures.parts])
    cpu, memory = _usage(run, pid)
    row = OverviewRow(
        key=RowKey(pid),
        depth=0,
        name=run.figures.command,
        state="" if run.answers else "no answer",
        rate=sum(run.process_rates.values()) if run.process_rates else None,
        cpu=cpu,
        memory=memory,
        pid=pid,
        is_well=run.answers,
    )
    return _Branch(row, parts, any(part.is_hung for part in parts))


def _branch_of_part(run: ObservedRun, part: PartFigures, lines: Mapping[int, str]) -> _Branch:
    rows = [_row_of_process(run, part, process, lines) for process in part.processes]
    numbers = [process.envs[1] - process.envs[0] for process in part.processes]
    haste = [_haste(row, number) for row, number in zip(rows, numbers, strict=True)]
    ordered = [rows[place] for place in sorted(range(len(rows)), key=haste.__getitem__)]
    hung = sum(row.is_hung for row in rows)
    ready = sum(process.state == _READY for process in part.processes)
    state = f"{ready:,}/{len(rows):,} ready" if rows else ""
    rates = [row.rate for row in rows if row.rate is not None]
    known = (run.rates.get((part.name, name)) for name in _STEPS if name in part.counts)
    row = OverviewRow(
        key=RowKey(run.figures.pid, part.name),
        depth=1,
        name=part.name,
        state=f"{state}, {hung:,} hung" if hung else state,
        envs=f"{part.levels['envs']:,.0f}" if "envs" in part.levels else "",
        rate=sum(rates) if any(rates) else next(known, None),
        restarts=sum(row.restarts or 0 for row in rows) if rows else None,
        is_well=ready == len(rows),
    )
    return _Branch(row, [_Branch(below, [], below.is_hung) for below in ordered], hung > 0)


def _row_of_process(
    run: ObservedRun, part: PartFigures, process: ProcessFigures, lines: Mapping[int, str]
) -> OverviewRow:
    stalled = run.stalled.get((part.name, process.name), 0.0)
    is_hung = stalled > HUNG_AFTER
    cpu, memory = _usage(run, process.pid)
    first, end = process.envs
    hosted = str(first) if end == first + 1 else f"{first}-{end - 1}"
    return OverviewRow(
        key=RowKey(run.figures.pid, part.name, process.name),
        depth=2,
        name=process.name,
        state="hung" if is_hung else process.state,
        envs=hosted if end > first else "",
        rate=run.process_rates.get((part.name, process.name)) if end > first else None,
        stalled=stalled,
        restarts=process.incarnation,
        cpu=cpu,
        memory=memory,
        pid=process.pid,
        line=lines.get(process.pid, "") if is_hung and process.pid is not None else "",
        is_hung=is_hung,
        is_well=process.state == _READY and not is_hung,
    )


def _usage(run: ObservedRun, pid: int | None) -> tuple[float | None, int | None]:
    usage = None if pid is None else run.usage.get(pid)
    return (None, None) if usage is None else (usage.cpu, usage.memory)


def _haste(row: OverviewRow, num_envs: int) -> tuple[bool, float, bool, float]:
    """Return by what processes are ordered: the hung, those that are not ready, the slowest.

    Steps are compared by env, and roughly, or rows would change places all the time.
    """
    pace = math.inf  # not known: last
    if row.rate is not None and row.rate < math.inf:
        by_env = row.rate / max(num_envs, 1)
        pace = math.floor(math.log(by_env, _CLOSE)) if by_env > 0.0 else -math.inf
    return not row.is_hung, -row.stalled if row.is_hung else 0.0, row.is_well, pace


def _in_order(branches: Sequence[_Branch]) -> list[_Branch]:
    """Return those with something that hangs first, all others as they come."""
    return sorted(branches, key=lambda branch: not branch.is_hung)


def _deeper(branch: _Branch) -> _Branch:
    row = replace(branch.row, depth=branch.row.depth + 1)
    return _Branch(row, [_deeper(below) for below in branch.below], branch.is_hung)


def _chosen(branch: _Branch, wanted: str) -> _Branch | None:
    """Return what is left of a branch where only some rows are wanted; None: nothing."""
    if not wanted or any(wanted in text.casefold() for text in branch.row.cells()):
        return branch
    below = [found for one in branch.below if (found := _chosen(one, wanted)) is not None]
    return _Branch(branch.row, below, branch.is_hung) if below else None


def _count_faults(part: PartFigures) -> int:
    """Return how many there were; of parts that do not count them, how many are remembered."""
    counts = [int(count) for name, count in part.counts.items() if name.startswith("faults.")]
    return sum(counts) if counts else len(part.faults)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10.0 or value == 0.0 else f"{value:.1f}"
