"""The issue's targets on two cores, as a table, and whether a result meets them. Pure.

Ratios are of medians within one result, in favour of envbus where they are above 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from envbus.bench.adapters.workloads import TEAMS
from envbus.bench.harness.record import Record
from envbus.bench.steps.sample_variants import (
    GROUP_ASYNC,
    GROUP_ASYNC_TORCH,
    GROUP_NUMPY,
    GROUP_OF_ALL,
    GROUP_TORCH,
    OURS_NUMPY,
    OURS_TORCH,
    PIPELINING,
    RUN_AHEAD,
    RUN_AHEAD_TORCH,
)
from envbus.bench.steps.variants import (
    BASELINE,
    BLOCKING_FLOOR,
    FLOOR,
    OURS,
    OURS_BLOCKING,
    OURS_ONE_ACTOR,
    SPINNING,
    SYNC,
    Role,
)
from envbus.bench.training.cases import OURS as TRAINED_BY_US

__all__ = [
    "MEMORY_RATIO",
    "RATIOS",
    "SPINNING_RATIOS",
    "SYNC_RATIOS",
    "TargetVerdict",
    "best_peer",
    "check",
    "lost_by_others",
    "render_verdicts",
    "rows_by",
]

#: At least so many times the env steps per second of AsyncVectorEnv with shared memory.
RATIOS = {
    ("null", 1): 8.0,
    ("null", 8): 16.0,
    ("null", 64): 60.0,
    ("null", 256): 150.0,
    ("cartpole", 1): 5.0,
    ("cartpole", 8): 5.0,
    ("cartpole", 64): 18.0,
    ("pixels", 8): 12.0,
    ("pixels", 64): 32.0,
    ("dict", 16): 9.0,
    ("infos", 8): 6.0,
    ("infos", 64): 35.0,
    ("short", 64): 35.0,
    ("jitter", 16): 1.0,
}
#: At least so many times SyncVectorEnv's, where envs take long enough to share, or rows are big.
SYNC_RATIOS = {("halfcheetah", 8): 1.3, ("pong", 8): 1.6, ("frame", 16): 1.0}
#: At least so many times PufferLib's with one worker, which spins; ours with one actor, or with
#: the default, whichever is faster.
SPINNING_RATIOS = {
    ("null", 1): 1.0,
    ("null", 8): 0.9,
    ("null", 64): 1.0,
    ("null", 256): 1.0,
    ("cartpole", 64): 1.0,
    ("cartpole", 256): 1.0,
    ("pixels", 64): 1.0,
    ("pixels", 256): 1.0,
    ("dict", 64): 1.0,
    ("infos", 64): 1.0,
    ("short", 64): 1.0,
}
#: At least this part of the floor's, in all cases that it can do.
FLOOR_RATIO = 0.9
#: At least this part of the blocking floor's per core used, by those that do not look either.
BLOCKING_RATIO = 1.0
#: At least this part of `BusVectorEnv`'s, of a pool with the same envs and actors.
POOL_RATIO, POOL_CASE = 0.8, ("null", 8)
#: Of actors with one env each: descriptors of the runner per actor at most, where there are enough
#: actors that its others hardly count.
ACTOR_DESCRIPTORS, ACTORS_ENOUGH = 2.0, 128
#: How many times as long a step takes per actor at most, with the second number of actors beside
#: the first: linear, with room for memory that is in no cache any more.
ACTORS_GROWTH, ACTORS_FROM, ACTORS_TO = 1.5, 16, 1000
#: At most this part of AsyncVectorEnv's memory, with this many envs.
MEMORY_RATIO, MEMORY_NUM_ENVS = 0.2, 64
#: At least this part of what two independent processes reach, where envs burn CPU.
BURN_RATIO = 0.9
#: At most so many seconds to the first reset, by number of envs and of actors.
START_SECONDS = {(64, 2): 1.5, (16, 16): 2.5}
#: At most so many seconds from `kill -9` of an actor with 8 CartPole envs until they step again.
RECOVERY_SECONDS = 0.15
#: At most this part of the other actors' throughput is lost meanwhile, beyond what a lost core
#: explains.
RECOVERY_DROP = 0.1
#: At least so many times RLlib's runner, with one agent and with several.
RLLIB_RATIO, RLLIB_AGENTS_RATIO = 5.0, 3.0
#: At least this part of what independent envs reach, where some are slow.
INDEPENDENT_RATIO = 0.9
#: At least so many times the env steps per second without pipelining.
PIPELINED_RATIO = 1.3
#: At most so many times bare pyzmq's round trip.
BUS_RATIO = 1.3
#: At most so many times the bus alone, the policy's own time taken off.
POLICY_RATIO = 1.5


#: Of the external-env bridge: at most so many times bare pyzmq's round trip, and p99 so many times
#: p50; at least this part of its messages per second with a network, and so many times HTTP's; with
#: pixels at most so many times as long per message.
BRIDGE_RATIO, BRIDGE_TAIL, BRIDGE_RATE, BRIDGE_HTTP, BRIDGE_PIXELS = 1.5, 5.0, 0.5, 10.0, 1.3


@dataclass(frozen=True)
class TargetVerdict:
    """One target against one result. `measured` is None where the result has no such row."""

    target: str
    measured: float | None
    limit: float
    at_least: bool

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if it was not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def check(record: Record) -> list[TargetVerdict]:
    """Return the verdicts on all targets that a record of this kind can answer."""
    match record["kind"]:
        case "vector":
            return [
                *_ratios(record),
                *_ahead_of_all(record),
                *_burn(record),
                *_floors(record),
                *_pool(record),
            ]
        case "sample":
            return list(_sampling(record))
        case "startup":
            return [*_memory(record), *_start(record)]
        case "actors":
            return list(_actors(record))
        case "recovery":
            return list(_recovery(record))
        case "bus":
            return list(_bus(record))
        case "policy":
            return list(_policy(record))
        case "bridge":
            return list(_bridge(record))
        case "training":
            return list(_training(record))
        case _:
            return []


def rows_by(record: Record, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows that were measured, by the values of `keys`."""
    return {tuple(row[key] for key in keys): row for row in record["rows"] if row["status"] == "ok"}


