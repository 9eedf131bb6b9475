"""Trains each case in each way, once per seed, in turn; keeps how long that took and how well."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from envbus.bench.harness.child import ChildError, LibraryProcess, one_line
from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import (
    Keep,
    Record,
    Say,
    Schedule,
    forget,
    new_record,
    spread_of,
)
from envbus.bench.training.cases import TrainingCase

__all__ = ["QUICK_SEEDS", "SEEDS", "measure_training"]

#: Trainings of each way.
SEEDS = 5
QUICK_SEEDS = 1
#: Seconds for one of them.
_TIMEOUT = 600.0


def measure_training(
    cases: Sequence[TrainingCase],
    seeds: int,
    schedule: Schedule,
    environments: Environments,
    say: Say,
    keep: Keep = forget,
) -> Record:
    """Return the record, with one row per case and way: seconds and last returns of all seeds.

    A way that fails is in it with the reason.
    """
    record = new_record("training", schedule, {})
    for case in cases:
        seconds: dict[str, list[float]] = {way: [] for way in case.ways}
        returns: dict[str, list[float]] = {way: [] for way in case.ways}
        failures: dict[str, str] = {}
        order = schedule.order(case.name)
        for seed in range(1, seeds + 1):
            for way in order.sample(case.ways, len(case.ways)):
                if way in failures:
                    continue
                try:
                    trained = _train(case, way, seed, environments)
                except (ChildError, ValueError, OSError) as exc:
                    failures[way] = one_line(str(exc))
                    say(f"{case.name} {way}: {failures[way]}")
                    continue
                seconds[way].append(trained["seconds"])
                returns[way].append(trained["episode_return"])
                say(
                    f"{case.name} {way}, seed {seed}: {trained['seconds']:.1f} s, "
                    f"return {trained['episode_return']:.0f}"
                )
        for way in case.ways:
            row = {
                "library": case.library,
                "label": case.label,
                "env": case.env,
                "num_envs": case.num_envs,
                "steps": case.steps,
                "way": way,
            }
            if seconds[way]:
                row["seconds"] = spread_of(seconds[way]).__dict__
                row["returns"] = returns[way]
            if way in failures:
                row["failure"] = failures[way]
            record["rows"].append(row)
        keep(record)
    return record


def _train(case: TrainingCase, way: str, seed: int, environments: Environments) -> dict[str, float]:
    options = {
        "--env": case.env,
        "--num-envs": case.num_envs,
        "--steps": case.steps,
        "--way": way,
        "--seed": seed,
    }
    program = LibraryProcess(
        case.environment,
        environments,
        f"training.{case.library}",
        [str(word) for pair in options.items() for word in pair],
    )
    deadline = time.monotonic() + _TIMEOUT
    try:
        while True:  # libraries may print lines of their own before
            line = program.read_line(max(deadline - time.monotonic(), 0.0))
            if line.startswith("{"):
                trained: dict[str, float] = json.loads(line)
                return trained
    finally:
        program.kill()
