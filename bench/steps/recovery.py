"""From `kill -9` of a worker process until its envs step again, by themselves or by hand.

Two workers with eight CartPole envs each for envbus; a worker per env for the others, which know
no other way. Variants take turns: noise hits all alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Record, Schedule, new_record, spread_of
from envbus.bench.steps.variants import VARIANTS, Role, Variant
from envbus.bench.steps.vector import Contender, start

__all__ = ["FULL_KILLS", "QUICK_KILLS", "VARIANTS_KILLED", "Kills", "measure_recovery"]

WORKLOAD = "cartpole"
NUM_ENVS, NUM_ACTORS = 16, 2
#: In this order in tables.
VARIANTS_KILLED = ("envbus_pool", "envbus_shm", "gym_async_shm", "sb3_subproc")


@dataclass(frozen=True)
class Kills:
    """How many workers are killed."""

    #: Of those that come back: enough for a 99th percentile to be the worst but one or so.
    ours: int
    #: Of those that do not: each is a construction, and maybe a hang.
    others: int


FULL_KILLS = Kills(ours=30, others=5)
QUICK_KILLS = Kills(ours=3, others=1)


@dataclass
class _Killed:
    """What became of a variant's workers."""

    contender: Contender
    outcomes: list[dict[str, Any]] = field(default_factory=list)


def measure_recovery(
    kills: Kills,
    schedule: Schedule,
    environments: Environments,
    names: Sequence[str] = VARIANTS_KILLED,
    say: Callable[[str], None] = print,
) -> Record:
    """Kill workers of each variant in turn; return the record with one row per variant."""
    killed = [_Killed(_opened(VARIANTS[name], environments)) for name in names]
    order, turns = schedule.order("recovery"), [*killed]
    try:
        for number in range(max(kills.ours, kills.others)):
            order.shuffle(turns)
            for one in turns:
                ours = one.contender.variant.library == "envbus"
                if number < (kills.ours if ours else kills.others):
                    _kill_once(one)
            say(f"recovery: {number + 1} of {max(kills.ours, kills.others)} rounds")
    finally:
        for one in killed:
            one.contender.close()
    versions = {
        one.contender.variant.library: one.contender.versions
        for one in killed
        if one.contender.versions
    }
    record = new_record("recovery", schedule, versions)
    record["rows"] = [_row(one) for one in killed]
    return record


def _options(variant: Variant) -> dict[str, Any]:
    ours = {"num_actors": NUM_ACTORS, "restart": True} if variant.library == "envbus" else {}
    return {**variant.options, **ours}


def _opened(variant: Variant, environments: Environments) -> Contender:
    contender = start(variant, WORKLOAD, NUM_ENVS, environments)
    with contender.attempt():
        contender.open(WORKLOAD, NUM_ENVS, _options(variant))
        if contender.process is not None:
            contender.process.pause()
    return contender


def _kill_once(one: _Killed) -> None:
    process = one.contender.process
    if process is None:
        return
    with one.contender.attempt(), process.awake():
        one.outcomes.append(process.kill_one())


def _row(one: _Killed) -> dict[str, Any]:
    variant = one.contender.variant
    row = one.contender.head(WORKLOAD, NUM_ENVS, _options(variant))
    if variant.role is Role.FIRST_COME:
        row["role"] = Role.OURS.value
    if one.contender.failure or not one.outcomes:
        return {**row, "status": "failed", "reason": one.contender.failure or "was not killed"}
    row["status"] = "ok"
    row["outcome"] = one.outcomes[0]["outcome"].lower()
    if row["outcome"] == "recovered":
        seconds = [outcome["seconds"] for outcome in one.outcomes]
        row["seconds"] = asdict(spread_of(seconds))
        row["seconds_p99"] = float(f"{np.percentile(seconds, 99):.5g}")
        rates = {
            phase: sum(outcome["others"][phase][0] for outcome in one.outcomes)
            / sum(outcome["others"][phase][1] for outcome in one.outcomes)
            for phase in one.outcomes[0]["others"]
        }
        row["others_env_steps_per_second"] = {k: float(f"{v:.5g}") for k, v in rates.items()}
    else:
        for key in ("raised", "close_error"):
            row[key] = dict(Counter(outcome[key] or "none" for outcome in one.outcomes))
        for key in ("surfaced", "by_hand"):
            row[key] = asdict(spread_of([outcome[key] for outcome in one.outcomes]))
        row["left"] = max(outcome["left"] for outcome in one.outcomes)
    return row
