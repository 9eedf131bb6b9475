"""The comparisons of requests, interleaved: in each round every way is timed once, shuffled.

Each way's client is a process of its own, and so is each server. A way whose client or server fails
is a row with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from envbus.bench.harness.child import ChildError, LibraryProcess
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
from envbus.bench.requests.cases import CASES, WAYS, RequestCase, Way

__all__ = ["measure_requests"]

#: Seconds for a process to import its library, and for an answer beyond the time that is measured:
#: the first one waits until 50 clients are connected.
START_TIMEOUT, ANSWER_TIMEOUT = 120.0, 90.0


@dataclass
class _Contender:
    """One way in one case: its client, if it runs, or the reason why not."""

    way: Way
    #: Measurements, by what is measured: "latency", "rate".
    results: dict[str, list[dict[str, float]]]
    client: LibraryProcess | None = None
    failure: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def take_turn(self, what: str, schedule: Schedule) -> None:
        """Have the client measure, after a warm-up."""
        if self.client is None:
            return
        try:
            if not self.versions:
                self.versions = json.loads(self.client.read_line(START_TIMEOUT))
            for seconds in (schedule.warm_up, schedule.seconds):
                answer = self.client.ask(f"{what} {seconds}", seconds + ANSWER_TIMEOUT)
            self.results[what].append(json.loads(answer))
        except ChildError as error:
            self.failure = str(error)
            self.end()

    def end(self) -> None:
        """End its client."""
        if self.client is not None:
            self.client.kill()
            self.client = None

    def row(self, case: RequestCase) -> dict[str, Any]:
        """Return the result row."""
        row: dict[str, Any] = {"case": case.name, "way": self.way.name}
        if self.failure:
            return {**row, "status": "failed", "reason": self.failure}
        row["status"] = "ok"
        for results in self.results.values():
            for key in results[0]:
                row[key] = asdict(spread_of([result[key] for result in results]))
        return row


def measure_requests(
    kind: str,
    schedule: Schedule,
    environments: Environments,
    say: Say = print,
    keep: Keep = forget,
    *,
    cases: Sequence[RequestCase] = (),
    ways: Sequence[Way] = (),
) -> Record:
    """Measure all cases; return the record with one row per case and way.

    Args:
        kind: Of comparison: "bus", "policy", "bridge".
        schedule: How long and how often.
        environments: Where libraries are installed.
        say: Takes lines of progress.
        keep: Takes the record after each case.
        cases: Instead of all of that kind.
        ways: Instead of all of that kind.
    """
    record = new_record(kind, schedule, {})
    for case in cases or CASES[kind]:
        contenders = _measure_case(kind, case, ways or WAYS[kind], schedule, environments)
        for contender in contenders:
            if contender.versions:
                record["versions"][contender.way.library or kind] = contender.versions
            row = contender.row(case)
            record["rows"].append(row)
            say(_line(kind, row))
        keep(record)
    return record


def _measure_case(
    kind: str,
    case: RequestCase,
    ways: Sequence[Way],
    schedule: Schedule,
    environments: Environments,
) -> list[_Contender]:
    contenders = []
    for way in ways:
        measured = [what for what in case.measured if what != "rate" or way.rated]
        if measured:
            contenders.append(_Contender(way, {what: [] for what in measured}))
    order = schedule.order(case.name)
    with ExitStack() as stack:
        _start(stack, kind, case, contenders, environments)
        turns = [(each, what) for each in contenders for what in each.results]
        for _ in range(schedule.rounds):
            order.shuffle(turns)
            for contender, what in turns:
                contender.take_turn(what, schedule)
    return contenders


def _start(
    stack: ExitStack,
    kind: str,
    case: RequestCase,
    contenders: list[_Contender],
    environments: Environments,
) -> None:
    """Start each server once, and a client for each way. On one thread, as all that compute."""
    one_thread = environments.on_one_thread()
    servers: dict[str, list[str] | ChildError] = {"": [""]}
    for contender in contenders:
        way = contender.way
        if way.server not in servers:
            try:
                servers[way.server] = _serve(stack, case, way, one_thread)
            except ChildError as error:
                servers[way.server] = error
        addresses = servers[way.server]
        if isinstance(addresses, ChildError):
            contender.failure = str(addresses)
            continue
        arguments = [kind, way.name, case.to_json(), addresses[way.address]]
        contender.client = LibraryProcess(way.library, one_thread, "requests.client", arguments)
        stack.callback(contender.end)


def _serve(stack: ExitStack, case: RequestCase, way: Way, environments: Environments) -> list[str]:
    """Start a server; return its addresses."""
    status = environments.status(way.library)
    if status is None:
        raise ChildError(f"not installed: run `envbus bench install {way.library}`")
    if status.failure:
        raise ChildError(f"could not be installed: {status.failure}")
    arguments = [way.server, case.to_json()]
    server = LibraryProcess(way.library, environments, "requests.bridge_servers", arguments)
    stack.callback(server.kill)
    return server.read_line(START_TIMEOUT).split()


def _line(kind: str, row: dict[str, Any]) -> str:
    told = [f"- ({row['reason']})"] if row["status"] != "ok" else []
    if "p50_us" in row:
        told += [f"p50 {row['p50_us']['median']:7.1f} us", f"p99 {row['p99_us']['median']:7.1f} us"]
    if "per_second" in row:
        told.append(f"{row['per_second']['median']:9,.0f} per second")
    return f"{kind}, {row['case']:22} {row['way']:27} {', '.join(told)}"
