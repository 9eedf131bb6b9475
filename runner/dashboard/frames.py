"""What the page is told of runs each second, as plain data. Pure.

Rows are lists, whose columns the page names in the same order (`page/app.js`): of 1,000 processes
a frame has 100 kB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from envbus.bus.brief import cut
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.monitoring.figures import FaultFigures, PartFigures, ProcessFigures
from envbus.runner.monitoring.observer import ObservedRun

__all__ = ["Frame", "Frames", "details_of", "find_process"]

#: Looks that plots show: ten minutes, at one a second.
MOST_POINTS: Final = 600
#: Faults that the time line shows, the latest.
MOST_SHOWN_FAULTS: Final = 200
#: Characters of what is told of one.
_LONGEST_MESSAGE: Final = 500
#: Rows of a table; of more, the first.
MOST_ROWS: Final = 20_000
#: Begin of the counts that are of faults, one by cause; and other counts of faults.
_FAULTS: Final = "faults."
_FAULTY: Final = "faulty"
#: What is started again: actors, envs that were made anew, simulators that a bridge hosts.
_RESTARTS: Final = ("restarts", "env_restarts", "host_restarts")
#: What a part counts as its steps; of a bridge, actions that reached its clients.
_STEPS: Final = ("env_steps", "actions")
_TOTALS: Final = ("runs", "silent", "steps", "ready", "processes", "faults", "restarts")
#: Durations that are plotted.
_LATENCY: Final = "get_action"
#: Seconds between two looks from which on nobody has looked between them.
_PAUSE: Final = 5.0
#: A process that its run tells of, and that is not there any more.
_GONE: Final = "gone"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all runs."""

    #: Seconds since 1970.
    at: float
    #: Numbers of the page's head, by name.
    totals: dict[str, float]
    #: One of the plots' points: at, env steps/s, cores, bytes, p50 and p99 in seconds, or None.
    point: list[float | None]
    #: Process id, owner's process id, part, kind, state, ready, all, env steps/s, faults, restarts,
    #: the run's command.
    parts: list[list[Any]]
    #: Process id of the run, part, process, process id, state, first env, the one after the last,
    #: env steps/s, seconds stalled, incarnation, cores, bytes.
    processes: list[list[Any]]
    #: At, process id of the run, part, cause, process, env, message; oldest first.
    faults: list[list[Any]]


class Frames:
    """Makes frames of looks, and remembers what plots show."""

    def __init__(self) -> None:
        #: One list for each look: see `Frame.point`.
        self.points: deque[list[float | None]] = deque(maxlen=MOST_POINTS)
        #: By run and part: the durations that were counted at the look before.
        self._latencies: dict[tuple[int, str], dict[int, int]] = {}

    def make(self, runs: Sequence[ObservedRun], at: float) -> Frame:
        """Return what is told of a look.

        Args:
            runs: As `Observer.look` returns them.
            at: Seconds since 1970.
        """
        parts, processes, faults = [], [], []
        totals = dict.fromkeys(_TOTALS, 0.0)
        seen: set[int] = set()
        for run in runs:
            pid = run.figures.pid
            seen.add(pid)
            totals["runs"] += 1
            totals["silent"] += not run.answers
            for part in run.figures.parts:
                states = [_state(run, process) for process in part.processes]
                steps = _steps_of(run, part)
                numbers = _faults_of(part), _restarts_of(part)
                ready = states.count("ready")
                parts.append(
                    [
                        *(pid, run.owner, part.name, part.kind),
                        "up" if run.answers else "silent",
                        *(ready, len(states), steps, *numbers, run.figures.command),
                    ]
                )
                totals["steps"] += steps or 0.0
                totals["ready"] += ready
                totals["processes"] += len(states)
                totals["faults"] += numbers[0]
                totals["restarts"] += numbers[1]
                faults += [(fault, pid, part.name) for fault in part.faults]
                for process, state in zip(part.processes, states, strict=True):
                    processes.append(_row(run, part, process, state))
                    if process.pid is not None:
                        seen.add(process.pid)
        usage = runs[0].usage if runs else {}
        taken = [usage[pid] for pid in seen if pid in usage]
        totals["cpu"] = sum(one.cpu for one in taken)
        totals["memory"] = sum(one.memory for one in taken)
        median, slowest = self._quantiles(runs)
        point = [at, totals["steps"], totals["cpu"], totals["memory"], median, slowest]
        while self.points and (self.points[-1][0] or 0.0) >= at:  # the clock was put back
            self.points.pop()
        last = self.points[-1][0] if self.points else None
        if last is not None and at - last > _PAUSE:
            self.points.append([last + 1.0, *[None] * (len(point) - 1)])
        self.points.append(point)
        faults.sort(key=lambda told: told[0].at)
        return Frame(
            at=at,
            totals=totals,
            point=point,
            parts=parts[:MOST_ROWS],
            processes=processes[:MOST_ROWS],
            faults=[_fault_row(*told) for told in faults[-MOST_SHOWN_FAULTS:]],
        )

    def _quantiles(self, runs: Iterable[ObservedRun]) -> tuple[float | None, float | None]:
        """Return median and p99 of what bridges have answered since the look before, in seconds."""
        since, now = LatencyHistogram(), {}
        for run in runs:
            for part in run.figures.parts:
                counts = part.latencies.get(_LATENCY)
                if counts is None:
                    continue
                key = run.figures.pid, part.name
                now[key] = counts
                was = self._latencies.get(key)
                if was is not None:
                    new = {of: count - was.get(of, 0) for of, count in counts.items()}
                    since.add_counts({of: count for of, count in new.items() if count > 0})
        self._latencies = now
        return since.quantile(0.5), since.quantile(0.99)


