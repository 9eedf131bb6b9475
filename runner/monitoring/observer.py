"""Looks at runs again and again, and says what has changed between two looks.

Leaves out how often, and how it looks to people (`envbus.runner.cli`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import psutil

from envbus.bus.brief import printable
from envbus.runner.monitoring.figures import ProcessFigures, RunFigures, rates
from envbus.runner.monitoring.runs import RunAddress, Usage, UsageReader, ask, find_runs

__all__ = ["ObservedRun", "Observer"]

#: Runs that are asked at one time.
_MOST_QUESTIONS: Final = 32
#: Parents that are followed from a process to the run that has started it.
_MOST_PARENTS: Final = 16


@dataclass
class ObservedRun:
    """One run at one look.

    Attributes:
        figures: What it told last.
        owner: Process id of the run that has started it, as a group does its runners; its own, if
            nobody has.
        answers: Whether it has answered this time.
        rates: By part and count, per second.
        process_rates: By part and process, env steps per second.
        stalled: By part and process, seconds for which it has been busy without a step.
        usage: By process id.
    """

    figures: RunFigures
    owner: int
    answers: bool = True
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    process_rates: dict[tuple[str, str], float] = field(default_factory=dict)
    stalled: dict[tuple[str, str], float] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)


class Observer:
    """Remembers the look before.

    Args:
        root: Only this run, and those that it has started; None: all of this user.
        find: Returns the runs of this host.
        ask: Returns what one of them tells.
    """

    def __init__(
        self,
        root: int | None = None,
        *,
        find: Callable[[], list[RunAddress]] = find_runs,
        ask: Callable[[RunAddress], RunFigures | None] = ask,
    ) -> None:
        self._root = root
        self._find = find
        self._ask = ask
        self._usage = UsageReader()
        self._before: dict[RunAddress, ObservedRun] = {}
        #: Since when a process has been busy, with how many steps; by the begin of its run, too:
        #: another one may get its process id.
        self._busy_since: dict[tuple[int, float, str, str], tuple[float, int]] = {}

    def look(self) -> list[ObservedRun]:
        """Return the runs, those that were started by another one after that.

        Raises:
            EnvbusError: Nobody can look on this system.
        """
        addresses = self._find()
        pids = {address.pid for address in addresses}
        owners = {address: _owner_of(address.pid, pids) for address in addresses}
        if self._root is not None:
            owners = {
                address: owner
                for address, owner in owners.items()
                if self._root in (address.pid, owner)
            }
        seen: dict[RunAddress, ObservedRun] = {}
        for (address, owner), figures in zip(owners.items(), self._told(owners), strict=True):
            before = self._before.get(address)
            if figures is not None:
                seen[address] = self._compare(before, figures, owner)
            elif before is not None:  # stopped, or at work without a pause
                before.answers = False
                seen[address] = before
            elif (silent := _silent(address.pid)) is not None:
                seen[address] = ObservedRun(silent, owner, answers=False)
        self._before = seen
        known = {(observed.figures.pid, observed.figures.began) for observed in seen.values()}
        self._busy_since = {
            key: since for key, since in self._busy_since.items() if key[:2] in known
        }
        wanted = {
            process.pid
            for observed in seen.values()
            for part in observed.figures.parts
            for process in part.processes
            if process.pid is not None
        }
        usage = self._usage.read(wanted | {observed.figures.pid for observed in seen.values()})
        for observed in seen.values():
            observed.usage = usage
        return sorted(seen.values(), key=_place)

    def _told(self, addresses: Collection[RunAddress]) -> Iterable[RunFigures | None]:
        if len(addresses) < 2:
            return map(self._ask, addresses)
        # At one time: each that is stopped, or holds its interpreter, takes seconds.
        with ThreadPoolExecutor(min(len(addresses), _MOST_QUESTIONS)) as threads:
            return list(threads.map(self._ask, addresses))

    def _compare(self, before: ObservedRun | None, now: RunFigures, owner: int) -> ObservedRun:
        observed = ObservedRun(now, owner)
        if before is not None:
            observed.rates = rates(before.figures, now)
        known = {}
        if before is not None and before.figures.began == now.began:
            known = {
                (part.name, process.name): process.env_steps
                for part in before.figures.parts
                for process in part.processes
            }
        seconds = 0.0 if before is None else now.at - before.figures.at
        for part in now.parts:
            for process in part.processes:
                key = part.name, process.name
                was = known.get(key)
                if was is not None and seconds > 0.0 and process.env_steps >= was:
                    observed.process_rates[key] = (process.env_steps - was) / seconds
                stalled = self._stalled(now, part.name, process)
                if stalled > 0.0:
                    observed.stalled[key] = stalled
        return observed

    def _stalled(self, run: RunFigures, part: str, process: ProcessFigures) -> float:
        key = run.pid, run.began, part, process.name
        if not process.busy:
            self._busy_since.pop(key, None)
            return 0.0
        since, steps = self._busy_since.get(key, (run.at, process.env_steps))
        if steps != process.env_steps or run.at < since:  # or the clock was put back
            since = run.at
        self._busy_since[key] = since, process.env_steps
        return run.at - since


def _silent(pid: int) -> RunFigures | None:
    """Return what is known of a run that has never answered; None: it has ended."""
    try:
        process = psutil.Process(pid)
        command, began = printable(" ".join(process.cmdline())), process.create_time()
    except psutil.Error:
        return None
    return RunFigures(pid=pid, at=began, began=began, command=command, version="")


def _place(run: ObservedRun) -> tuple[int, bool, int]:
    pid = run.figures.pid
    return run.owner, run.owner != pid, pid


def _owner_of(pid: int, runs: set[int]) -> int:
    """Return the first of `runs` that a process has descended from; its own id, if none is."""
    owner = parent = pid
    for _ in range(_MOST_PARENTS):
        try:
            parent = psutil.Process(parent).ppid()
        except psutil.Error:
            break
        if parent in runs:
            owner = parent
    return owner
