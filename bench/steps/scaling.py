"""What one more actor costs: actors of one null env each, from a few to a thousand.

Each number of actors is started anew, as often as the schedule says, in a shuffled order.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from envbus.bench.harness.child import ChildError
from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Record, Schedule, new_record, spread_of
from envbus.bench.steps.variants import OURS, VARIANTS
from envbus.bench.steps.vector import OPEN_TIMEOUT, start

__all__ = ["FULL_ACTORS", "QUICK_ACTORS", "measure_actors"]

FULL_ACTORS = (2, 16, 128, 512, 1000)
QUICK_ACTORS = (2, 16)
WORKLOAD = "null"
#: What is measured of each start, with its unit.
_MEASURED = (
    "seconds",
    "step_us",
    "step_us_per_actor",
    "pss_mb_per_actor",
    "descriptors_per_actor",
    "cores",
)


def measure_actors(
    numbers: Sequence[int],
    schedule: Schedule,
    environments: Environments,
    say: Callable[[str], None] = print,
) -> Record:
    """Measure all numbers of actors; return the record with one row for each."""
    _allow_descriptors()
    record = new_record("actors", schedule, {})
    started: dict[int, list[dict[str, float]]] = {number: [] for number in numbers}
    failures: dict[int, str] = {}
    order = schedule.order("actors")
    for _ in range(schedule.starts):
        for number in order.sample(numbers, len(numbers)):
            if number in failures:
                continue
            try:
                measured = _start_once(number, schedule, environments, record)
            except ChildError as error:
                failures[number] = str(error)
                say(f"{number} actors: {error}")
                continue
            started[number].append(measured)
            say(
                f"{number} actors: {measured['seconds']:.2f} s to the first reset, one step "
                f"{measured['step_us']:,.0f} us, {measured['pss_mb_per_actor']:.1f} MB and "
                f"{measured['descriptors_per_actor']:.1f} descriptors each"
            )
    record["rows"] = [_row(number, started[number], failures.get(number)) for number in numbers]
    return record


def _start_once(
    number: int, schedule: Schedule, environments: Environments, record: Record
) -> dict[str, float]:
    """Start so many actors once.

    Raises:
        ChildError: They did not start, or failed.
    """
    variant = VARIANTS[OURS]
    contender = start(variant, WORKLOAD, number, environments)
    process = contender.process
    if process is None:
        raise ChildError(contender.failure)
    try:
        record["versions"][variant.library] = process.wait_started()
        memory, descriptors = process.memory().pss, process.descriptors()
        options = {**variant.options, "num_actors": number}
        seconds = process.open(WORKLOAD, number, options, OPEN_TIMEOUT)
        before = process.cpu_seconds()
        ran = process.run(schedule.seconds, schedule.warm_up)
        cores = (process.cpu_seconds() - before) / (ran["seconds"] + schedule.warm_up)
        return {
            "seconds": seconds,
            "step_us": ran["latency_p50_us"],
            "step_us_per_actor": ran["latency_p50_us"] / number,
            "pss_mb_per_actor": (process.memory().pss - memory) / 1e6 / number,
            "descriptors_per_actor": (process.descriptors() - descriptors) / number,
            "cores": cores,
        }
    finally:
        process.close()


def _row(number: int, started: list[dict[str, float]], failure: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": WORKLOAD, "num_actors": number, "variant": OURS}
    if failure is not None or not started:
        return {**row, "status": "failed", "reason": failure or "was not started"}
    spreads = {key: asdict(spread_of([one[key] for one in started])) for key in _MEASURED}
    return {**row, "status": "ok", **spreads}


def _allow_descriptors() -> None:
    """Let the adapters have as many descriptors as this user may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
