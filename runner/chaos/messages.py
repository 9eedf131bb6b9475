"""What the two processes of a chaos run tell each other, one JSON object per line."""

from __future__ import annotations

import msgspec

__all__ = ["MARK", "ChaosProgress", "DriverConfig", "KindReport", "Line", "Result"]

#: Variable in the environment of the driver and all that it starts; its value is the run's own.
MARK = "ENVBUS_CHAOS_RUN"


class DriverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver runs."""

    folder: str
    seconds: float
    seed: int
    num_envs: int
    num_actors: int
    local_links: bool = True
    shared_memory: bool = True
    #: Deadline of a step, and what it sleeps, in seconds.
    step_timeout: float = 1.0
    step_seconds: float = 0.0005
    #: Without: the same pool, and nothing is broken.
    chaos: bool = True


class ChaosProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the driver is."""

    seconds: float
    env_steps: int
    injections: int
    faults: int
    #: Envs that failed and do not work yet.
    recovering: int


class KindReport(msgspec.Struct, kw_only=True):
    """What became of one kind of injection. Durations in seconds since the injection."""

    injected: int = 0
    #: Not done in time: no env was free of the consequences of the one before.
    passed_over: int = 0
    #: Faults that were reported of it, by cause; one per env of the actor.
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    #: Until the fault was reported.
    told: list[float] = msgspec.field(default_factory=list)
    #: Until the first observation of the env's next life.
    recovered: list[float] = msgspec.field(default_factory=list)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver saw, besides what is in its journal."""

    #: Of stepping, without start and end.
    seconds: float
    env_steps: int
    kinds: dict[str, KindReport]
    #: Faults for which nothing was broken, as text.
    unexplained: list[str]
    #: Injections of which no fault came, as text.
    unnoticed: list[str]
    #: `ActorPool.statistics().faults`, and actors and envs started again.
    counted: dict[str, int]
    actor_restarts: int
    env_restarts: int
    #: Actors that were exchanged between episodes.
    recycled: int
    #: Whether all envs had answered when the driver gave up waiting.
    settled: bool


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the driver; one of its fields is set."""

    #: All envs have answered once: endpoints of its bus for strangers.
    ready: list[str] | None = None
    progress: ChaosProgress | None = None
    #: Stop this process, and let it go on so many seconds later.
    freeze: float | None = None
    #: A stranger of this kind is to call.
    stranger: int | None = None
    #: All envs have answered, and nothing more is asked. It waits for a line to go on.
    settled: bool | None = None
    result: Result | None = None
