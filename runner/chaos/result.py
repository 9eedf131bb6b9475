"""What a chaos run came to, and what of it breaks a promise. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from envbus.runner.chaos.audit import Audit
from envbus.runner.chaos.leaks import Growth, ResourceSample, growth_of
from envbus.runner.chaos.messages import Result
from envbus.runner.chaos.schedule import FaultKind

__all__ = ["ChaosResult", "KindSummary", "Leftovers", "Observed", "Quantiles", "judge"]

#: Bytes per minute that memory may grow by; a page or two per restart would be more.
MEMORY_GROWTH = 1_000_000.0
#: Fields of `ResourceSample` whose growth is bounded, and by how much per minute.
GROWTHS = {
    "driver_memory": MEMORY_GROWTH,
    "driver_descriptors": 1.0,
    "server_memory": MEMORY_GROWTH,
    "server_descriptors": 1.0,
}
#: Fields that are the same when all has settled as before anything was broken.
SAME_AT_END = ("driver_descriptors", "driver_memory_files", "server_descriptors", "processes")
#: A step may well be late on a machine that is busy with other things; nothing else may fail
#: that was not broken.
EXCUSED = ", timeout: "


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of durations in seconds; None without any."""

    n: int
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, durations: Sequence[float]) -> Quantiles:
        """Return the quantiles."""
        if not durations:
            return cls(n=0, p50=None, p99=None)
        p50, p99 = np.percentile(durations, [50, 99])
        return cls(n=len(durations), p50=round(float(p50), 4), p99=round(float(p99), 4))


class KindSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kind of injection."""

    kind: str
    injected: int
    #: Not done in time: no env was free of the consequences of the one before.
    passed_over: int
    #: Envs whose episode it ended, by the cause that was reported.
    faults: dict[str, int]
    #: From the injection to the report, and to the first observation of the next life.
    told: Quantiles
    recovered: Quantiles


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What was there when the driver was gone."""

    processes: list[str]
    socket_files: list[str]
    #: Names in the folder of shared memory that were not there before. Others on this machine make
    #: some, too; `shared_by_us` are those that processes of the run had mapped.
    shared_files: list[str]
    shared_by_us: list[str]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What one driver told, and what was seen of it from outside."""

    result: Result | None
    #: Why there is no result, with the end of what it wrote to standard error.
    failure: str
    samples: list[ResourceSample]
    at_start: ResourceSample | None
    at_end: ResourceSample | None
    #: Seconds in which whoever looks on was stopped, or the machine stood still.
    stood_still: float
    left: Leftovers


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a chaos run."""

    config: dict[str, Any]
    #: Everything that breaks a promise; empty if all were kept.
    violations: list[str]
    #: What is worth a look and breaks none.
    remarks: list[str]
    injections: int
    #: Episodes that a fault ended, by the cause that was reported.
    faults: dict[str, int]
    kinds: list[KindSummary]
    #: Over all kinds.
    told: Quantiles
    recovered: Quantiles
    env_steps: int
    actor_restarts: int
    env_restarts: int
    #: Actors that were exchanged between episodes.
    recycled: int
    env_steps_per_second: float
    calm_env_steps_per_second: float
    growths: dict[str, Growth]
    at_start: ResourceSample | None
    at_end: ResourceSample | None
    left: Leftovers


