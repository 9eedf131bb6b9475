"""Simulators that ask a policy server for actions: envbus beside bare pyzmq, HTTP and gRPC.

Interleaved: in each round every way is timed once, in another order. Servers and clients are
processes of their own. A way whose server or client fails is a row with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from envbus.bench.bridge_servers import CASES, BridgeCase
from envbus.bench.cases import Schedule
from envbus.bench.child import Child, ChildError
from envbus.bench.environments import ONE_THREAD, Environments
from envbus.bench.record import Record, new_record
from envbus.bench.summary import spread_of
from envbus.bench.vector import Keep, Say, forget

__all__ = [
    "NUM_CLIENTS",
    "NUM_EPISODES",
    "WAYS",
    "Way",
    "measure_bridge",
]

NUM_EPISODES, NUM_CLIENTS = 1000, 50
#: Seconds for a process to import its library, and for an answer beyond the time that is measured:
#: the first one waits until 50 clients are connected.
START_TIMEOUT, ANSWER_TIMEOUT = 120.0, 90.0


@dataclass(frozen=True)
class Way:
    """One way to ask for actions."""

    #: In whose environment its server and its clients run.
    library: str
    server: str
    #: Which of the server's addresses its clients use.
    address: int = 0
    #: Whether the message rate of many clients is measured, too.
    rated: bool = True


WAYS = {
    "pyzmq": Way("serving", "pyzmq"),
    "envbus": Way("serving", "envbus"),
    "envbus, ZeroMQ": Way("serving", "envbus"),
    "envbus, TCP": Way("serving", "envbus", 1, rated=False),
    "envbus, WebSocket": Way("serving", "envbus", 2, rated=False),
    "http": Way("serving", "http"),
    "grpc": Way("grpc", "grpc"),
}


@dataclass
class _Contender:
    """One way in one case: its client, if it runs, or the reason why not."""

    name: str
    way: Way
    #: Measurements, by what is measured: "latency", "rate".
    results: dict[str, list[dict[str, float]]]
    client: Child | None = None
    failure: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Take it out of the case, for the reason given."""
        self.failure = reason
        self.end()

    def end(self) -> None:
        """End its client."""
        if self.client is not None:
            self.client.kill()
            self.client = None

    def measure(self, what: str, seconds: float) -> dict[str, float]:
        """Have the client measure; `ChildError` if that fails."""
        if self.client is None:
            raise AssertionError("only those that run are measured")
        load = f" {NUM_EPISODES} {NUM_CLIENTS}" if what == "rate" else ""
        answer = self.client.ask(f"{what} {seconds}{load}", seconds + ANSWER_TIMEOUT)
        measured: dict[str, float] = json.loads(answer)
        return measured

    def row(self, case: BridgeCase) -> dict[str, Any]:
        """Return the result row."""
        row: dict[str, Any] = {"case": case.name, "way": self.name}
        if self.failure:
            return {**row, "status": "failed", "reason": self.failure}
        row["status"] = "ok"
        for results in self.results.values():
            for key in results[0].keys() - {"n"}:
                row[key] = asdict(spread_of([result[key] for result in results]))
        return row


def measure_bridge(
    schedule: Schedule, environments: Environments, say: Say = print, keep: Keep = forget
) -> Record:
    """Measure all cases; return the record with one row per case and way.

    Args:
        schedule: How long and how often.
        environments: Where the libraries are installed.
        say: Takes lines of progress.
        keep: Takes the record after each case.
    """
    os.environ.update(ONE_THREAD)
    record = new_record("bridge", schedule, {})
    for case in CASES:
        for contender in _measure_case(case, schedule, environments):
            if contender.versions:
                record["versions"][contender.way.library] = contender.versions
            row = contender.row(case)
            record["rows"].append(row)
            say(_line(row))
        keep(record)
    return record


def _measure_case(
    case: BridgeCase, schedule: Schedule, environments: Environments
) -> list[_Contender]:
    contenders = list(_contenders(case))
    order = schedule.order(case.name)
    with ExitStack() as stack:
        _start(stack, case, contenders, environments)
        turns = [(each, what) for each in contenders for what in each.results]
        for _ in range(schedule.rounds):
            order.shuffle(turns)
            for contender, what in turns:
                _take_turn(contender, what, schedule)
    return contenders


def _contenders(case: BridgeCase) -> Iterator[_Contender]:
    """Yield those that have something to measure."""
    for name, way in WAYS.items():
        results: dict[str, list[dict[str, float]]] = {
            what: [] for what in case.measured if what != "rate" or way.rated
        }
        if results:
            yield _Contender(name, way, results)


def _start(
    stack: ExitStack,
    case: BridgeCase,
    contenders: list[_Contender],
    environments: Environments,
) -> None:
    """Start each server once, and a client for each way."""
    servers: dict[str, list[str] | ChildError] = {}
    for contender in contenders:
        way = contender.way
        if way.server not in servers:
            try:
                servers[way.server] = _serve(stack, case, way, environments)
            except ChildError as error:
                servers[way.server] = error
        found = servers[way.server]
        if isinstance(found, ChildError):
            contender.fail(str(found))
            continue
        versions, *addresses = found
        contender.versions = json.loads(versions)
        arguments = [contender.name, case.name, addresses[way.address]]
        contender.client = Child(way.library, environments, "bridge_clients", arguments)
        stack.callback(contender.end)


def _serve(stack: ExitStack, case: BridgeCase, way: Way, environments: Environments) -> list[str]:
    """Start a server; return its versions and its addresses."""
    status = environments.status(way.library)
    if status is None:
        raise ChildError(f"not installed: run `envbus bench install {way.library}`")
    if status.failure:
        raise ChildError(f"could not be installed: {status.failure}")
    server = Child(way.library, environments, "bridge_servers", [way.server, case.name])
    stack.callback(server.kill)
    return [server.read_line(START_TIMEOUT), *server.read_line(START_TIMEOUT).split()]


def _take_turn(contender: _Contender, what: str, schedule: Schedule) -> None:
    if contender.failure:
        return
    try:
        contender.measure(what, schedule.warm_up)
        contender.results[what].append(contender.measure(what, schedule.seconds))
    except ChildError as error:
        contender.fail(str(error))


def _line(row: dict[str, Any]) -> str:
    told = [f"- ({row['reason']})"] if row["status"] != "ok" else []
    if "p50_us" in row:
        told += [f"p50 {row['p50_us']['median']:7.1f} us", f"p99 {row['p99_us']['median']:7.1f} us"]
    if "per_second" in row:
        told.append(f"{row['per_second']['median']:9,.0f} actions/s")
    return f"bridge, {row['case']:18} {row['way']:18} {', '.join(told)}"
