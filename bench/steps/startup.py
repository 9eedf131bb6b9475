"""Seconds from construction to the end of the first reset, and memory of the process tree.

Each start is a fresh process with everything imported, so that a library's fork server, cluster
or cache is started, too. CartPole envs; memory is read after a moment of stepping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Record, Schedule, new_record, spread_of
from envbus.bench.steps.adapter_process import Memory
from envbus.bench.steps.variants import Role, Variant
from envbus.bench.steps.vector import Contender, start

__all__ = ["FULL_STARTS", "QUICK_STARTS", "StartCase", "measure_startup"]

#: Starts that last longer are done twice only, however many the schedule asks for.
SLOW_SECONDS = 15.0
SLOW_STARTS = 2
#: Seconds of stepping before memory is read: lazily imported and allocated things count.
STEPPING_SECONDS = 0.3
WORKLOAD = "cartpole"


@dataclass(frozen=True)
class StartCase:
    """How many envs, and in how many actors envbus hosts them."""

    num_envs: int
    num_actors: int

    def options(self, variant: Variant) -> dict[str, Any]:
        """Return the variant's options in this case."""
        if variant.role is Role.OURS:
            return {**variant.options, "num_actors": self.num_actors}
        return variant.options


#: The issue's two: many envs in few actors, and an actor for each env.
FULL_STARTS = (StartCase(64, 2), StartCase(16, 16))
QUICK_STARTS = (StartCase(8, 2),)


@dataclass
class _Starts:
    """What a variant's starts came to."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def wants_another(self, schedule: Schedule) -> bool:
        if self.contender.failure:
            return False
        slow = bool(self.seconds) and max(self.seconds) > SLOW_SECONDS
        return len(self.seconds) < (SLOW_STARTS if slow else schedule.starts)


def measure_startup(
    cases: Sequence[StartCase],
    variants: Sequence[Variant],
    schedule: Schedule,
    environments: Environments,
    say: Callable[[str], None] = print,
) -> Record:
    """Measure all starts; return the record with one row per case and variant."""
    rows = []
    versions: dict[str, dict[str, str]] = {}
    for case in cases:
        taking_part = [
            variant for variant in variants if variant.takes_part(WORKLOAD, case.num_envs)
        ]
        starts = {variant.name: _Starts(Contender(variant)) for variant in taking_part}
        order = schedule.order(case)
        for _ in range(schedule.starts):
            order.shuffle(taking_part)
            for variant in taking_part:
                if starts[variant.name].wants_another(schedule):
                    _start_once(starts[variant.name], case, environments)
                    say(_line(_row(case, starts[variant.name])))
        for measured in starts.values():
            if measured.contender.versions:
                versions[measured.contender.variant.library] = measured.contender.versions
            rows.append(_row(case, measured))
    record = new_record("startup", schedule, versions)
    record["rows"] = rows
    return record


def _start_once(starts: _Starts, case: StartCase, environments: Environments) -> None:
    contender = start(starts.contender.variant, WORKLOAD, case.num_envs, environments)
    with contextlib.closing(contender), contender.attempt():
        seconds = contender.open(WORKLOAD, case.num_envs, case.options(contender.variant))
        if contender.process is not None:
            if contender.variant.role is not Role.BOUND:
                contender.process.run(STEPPING_SECONDS, 0.0)
            starts.memory.append(contender.process.memory())
            starts.seconds.append(seconds)
    starts.contender = contender


def _row(case: StartCase, starts: _Starts) -> dict[str, Any]:
    variant = starts.contender.variant
    row = starts.contender.head(WORKLOAD, case.num_envs, case.options(variant))
    if starts.contender.failure or not starts.seconds:
        reason = starts.contender.failure or "was not started"
        return {**row, "status": "failed", "reason": reason}
    row["status"] = "ok"
    row["seconds"] = asdict(spread_of(starts.seconds))
    for key in ("pss", "uss", "rss"):
        megabytes = [getattr(memory, key) / 1e6 for memory in starts.memory]
        row[f"{key}_mb"] = asdict(spread_of(megabytes))
    row["processes"] = starts.memory[-1].processes
    return row


def _line(row: dict[str, Any]) -> str:
    name = f"start {row['num_envs']} envs, {row['variant']:20}"
    if row["status"] != "ok":
        return f"{name} - ({row['reason']})"
    return (
        f"{name} {row['seconds']['median']:7.2f} s, PSS {row['pss_mb']['median']:,.0f} MB, "
        f"USS {row['uss_mb']['median']:,.0f} MB, RSS {row['rss_mb']['median']:,.0f} MB, "
        f"{row['processes']} processes"
    )