def best_peer(
    record: Record, workload: str, num_envs: int, prefix: str = ""
) -> dict[str, Any] | None:
    """Return the row of the fastest peer, of those whose names begin with `prefix`."""
    rows = [
        row
        for row in record["rows"]
        if (row["workload"], row["num_envs"], row["role"], row["status"])
        == (workload, num_envs, Role.PEER.value, "ok")
        and row["variant"].startswith(prefix)
    ]
    return max(rows, key=_rate, default=None)


def render_verdicts(verdicts: list[TargetVerdict]) -> str:
    """Return a Markdown table of targets, measured values and outcomes."""
    lines = ["| target | measured | limit | |", "|---|---:|---:|---|"]
    for verdict in verdicts:
        measured = "-" if verdict.measured is None else f"{verdict.measured:.2f}"
        limit = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
        outcome = {True: "met", False: "**missed**", None: "not measured"}[verdict.met]
        lines.append(f"| {verdict.target} | {measured} | {limit} | {outcome} |")
    return "\n".join(lines) + "\n"


def _rate(row: dict[str, Any]) -> float:
    rate: float = row["env_steps_per_second"]["median"]
    return rate


def _ratio(
    one: dict[str, Any] | None, other: dict[str, Any] | None, key: str = "env_steps_per_second"
) -> float | None:
    if one is None or other is None:
        return None
    ratio: float = one[key]["median"] / other[key]["median"]
    return ratio


