"""Simulators that ask a policy server for actions: envbus beside bare pyzmq, HTTP and gRPC.

Interleaved: in each round every way is timed once, in another order. Servers and clients are
processes of their own.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

from envbus.bench.bridge_servers import CASES, BridgeCase
from envbus.bench.cases import Schedule
from envbus.bench.environments import Environments
from envbus.bench.record import Record, new_record
from envbus.bench.summary import spread_of

__all__ = ["NUM_CLIENTS", "NUM_EPISODES", "WAYS", "measure_bridge"]

NUM_EPISODES, NUM_CLIENTS = 1000, 50
#: Way -> its server, and which of the server's addresses it uses.
WAYS = {
    "pyzmq": ("pyzmq", 0),
    "envbus": ("envbus", 0),
    "envbus, TCP": ("envbus", 1),
    "envbus, WebSocket": ("envbus", 2),
    "http": ("http", 0),
    "grpc": ("grpc", 0),
}
#: Ways whose message rate is measured.
_RATED = ("pyzmq", "envbus", "http", "grpc")
_VERSIONS = """
import json
from importlib import metadata
found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
names = ("pyzmq", "grpcio", "requests", "numpy")
print(json.dumps({name: found[name] for name in names if name in found}))
"""


@dataclass
class _Measured:
    """One way in one case."""

    way: str
    process: subprocess.Popen[str]
    #: By what is measured.
    results: dict[str, list[dict[str, float]]]

    def measure(self, what: str, seconds: float) -> dict[str, float]:
        """Have the client measure."""
        load = f" {NUM_EPISODES} {NUM_CLIENTS}" if what == "rate" else ""
        cast("IO[str]", self.process.stdin).write(f"{what} {seconds}{load}\n")
        cast("IO[str]", self.process.stdin).flush()
        answer = cast("IO[str]", self.process.stdout).readline()
        if not answer:
            raise RuntimeError(f"the client of {self.way} has died; its error is above")
        return cast("dict[str, float]", json.loads(answer))


def measure_bridge(
    schedule: Schedule, environments: Environments, say: Callable[[str], None] = print
) -> Record:
    """Measure all cases; return the record with one row per case and way."""
    python = str(environments.python("serving"))
    versions = json.loads(subprocess.check_output([python, "-c", _VERSIONS], text=True))  # noqa: S603
    record = new_record("bridge", schedule, {"serving": versions})
    for case in CASES:
        with ExitStack() as stack:
            measured = _start(stack, python, environments, case)
            turns = [(each, what) for each in measured for what in each.results]
            order = random.Random(f"{schedule.seed} {case.name}")  # noqa: S311 - not for secrets
            for _ in range(schedule.rounds):
                order.shuffle(turns)
                for each, what in turns:
                    each.measure(what, schedule.warm_up)
                    each.results[what].append(each.measure(what, schedule.seconds))
        for each in measured:
            row = _row(case, each)
            record["rows"].append(row)
            say(_line(row))
    return record


def _start(
    stack: ExitStack,
    python: str,
    environments: Environments,
    case: BridgeCase,
) -> list[_Measured]:
    """Start each server once, and a client for each way."""
    variables = environments.variables("serving")
    ways: dict[str, dict[str, list[dict[str, float]]]] = {
        way: {what: [] for what in case.measured if what != "rate" or way in _RATED} for way in WAYS
    }

    def start(module: str, *arguments: str) -> subprocess.Popen[str]:
        process = stack.enter_context(
            subprocess.Popen(  # noqa: S603 - our own modules
                [python, "-m", f"envbus.bench.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=variables,
            )
        )
        stack.callback(process.kill)
        return process

    addresses: dict[str, list[str]] = {}
    for server in dict.fromkeys(WAYS[way][0] for way in ways if ways[way]):
        process = start("bridge_servers", server, case.name)
        addresses[server] = cast("IO[str]", process.stdout).readline().split()
        if not addresses[server]:
            raise RuntimeError(f"the server of {server} has died; its error is above")
    measured = []
    for way, results in ways.items():
        if not results:
            continue
        server, index = WAYS[way]
        client = start("bridge_clients", way, case.name, addresses[server][index])
        measured.append(_Measured(way, client, results))
    return measured


def _row(case: BridgeCase, measured: _Measured) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "way": measured.way, "status": "ok"}
    for results in measured.results.values():
        for key in results[0].keys() - {"n"}:
            row[key] = asdict(spread_of([result[key] for result in results]))
    return row


def _line(row: dict[str, Any]) -> str:
    told = []
    if "p50_us" in row:
        told += [f"p50 {row['p50_us']['median']:7.1f} us", f"p99 {row['p99_us']['median']:7.1f} us"]
    if "per_second" in row:
        told.append(f"{row['per_second']['median']:9,.0f} actions/s")
    return f"bridge, {row['case']:18} {row['way']:18} {', '.join(told)}"