def find_process(
    runs: Iterable[ObservedRun], pid: int, part_name: str, process_name: str
) -> tuple[ObservedRun, PartFigures, ProcessFigures | None] | None:
    """Return a run, its part and, if one is named, its process; None: it is not there."""
    for run in runs:
        for part in run.figures.parts:
            if run.figures.pid != pid or part.name != part_name:
                continue
            if not process_name:
                return run, part, None
            for process in part.processes:
                if process.name == process_name:
                    return run, part, process
    return None


def details_of(
    run: ObservedRun, part: PartFigures, process: ProcessFigures | None
) -> dict[str, Any]:
    """Return what is told of a part, or of one of its processes, that was clicked."""
    told: dict[str, Any] = {
        "command": run.figures.command,
        "version": run.figures.version,
        "answers": run.answers,
    }
    if process is not None:
        columns = _row(run, part, process, _state(run, process))
        names = ("pid", "state", "first", "end", "rate", "stalled", "incarnation", "cpu", "memory")
        told |= dict(zip(names, columns[3:], strict=True))
        told |= {"env_steps": process.env_steps, "busy": process.busy}
        faults = [fault for fault in part.faults if fault.process == process.name]
    else:
        rates = {name: rate for (of, name), rate in run.rates.items() if of == part.name}
        told |= {
            "counts": {name: [count, rates.get(name)] for name, count in part.counts.items()},
            "levels": dict(part.levels),
            "latencies": {name: _summary(counts) for name, counts in part.latencies.items()},
        }
        faults = part.faults
    rows = [_fault_row(fault, run.figures.pid, part.name) for fault in faults]
    return {**told, "faults": rows}


def _state(run: ObservedRun, process: ProcessFigures) -> str:
    """Return a process' state; its owner may not have heard yet that it is gone."""
    pid = process.pid
    if pid is not None and run.usage and pid not in run.usage and process.state != "lost":
        return _GONE
    return process.state


def _row(run: ObservedRun, part: PartFigures, process: ProcessFigures, state: str) -> list[Any]:
    key = part.name, process.name
    usage = None if process.pid is None else run.usage.get(process.pid)
    return [
        *(run.figures.pid, part.name, process.name, process.pid, state, *process.envs),
        *(run.process_rates.get(key), run.stalled.get(key, 0.0), process.incarnation),
        *((None, None) if usage is None else (usage.cpu, usage.memory)),
    ]


def _fault_row(fault: FaultFigures, pid: int, part: str) -> list[Any]:
    message = cut(fault.message, _LONGEST_MESSAGE)
    return [fault.at, pid, part, fault.cause, fault.process, fault.env, message]


def _steps_of(run: ObservedRun, part: PartFigures) -> float | None:
    """Return a part's steps per second; None: it counts none, or there was no look before."""
    rates = (run.rates.get((part.name, name)) for name in _STEPS)
    return next((rate for rate in rates if rate is not None), None)


def _faults_of(part: PartFigures) -> float:
    by_cause = sum(count for name, count in part.counts.items() if name.startswith(_FAULTS))
    return by_cause + part.counts.get(_FAULTY, 0)


def _restarts_of(part: PartFigures) -> float:
    return sum(part.counts.get(name, 0) for name in _RESTARTS)


def _summary(counts: dict[int, int]) -> list[float | None]:
    """Return number, median and p99 of durations, in seconds."""
    latency = LatencyHistogram()
    latency.add_counts(counts)
    return [float(len(latency)), latency.quantile(0.5), latency.quantile(0.99)]
