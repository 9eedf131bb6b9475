"""An adapter's process: JSON lines in on standard input, JSON lines out on standard output.

Run by the harness as `python -m envbus.bench.adapters MODULE` with the interpreter of the
library's own environment. Requests: `{"op": "open", ...}`, `{"op": "run", ...}`,
`{"op": "kill"}`, `{"op": "close"}`; each has one reply, `{"error": "..."}` if it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict
from importlib import metadata
from types import ModuleType
from typing import IO, Any

from envbus.bench.adapters.base import Killable, Opening, Timed
from envbus.bench.adapters.workloads import action_ring

__all__ = ["main"]


class LibrarySession:
    """One adapter's life: opened at most once, run as often as asked."""

    def __init__(self, adapter: ModuleType) -> None:
        self._adapter = adapter
        self._stepper: Timed | None = None
        self._ring: list[Any] = []

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Perform one request and return its reply."""
        match request["op"]:
            case "open":
                opening = Opening(request["workload"], request["num_envs"], request["options"])
                self._ring = action_ring(opening.workload, opening.num_envs)
                start = time.perf_counter()
                self._stepper = self._adapter.open_stepper(opening)
                return {"seconds": time.perf_counter() - start}
            case "run":
                if self._stepper is None:
                    raise RuntimeError("run before open")
                if request["warm_up"]:
                    self._stepper.run(self._ring, request["warm_up"])
                return asdict(self._stepper.run(self._ring, request["seconds"]))
            case "kill":
                if self._stepper is None:
                    raise RuntimeError("kill before open")
                if not isinstance(self._stepper, Killable):
                    raise TypeError("this library is not part of that comparison")
                outcome = self._stepper.kill_one(self._ring)
                return {"outcome": type(outcome).__name__, **asdict(outcome)}
            case "close":
                if self._stepper is not None:
                    self._stepper.close()
                return {}
            case other:
                raise ValueError(f"unknown request {other!r}")


def _versions(distributions: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # e.g. envbus run from a checkout that is on the path
    return found


def _own_pipes() -> tuple[IO[str], IO[str]]:
    """Keep the harness's pipes to ourselves: libraries and their children print and read, too."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def main() -> int:
    requests, replies = _own_pipes()
    adapter = importlib.import_module(f"envbus.bench.adapters.{sys.argv[1]}")
    session = LibrarySession(adapter)
    print(json.dumps({"versions": _versions(adapter.DISTRIBUTIONS)}), file=replies)
    for line in requests:
        request = json.loads(line)
        try:
            reply = session.handle(request)
        except Exception as error:
            # The harness reports a library that fails; it must not end the whole comparison.
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
        if request["op"] == "close":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
