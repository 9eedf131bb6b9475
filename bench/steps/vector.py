"""Env steps per second and latencies, interleaved: noise hits every variant alike.

In each case all variants are opened; then, round after round in a shuffled order, each is let
run alone for a while, the others stopped; at last all are closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envbus.bench.harness.child import ChildError
from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Keep, Record, Say, Schedule, forget, new_record, spread_of
from envbus.bench.steps.adapter_process import AdapterProcess
from envbus.bench.steps.cases import Case
from envbus.bench.steps.variants import Variant

__all__ = [
    "OPEN_TIMEOUT",
    "Contender",
    "measure_cases",
    "start",
]

#: Seconds to construct and reset: 256 processes that import torch one by one take minutes.
OPEN_TIMEOUT = 400.0


@dataclass
class Contender:
    """One variant in one case: its process, if it runs, or the reason why not."""

    variant: Variant
    process: AdapterProcess | None = None
    failure: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Take it out of the case if its process fails inside the context."""
        try:
            yield
        except ChildError as error:
            self.failure = str(error)
            self.close()

    def open(self, workload: str, num_envs: int, options: dict[str, Any]) -> float:
        """Have its envs made and reset; return the seconds that this took; 0.0 if it is out."""
        if self.process is None:
            return 0.0
        self.versions = self.process.wait_started()
        return self.process.open(workload, num_envs, options, OPEN_TIMEOUT)

    def close(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def head(self, workload: str, num_envs: int, options: dict[str, Any]) -> dict[str, Any]:
        """Return what each result row begins with."""
        return {
            "workload": workload,
            "num_envs": num_envs,
            "variant": self.variant.name,
            "role": self.variant.role.value,
            "options": options,
        }

    def row(self, case: Case) -> dict[str, Any]:
        """Return the result row."""
        row = self.head(case.workload, case.num_envs, case.options(self.variant))
        if self.failure or not self.rounds:
            return {**row, "status": "failed", "reason": self.failure or "no round was run"}
        rates = [measured["env_steps"] / measured["seconds"] for measured in self.rounds]
        row["status"] = "ok"
        row["env_steps_per_second"] = asdict(spread_of(rates))
        for key in ("latency_p50_us", "latency_p99_us", "cores"):
            row[key] = asdict(spread_of([measured[key] for measured in self.rounds]))
        row["rounds"] = [float(f"{rate:.5g}") for rate in rates]
        return row


def measure_cases(
    kind: str,
    cases: Sequence[Case],
    variants: Sequence[Variant],
    schedule: Schedule,
    environments: Environments,
    say: Say = print,
    keep: Keep = forget,
) -> Record:
    """Measure all cases; return the record with one row per case and variant.

    Args:
        kind: Of record, "vector" or "sample".
        cases: In this order.
        variants: Those that are not meant for a case are passed over there.
        schedule: How long and how often.
        environments: Where the libraries are installed.
        say: Takes lines of progress.
        keep: Takes the record after each case.
    """
    record = new_record(kind, schedule, {})
    for case in cases:
        for contender in _measure_case(case, variants, schedule, environments, say):
            if contender.versions:
                record["versions"][contender.variant.library] = contender.versions
            record["rows"].append(contender.row(case))
        keep(record)
    return record


def _measure_case(
    case: Case,
    variants: Sequence[Variant],
    schedule: Schedule,
    environments: Environments,
    say: Say,
) -> list[Contender]:
    """Measure one case with all variants, interleaved."""
    schedule = schedule.of(case.workload)
    contenders: list[Contender] = []
    try:
        contenders += [
            start(variant, case.workload, case.num_envs, environments)
            for variant in variants
            if variant.takes_part(case.workload, case.num_envs)
        ]
        for contender in contenders:
            _open(contender, case, say)
        order = schedule.order(case.name)
        for number in range(schedule.rounds):
            running = [contender for contender in contenders if contender.process is not None]
            order.shuffle(running)
            for contender in running:
                _run(contender, schedule)
            say(f"{case.name}: round {number + 1} of {schedule.rounds}")
    finally:
        for contender in contenders:
            contender.close()
    for contender in contenders:
        say(_line(contender.row(case)))
    return contenders


def start(variant: Variant, workload: str, num_envs: int, environments: Environments) -> Contender:
    """Start a variant's process, or keep the reason why it is left out."""
    contender = Contender(variant)
    left_out = variant.left_out(workload, num_envs)
    status = environments.status(variant.library)
    if left_out is not None:
        contender.failure = left_out
    elif status is None:
        contender.failure = f"not installed: run `envbus bench install {variant.library}`"
    elif status.failure:
        contender.failure = f"could not be installed: {status.failure}"
    else:
        contender.process = AdapterProcess(variant, environments)
    return contender


def _open(contender: Contender, case: Case, say: Say) -> None:
    process = contender.process
    if process is None:
        return
    with contender.attempt():
        options = case.options(contender.variant)
        seconds = contender.open(case.workload, case.num_envs, options)
        process.pause()
        say(f"{case.name}: {contender.variant.name} opened in {seconds:.2f} s")
    if contender.failure:
        say(f"{case.name}: {contender.variant.name} failed: {contender.failure}")


def _run(contender: Contender, schedule: Schedule) -> None:
    process = contender.process
    if process is None:
        return
    with contender.attempt(), process.awake():
        before = process.cpu_seconds()
        measured = process.run(schedule.seconds, schedule.warm_up)
        used = process.cpu_seconds() - before
        measured["cores"] = round(used / (measured["seconds"] + schedule.warm_up), 2)
        contender.rounds.append(measured)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['workload']}:{row['num_envs']} {row['variant']:20}"
    if row["status"] != "ok":
        return f"{name} - ({row['reason']})"
    rate = row["env_steps_per_second"]
    return (
        f"{name} {rate['median']:>12,.0f} env steps/s "
        f"({rate['min']:,.0f} to {rate['max']:,.0f}), one step p50 "
        f"{row['latency_p50_us']['median']:,.0f} us, p99 {row['latency_p99_us']['median']:,.0f} us"
    )
