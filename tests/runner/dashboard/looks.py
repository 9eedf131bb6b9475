"""Runs made by hand, and a dashboard that shows them."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from envbus.runner.dashboard.server import DashboardServer
from envbus.runner.monitoring.figures import (
    FaultFigures,
    PartFigures,
    ProcessFigures,
    RunFigures,
    fault_figures,
)
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.monitoring.runs import Usage
from tests.waiting import PATIENCE

__all__ = ["Answer", "crash", "get", "observed", "part_of", "running", "serving"]

TOKEN = "a-token-for-tests"
LOOPBACK = "127.0.0.1:0"


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    headers: dict[str, str]
    body: bytes


def part_of(num_actors: int, name: str = "BusVectorEnv-1", **fields: Any) -> PartFigures:
    """Return a part whose actors host two envs each, with process ids from 1000 on."""
    processes = [
        ProcessFigures(
            name=f"actor-{index}",
            pid=1000 + index,
            state="ready",
            envs=(2 * index, 2 * index + 2),
            env_steps=100,
        )
        for index in range(num_actors)
    ]
    return PartFigures(
        **{"name": name, "kind": name.partition("-")[0], "processes": processes} | fields
    )


def observed(*parts: PartFigures, pid: int = 7, **fields: Any) -> ObservedRun:
    """Return a run whose processes are all there."""
    run = RunFigures(
        pid=pid, at=100.0, began=0.0, command="train.py", version="0.1.0", parts=list(parts)
    )
    pids = {process.pid for part in parts for process in part.processes if process.pid is not None}
    usage = {pid: Usage(0.5, 2**20) for pid in {*pids, pid}}
    return ObservedRun(run, **{"owner": pid, "usage": usage} | fields)


def crash(at: float, message: str = "exit code 1", process: str = "actor-0") -> FaultFigures:
    """Return the fault of an actor that has crashed."""
    return fault_figures(at, "crash", process, message)


@contextlib.contextmanager
def serving(look: Callable[[], Sequence[ObservedRun]] | None = None) -> Iterator[DashboardServer]:
    """A dashboard that is served by a thread; without `look`, of what works in this process."""
    look = Observer(os.getpid()).look if look is None else look
    with running(DashboardServer(LOOPBACK, token=TOKEN, look=look)) as server:
        yield server


@contextlib.contextmanager
def running(server: DashboardServer) -> Iterator[DashboardServer]:
    """A dashboard that is served by a thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
        server.close()
        assert not thread.is_alive()


def get(server: DashboardServer, path: str, *, method: str = "GET", **headers: str) -> Answer:
    """Return what a path answers; of an underscore in the name of a header becomes a dash."""
    with contextlib.closing(
        http.client.HTTPConnection(server.address, timeout=PATIENCE)
    ) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