def _ratios(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    for other, name, ratios in (
        (BASELINE, "AsyncVectorEnv with shared memory", RATIOS),
        (SPINNING, "PufferLib with one worker, which spins", SPINNING_RATIOS),
        (SYNC, "SyncVectorEnv", SYNC_RATIOS),
    ):
        for (workload, num_envs), limit in ratios.items():
            names = (OURS, OURS_ONE_ACTOR) if other is SPINNING else (OURS,)
            against = rows.get((workload, num_envs, other))
            ratios_of = [_ratio(rows.get((workload, num_envs, own)), against) for own in names]
            ratio = max((found for found in ratios_of if found is not None), default=None)
            yield TargetVerdict(f"{workload}:{num_envs}: times {name}", ratio, limit, at_least=True)


def _ahead_of_all(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    for workload, num_envs, variant in rows:
        if variant != OURS or num_envs == 1:
            continue
        peer = best_peer(record, workload, num_envs)
        name = "the fastest other library" if peer is None else peer["variant"]
        ratio = _ratio(rows[workload, num_envs, OURS], peer)
        target = f"{workload}:{num_envs}: times the fastest blocking library ({name})"
        yield TargetVerdict(target, ratio, 1.0, at_least=True)


def _burn(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    cases = {num_envs for workload, num_envs, _ in rows if workload == "burn"}
    for num_envs in sorted(cases) or [16]:
        ours = rows.get(("burn", num_envs, OURS))
        for other, limit in (("independent_2", BURN_RATIO), ("loop", 1.0)):
            ratio = _ratio(ours, rows.get(("burn", num_envs, other)))
            yield TargetVerdict(f"burn:{num_envs}: times {other}", ratio, limit, at_least=True)


def _floors(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    floors = {FLOOR: (OURS, FLOOR_RATIO), BLOCKING_FLOOR: (OURS_BLOCKING, BLOCKING_RATIO)}
    for (workload, num_envs, variant), floor in rows.items():
        ours, limit = floors.get(variant, (None, 0.0))
        row = rows.get((workload, num_envs, ours))
        if row is None:
            continue
        ratio, what = _ratio(row, floor), "times the floor"
        if variant == BLOCKING_FLOOR and ratio is not None:
            ratio *= floor["cores"]["median"] / row["cores"]["median"]
            what = "wait='block', times the blocking floor per core used"
        yield TargetVerdict(f"{workload}:{num_envs}: {what}", ratio, limit, at_least=True)


def _pool(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    ratio = _ratio(rows.get((*POOL_CASE, "envbus_pool_cores")), rows.get((*POOL_CASE, OURS)))
    name = f"{POOL_CASE[0]}:{POOL_CASE[1]}: ActorPool, times BusVectorEnv"
    yield TargetVerdict(name, ratio, POOL_RATIO, at_least=True)


def _actors(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "num_actors")
    for (num_actors,), row in rows.items():
        if num_actors >= ACTORS_ENOUGH:
            descriptors = row["descriptors_per_actor"]["median"]
            name = f"{num_actors} actors: descriptors of the runner, each"
            yield TargetVerdict(name, descriptors, ACTOR_DESCRIPTORS, at_least=False)
    growth = _ratio(rows.get((ACTORS_TO,)), rows.get((ACTORS_FROM,)), "step_us_per_actor")
    name = f"{ACTORS_TO} actors: time of a step per actor, times that of {ACTORS_FROM}"
    yield TargetVerdict(name, growth, ACTORS_GROWTH, at_least=False)


_OURS_TO_SAMPLE = (
    OURS_NUMPY,
    OURS_TORCH,
    RUN_AHEAD,
    RUN_AHEAD_TORCH,
    GROUP_NUMPY,
    GROUP_TORCH,
    GROUP_OF_ALL,
    GROUP_ASYNC,
    GROUP_ASYNC_TORCH,
)
#: Of these there is a verdict against independent envs, also if there is no such row.
_BESIDE_INDEPENDENT = (
    OURS_NUMPY,
    RUN_AHEAD,
    RUN_AHEAD_TORCH,
    "envbus_enough",
    GROUP_OF_ALL,
    GROUP_ASYNC,
    GROUP_ASYNC_TORCH,
)


def _sampling(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "workload", "num_envs", "variant")
    for workload, num_envs in dict.fromkeys((workload, number) for workload, number, _ in rows):
        name = f"sample, {workload}:{num_envs}"
        own = {v: rows.get((workload, num_envs, v)) for v in _OURS_TO_SAMPLE}
        rllib = best_peer(record, workload, num_envs, "rllib")
        limit = RLLIB_AGENTS_RATIO if workload in TEAMS else RLLIB_RATIO
        for variant, row in own.items():
            if row is not None:
                yield TargetVerdict(
                    f"{name}: {variant}, times RLlib's runner",
                    _ratio(row, rllib),
                    limit,
                    at_least=True,
                )
        other = best_peer(record, workload, num_envs)
        for variant in (OURS_TORCH, GROUP_TORCH):
            if other is not None and own[variant] is not None and workload not in TEAMS:
                yield TargetVerdict(
                    f"{name}: {variant}, times the fastest other library ({other['variant']})",
                    _ratio(own[variant], other),
                    1.0,
                    at_least=True,
                )
        bound = rows.get((workload, num_envs, "independent"))
        if bound is not None:
            for variant in _BESIDE_INDEPENDENT:
                row = rows.get((workload, num_envs, variant))
                target = f"{name}: {variant}, part of what independent envs reach"
                yield TargetVerdict(target, _ratio(row, bound), INDEPENDENT_RATIO, at_least=True)
        for pipelined, without in PIPELINING.items():
            row = rows.get((workload, num_envs, pipelined))
            if row is not None:
                target = f"{name}: {pipelined}, times {without}"
                ratio = _ratio(row, rows.get((workload, num_envs, without)))
                yield TargetVerdict(target, ratio, PIPELINED_RATIO, at_least=True)


def _memory(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "num_envs", "variant")
    ours = rows.get((MEMORY_NUM_ENVS, OURS))
    baseline = rows.get((MEMORY_NUM_ENVS, BASELINE))
    for key, label in (("pss_mb", "shared pages once"), ("rss_mb", "summed over processes")):
        target = f"{MEMORY_NUM_ENVS} envs: part of AsyncVectorEnv's memory, {label}"
        yield TargetVerdict(target, _ratio(ours, baseline, key), MEMORY_RATIO, at_least=False)


def _start(record: Record) -> Iterator[TargetVerdict]:
    started = {
        (row["num_envs"], row["options"]["num_actors"]): row["seconds"]["median"]
        for row in record["rows"]
        if row["status"] == "ok" and row["variant"] == OURS
    }
    for (num_envs, num_actors), limit in START_SECONDS.items():
        target = f"{num_envs} envs in {num_actors} actors: seconds to the first reset"
        yield TargetVerdict(target, started.get((num_envs, num_actors)), limit, at_least=False)


def _recovery(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "variant")
    for variant in ("envbus_pool", OURS):
        row = rows.get((variant,))
        target = f"{variant}: seconds from kill -9 until the envs step again, median"
        measured = None if row is None else row["seconds"]["median"]
        yield TargetVerdict(target, measured, RECOVERY_SECONDS, at_least=False)
    row = rows.get(("envbus_pool",))
    measured = None if row is None else lost_by_others(row)
    target = "envbus_pool: part of the other actors' throughput that is lost meanwhile"
    yield TargetVerdict(target, measured, RECOVERY_DROP, at_least=False)


def lost_by_others(row: dict[str, Any]) -> float:
    """Return the part of the others' env steps per second that a recovery costs them.

    What a lost core explains is not counted: what they lose while the same envs are not stepped,
    and something else keeps a core busy. If they gain there, that is not counted against the
    recovery.
    """
    rates = row["others_env_steps_per_second"]
    explained = max(0.0, 1.0 - rates["core_lost"] / rates["before"])
    lost: float = 1.0 - rates["during"] / rates["before"] - explained
    return lost


def _bus(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "case", "way")
    for case in dict.fromkeys(case for case, _ in rows):
        ratio = _ratio(rows.get((case, "envbus")), rows.get((case, "pyzmq")), "p50_us")
        target = f"bus, {case}: round trip, times bare pyzmq's"
        yield TargetVerdict(target, ratio, BUS_RATIO, at_least=False)


def _policy(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "case", "way")
    for case in dict.fromkeys(case for case, _ in rows):
        alone, bus = (rows.get((case, f"{what} alone")) for what in ("policy", "bus"))
        for way in ("policy worker", "policy worker, shared rows"):
            row, measured = rows.get((case, way)), None
            if row is not None and alone is not None and bus is not None:
                measured = (_p50(row) - _p50(alone)) / _p50(bus)
            target = f"{way}, {case}: without the policy's own time, times the bus alone"
            yield TargetVerdict(target, measured, POLICY_RATIO, at_least=False)


def _bridge(record: Record) -> Iterator[TargetVerdict]:
    rows = rows_by(record, "case", "way")
    small, pixels, network = "4 floats", "84 x 84 x 4 bytes", "4 floats, MLP"

    def bare(case: str, ours: str) -> dict[str, Any] | None:
        """Return bare pyzmq's row: over a Unix socket beside ours, if that was measured."""
        local = rows.get((case, "pyzmq, Unix socket")) if ours == "envbus" else None
        return local or rows.get((case, "pyzmq"))

    ours = rows.get((small, "envbus"))
    trip = _ratio(ours, bare(small, "envbus"), "p50_us")
    yield TargetVerdict("get_action: p50, times bare pyzmq's", trip, BRIDGE_RATIO, at_least=False)
    tail = None if ours is None else ours["p99_us"]["median"] / ours["p50_us"]["median"]
    yield TargetVerdict("get_action: p99, times its p50", tail, BRIDGE_TAIL, at_least=False)
    for way, clients in (("envbus", "of this host"), ("envbus, ZeroMQ", "over ZeroMQ")):
        name = f"1,000 episodes, clients {clients}"
        ours = rows.get((network, way))
        part = _ratio(ours, bare(network, way), "per_second")
        yield TargetVerdict(f"{name}: part of bare pyzmq's rate", part, BRIDGE_RATE, at_least=True)
        times = _ratio(ours, rows.get((network, "http, Unix socket")), "per_second")
        yield TargetVerdict(f"{name}: times HTTP's rate", times, BRIDGE_HTTP, at_least=True)
        longer = _ratio(bare(pixels, way), rows.get((pixels, way)), "per_second")
        target = f"84 x 84 x 4 bytes, clients {clients}: time per message, times bare pyzmq's"
        yield TargetVerdict(target, longer, BRIDGE_PIXELS, at_least=False)


def _training(record: Record) -> Iterator[TargetVerdict]:
    rows = {
        (row["label"], row["env"], row["num_envs"], row["way"]): row
        for row in record["rows"]
        if "seconds" in row
    }
    for label, env, num_envs, way in rows:
        theirs = rows.get((label, env, num_envs, "subprocesses"))
        if way != TRAINED_BY_US or theirs is None:
            continue
        ours, case = rows[label, env, num_envs, way], f"{label}, {env}:{num_envs}"
        ratio = _ratio(theirs, ours, "seconds")
        target = f"{case}: times as fast as with the library's own subprocesses"
        yield TargetVerdict(target, ratio, 1.0, at_least=True)
        above = sum(ours["returns"]) / len(ours["returns"]) - min(theirs["returns"])
        target = f"{case}: mean of the last returns, above the lowest seed's with its subprocesses"
        yield TargetVerdict(target, above, 0.0, at_least=True)


def _p50(row: dict[str, Any]) -> float:
    return float(row["p50_us"]["median"])
