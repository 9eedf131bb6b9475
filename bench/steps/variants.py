"""What is compared: each library in the ways that its users run it, and the bounds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BASELINE",
    "BLOCKING_FLOOR",
    "FLOOR",
    "OURS",
    "OURS_BLOCKING",
    "SPINNING",
    "SYNC",
    "VARIANTS",
    "Role",
    "Variant",
    "variants_named",
]


class Role(enum.Enum):
    """In which comparison a variant counts."""

    #: envbus.
    OURS = "ours"
    #: A library that steps envs in other processes and blocks while it waits.
    PEER = "peer"
    #: A library that does so and spins on flags: it burns a core per process while it waits.
    SPINNING = "spinning"
    #: First-come batches: another contract than lockstep, shown beside it.
    FIRST_COME = "first_come"
    #: Everything in the caller's process: nothing is parallel and nothing is isolated.
    IN_PROCESS = "in_process"
    #: Not a library: what the machine could do.
    BOUND = "bound"


@dataclass(frozen=True)
class Variant:
    """One row of the tables."""

    name: str
    label: str
    role: Role
    #: Key of `environments.LIBRARIES`.
    library: str
    #: Module below `adapters/`.
    adapter: str
    options: dict[str, Any] = field(default_factory=dict)
    #: More envs than this are not tried, for the reason given.
    max_envs: int | None = None
    max_envs_reason: str = ""
    #: Fewer envs than this leave it no work to share; then it would equal another variant.
    min_envs: int = 1
    #: Only for these workloads; empty: for all.
    workloads: tuple[str, ...] = ()
    #: Workloads that it cannot do, and why.
    cannot: Mapping[str, str] = field(default_factory=dict)
    #: Not part of the step benchmark, only of start-up; or the other way round.
    startup_only: bool = False
    steps_only: bool = False

    def takes_part(self, workload: str, num_envs: int) -> bool:
        """Whether this variant is meant for a workload and a number of envs."""
        return num_envs >= self.min_envs and (not self.workloads or workload in self.workloads)

    def left_out(self, workload: str, num_envs: int) -> str | None:
        """Return why this variant is not run in a case, or None if it is."""
        if workload in self.cannot:
            return self.cannot[workload]
        if self.max_envs is not None and num_envs > self.max_envs:
            return self.max_envs_reason
        return None


#: Row that the issue's ratios refer to.
BASELINE = "gym_async_shm"
#: Row that is meant by "envbus".
OURS = "envbus_shm"
#: Rows that other targets refer to: one process, a worker that spins, and nearly no layers.
SYNC, SPINNING, FLOOR = "gym_sync", "puffer_w1", "floor"
#: With one process beside the caller's, as PufferLib with one worker.
OURS_ONE_ACTOR = "envbus_one"
#: Both without looking before they sleep.
OURS_BLOCKING, BLOCKING_FLOOR = "envbus_block", "floor_block"

_WAITING = ("jitter",)
_FLOOR_CANNOT = {
    "dict": "has one array of observations",
    "infos": "has no infos",
    "short": "has no infos, so no last observations of episodes",
    "jitter": "has two processes, and envs that wait want one each",
}


def _ours(name: str, label: str, adapter: str = "envbus_vector", **fields: Any) -> Variant:
    """Return a variant of `BusVectorEnv`, or of a pool."""
    options = {"num_actors": "auto", **fields.pop("options", {})}
    if adapter == "envbus_vector":
        options = {"shared_memory": True, **options}
    role = fields.pop("role", Role.OURS)
    return Variant(name, f"envbus {label}", role, "envbus", adapter, options, **fields)


def _gymnasium(name: str, label: str, role: Role, **options: Any) -> Variant:
    return Variant(name, f"Gymnasium {label}", role, "gymnasium", "gymnasium_vector", options)


def _bound(name: str, label: str, adapter: str, options: dict[str, Any], **fields: Any) -> Variant:
    return Variant(name, label, Role.BOUND, "gymnasium", adapter, options, **fields)


def _puffer(workers: int, label: str) -> Variant:
    return Variant(
        f"puffer_w{workers}",
        f"PufferLib Multiprocessing, {label}",
        Role.SPINNING,
        "pufferlib",
        "puffer",
        {"num_workers": workers},
        min_envs=workers,
    )


_VARIANTS = (
    _ours("envbus_shm", "BusVectorEnv"),
    _ours(
        "envbus_one",
        "BusVectorEnv, 1 actor",
        options={"num_actors": 1},
        min_envs=2,
        workloads=("null", "cartpole", "pixels", "dict", "infos", "short"),
        steps_only=True,
    ),
    _ours("envbus_router", "BusVectorEnv, ROUTER/DEALER only", options={"local_links": False}),
    _ours("envbus_frames", "BusVectorEnv, no shared memory", options={"shared_memory": False}),
    _ours(
        "envbus_block",
        "BusVectorEnv, wait='block'",
        options={"wait": "block"},
        workloads=("null", "cartpole", "pixels"),
        steps_only=True,
    ),
    _ours(
        "envbus_watched",
        "BusVectorEnv, looked at each second",
        options={"watched": True},
        workloads=("null", "cartpole", "pixels"),
        steps_only=True,
    ),
    _gymnasium("gym_async_shm", "AsyncVectorEnv", Role.PEER, kind="async", shared_memory=True),
    _gymnasium(
        "gym_async_pipe",
        "AsyncVectorEnv, no shared memory",
        Role.PEER,
        kind="async",
        shared_memory=False,
    ),
    Variant(
        "sb3_subproc",
        "Stable-Baselines3 SubprocVecEnv",
        Role.PEER,
        "sb3",
        "sb3",
        {"start_method": "fork"},
    ),
    Variant(
        "sb3_subproc_default",
        "Stable-Baselines3 SubprocVecEnv, its default start method",
        Role.PEER,
        "sb3",
        "sb3",
        {"start_method": None},
        startup_only=True,
    ),
    Variant("tianshou_shmem", "Tianshou ShmemVectorEnv", Role.PEER, "tianshou", "tianshou"),
    Variant(
        "tianshou_first",
        "Tianshou ShmemVectorEnv, wait_num=1",
        Role.FIRST_COME,
        "tianshou",
        "tianshou",
        {"wait_num": 1},
        workloads=_WAITING,
    ),
    _ours(
        "envbus_pool",
        "ActorPool, min_envs=1",
        "envbus_pool",
        options={"num_actors": "num_envs"},
        role=Role.FIRST_COME,
        workloads=_WAITING,
    ),
    _ours(
        "envbus_pool_cores",
        "ActorPool, an actor per core, min_envs=1",
        "envbus_pool",
        role=Role.FIRST_COME,
        workloads=("null",),
        steps_only=True,
    ),
    Variant(
        "ray_actors",
        "Ray actors, as RLlib's RemoteVectorEnv",
        Role.PEER,
        "ray",
        "ray_actors",
        max_envs=64,
        max_envs_reason="one Ray worker per env: over 64 start for minutes and fill the memory",
    ),
    _puffer(1, "1 worker (spins)"),
    _puffer(2, "2 workers (spin)"),
    _gymnasium("gym_sync", "SyncVectorEnv (one process)", Role.IN_PROCESS, kind="sync"),
    _bound("loop", "plain loop in one process", "in_process", {"processes": 1}),
    _bound(
        "independent_2",
        "2 independent processes, plain loops",
        "in_process",
        {"processes": 2},
        min_envs=2,
    ),
    _bound(
        "floor",
        "floor: flags in shared memory, 2 processes, spin 50 us",
        "floor",
        {"processes": 2, "spin": 50e-6},
        steps_only=True,
        cannot=_FLOOR_CANNOT,
    ),
    _bound(
        "floor_block",
        "floor that blocks: the same without spinning",
        "floor",
        {"processes": 2, "spin": 0.0},
        steps_only=True,
        cannot=_FLOOR_CANNOT,
    ),
)
VARIANTS = {variant.name: variant for variant in _VARIANTS}


def variants_named(names: list[str] | None, *, startup: bool = False) -> list[Variant]:
    """Return the variants of these names, or all that take part in a benchmark.

    Raises:
        KeyError: A name is unknown.
    """
    if names:
        return [VARIANTS[name] for name in names]
    return [
        variant
        for variant in VARIANTS.values()
        if not (variant.steps_only if startup else variant.startup_only)
    ]
