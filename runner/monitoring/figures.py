"""What is told of a run: counts, processes and faults of its parts, as plain data. Pure.

Counts only grow. They are read by whoever wants to know, at most once a second, and nobody counts
for their sake what is not counted anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from envbus.bus.brief import printable
from envbus.runner.batches.latency import BUCKETS

__all__ = [
    "MOST_FAULTS",
    "EpisodeFigures",
    "EpisodesFigures",
    "FaultFigures",
    "PartFigures",
    "PictureFigures",
    "ProcessFigures",
    "RunFigures",
    "fault_figures",
    "figures_of",
    "rates",
]

#: Faults that a part remembers, the latest.
MOST_FAULTS: Final = 100
#: Ends of the names of what may also fall.
_NOW: Final = ("_now", "_ready", "_waiting", "_flight")
#: What is no count, though its name does not say so.
_LEVELS: Final = frozenset({"actors", "workers", "in_flight", "largest_batch", "version"})


# Of another user's run nothing else is read: it could end whoever looks at it.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Env = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
_Bucket = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
#: Seconds since 1970, up to the year 9999 in any time zone.
_Time = Annotated[float, msgspec.Meta(ge=0.0, lt=253402200000.0)]


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process that a part owns."""

    name: str
    #: None: none runs, or it runs on another host.
    pid: _Count | None
    #: "starting", "building", "built", "ready", "leaving", "down" or "lost".
    state: str
    #: Which life of it.
    incarnation: _Count = 0
    #: Ids of its envs: the first, and the one after the last; (0, 0): it hosts none.
    envs: tuple[_Count, _Count] = (0, 0)
    #: Env steps that it was asked for, in all its lives.
    env_steps: _Count = 0
    #: Whether it was asked for something that it has not answered.
    busy: bool = False


class FaultFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An env or a process that failed."""

    at: _Time
    #: "error", "crash", "timeout", "memory", "request" or "lost".
    cause: str
    #: Which process, or which one's env.
    process: str
    #: Which env; -1: all of the process.
    env: _Env
    #: In one line.
    message: str


def fault_figures(at: float, cause: str, process: str, message: str, env: int = -1) -> FaultFigures:
    """Return what is told of a fault; of the message, the first line."""
    first = message.partition("\n")[0]
    return FaultFigures(at=at, cause=cause, process=process, env=env, message=printable(first))


class PartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, a vector env, a runner, a group, policy workers, a bridge or a server."""

    #: Its class, and which of that class in its process: "ActorPool-1".
    name: str
    #: Its class.
    kind: str
    #: What only grows, by name.
    counts: dict[str, float] = {}
    #: What may also fall, by name.
    levels: dict[str, float] = {}
    #: Durations in the buckets of a `LatencyHistogram`, by name.
    latencies: dict[str, dict[_Bucket, _Count]] = {}
    processes: list[ProcessFigures] = []
    #: The latest, oldest first.
    faults: list[FaultFigures] = []
    #: Whether processes that end are started again.
    restarts: bool = False


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of one process."""

    pid: _Count
    #: Of these figures, and of the process' first part.
    at: _Time
    began: _Time
    #: Its command line, in short.
    command: str
    #: Of envbus.
    version: str
    parts: list[PartFigures] = []


class PictureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The last observation of an env."""

    #: Empty: there is no such env, or its observation is no picture.
    png: bytes = b""


class EpisodeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An open episode of a bridge."""

    episode_id: str
    #: Name of its client; whether that is there, and does not only keep its place.
    client: str
    is_there: bool
    #: Whether it waits for an action.
    waits: bool
    #: Records that the runner was not shown yet.
    queued: _Count
    #: How often its client has called each verb, by name.
    calls: dict[str, _Count]


class EpisodesFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The open episodes of a bridge."""

    episodes: list[EpisodeFigures] = []


def figures_of(statistics: msgspec.Struct) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a struct of statistics says as counts and as levels.

    Mappings of numbers become one number per key: `faults` with `{"crash": 3}` is `faults.crash`.
    """
    counts: dict[str, float] = {}
    levels: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(statistics).items():
        numbers = (
            {f"{name}.{key}": number for key, number in value.items()}
            if isinstance(value, Mapping)
            else {name: value}
        )
        is_level = name.endswith(_NOW) or name in _LEVELS
        for key, number in numbers.items():
            if isinstance(number, int | float):
                (levels if is_level else counts)[key] = number
    return counts, levels


def rates(before: RunFigures, now: RunFigures) -> dict[tuple[str, str], float]:
    """Return by part and count how much it has grown per second between two looks.

    A part that is new, or a count that has begun anew, has none.
    """
    seconds = now.at - before.at
    if seconds <= 0.0 or now.began != before.began:
        return {}
    known = {part.name: part.counts for part in before.parts}
    return {
        (part.name, name): (count - was) / seconds
        for part in now.parts
        for name, count in part.counts.items()
        if (was := known.get(part.name, {}).get(name)) is not None and count >= was
    }