def judge(
    config: dict[str, Any], calm: Observed, broken: Observed, audits: Sequence[Audit]
) -> ChaosResult:
    """Return the result of a chaos run.

    Args:
        config: What was run.
        calm: The same pool while nothing was broken.
        broken: The run itself.
        audits: What the audit of each env found; none if the run failed.
    """
    found = [str(violation) for audit in audits for violation in audit.violations]
    for label, observed in (("calm run", calm), ("chaos run", broken)):
        found += (f"{label}: {text}" for text in _violations(observed))
    result = broken.result
    if result is not None:
        found += _unmatched_recyclings(config, result, audits)
    kinds = [] if result is None else _summaries(result)
    reports = [] if result is None else list(result.kinds.values())
    growths = {f: growth_of(broken.samples, f) for f in GROWTHS} if broken.samples else {}
    for field, growth in growths.items():
        if growth.per_minute is not None and growth.per_minute > GROWTHS[field]:
            found.append(f"{field} grows by {growth.per_minute:,.1f} per minute")
    return ChaosResult(
        config=config,
        violations=found,
        remarks=_remarks(calm, broken),
        injections=sum(kind.injected for kind in kinds),
        faults={} if result is None else result.counted,
        kinds=kinds,
        told=Quantiles.of([value for report in reports for value in report.told]),
        recovered=Quantiles.of([value for report in reports for value in report.recovered]),
        env_steps=0 if result is None else result.env_steps,
        actor_restarts=0 if result is None else result.actor_restarts,
        env_restarts=0 if result is None else result.env_restarts,
        recycled=0 if result is None else result.recycled,
        env_steps_per_second=_rate(result),
        calm_env_steps_per_second=_rate(calm.result),
        growths=growths,
        at_start=broken.at_start,
        at_end=broken.at_end,
        left=broken.left,
    )


def _violations(observed: Observed) -> Iterator[str]:
    if observed.failure:
        yield observed.failure
    left = observed.left
    for process in left.processes:
        yield f"left behind: process {process}"
    for name in left.socket_files:
        yield f"left behind: socket file {name}"
    for name in left.shared_files:
        if name in left.shared_by_us:
            yield f"left behind: shared memory {name}"
    result = observed.result
    if result is None:
        return
    if not result.settled:
        yield "envs did not come back at the end"
    for text in result.unexplained:
        if EXCUSED not in text:
            yield f"a fault for which nothing was broken: {text}"
    for text in result.unnoticed:
        yield f"nothing was reported of: {text}"
    told = len(result.unexplained) + sum(sum(k.faults.values()) for k in result.kinds.values())
    counted = sum(result.counted.values())
    if told != counted:
        yield f"{told} faults were told, and {counted} counted by statistics()"
    start, end = observed.at_start, observed.at_end
    if start is None or end is None:
        yield "the driver could not be looked at"
        return
    for field in SAME_AT_END:
        before, after = getattr(start, field), getattr(end, field)
        if before != after:
            yield f"{field.replace('_', ' ')}: {before} at the start, {after} at the end"
    if end.zombies:
        yield f"{end.zombies} zombies at the end"


def _unmatched_recyclings(
    config: dict[str, Any], result: Result, audits: Sequence[Audit]
) -> Iterator[str]:
    """A life may end without a fault only where an actor was recycled, with all of its envs."""
    seen = sum(audit.recycled for audit in audits)
    envs, actors = config["num_envs"], config["num_actors"]
    least, most = envs // actors, math.ceil(envs / actors)
    if not least * result.recycled <= seen <= most * result.recycled:
        yield f"{result.recycled} actors were recycled, and {seen} lives ended without a fault"


def _remarks(calm: Observed, broken: Observed) -> list[str]:
    remarks = []
    for label, observed in (("calm run", calm), ("chaos run", broken)):
        if observed.stood_still:
            remarks.append(f"{label}: all stood still for {observed.stood_still:g} s")
        for name in observed.left.shared_files:
            if name not in observed.left.shared_by_us:
                remarks.append(f"{label}: shared memory {name} appeared, of another program")
        if observed.result is not None:
            remarks += (
                f"{label}: a fault for which nothing was broken: {text}"
                for text in observed.result.unexplained
                if EXCUSED in text
            )
    return remarks


def _summaries(result: Result) -> list[KindSummary]:
    return [
        KindSummary(
            kind=FaultKind[name].value,
            injected=report.injected,
            passed_over=report.passed_over,
            faults=report.faults,
            told=Quantiles.of(report.told),
            recovered=Quantiles.of(report.recovered),
        )
        for name, report in result.kinds.items()
    ]


def _rate(result: Result | None) -> float:
    return 0.0 if result is None else round(result.env_steps / result.seconds, 1)
