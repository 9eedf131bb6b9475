"""The process that asks: `python -m envbus.bench.requests.client KIND WAY CASE [ADDRESS]`.

Writes a line of JSON with versions. Then it reads lines `latency SECONDS` or `rate SECONDS`, and
answers each with a line of JSON: how long one request at a time takes, or how many of several in
flight are answered per second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from envbus.bench.requests.cases import RequestCase

__all__ = ["latency", "rate"]

_DISTRIBUTIONS = ("pyzmq", "msgspec", "numpy", "websockets", "grpcio")


def latency(ask: Callable[[], object], seconds: float) -> dict[str, float]:
    """Ask one at a time; return quantiles in microseconds."""
    clock = time.perf_counter_ns
    times = []
    now = clock()
    end = now + int(seconds * 1e9)
    while now < end:
        ask()
        before, now = now, clock()
        times.append((now - before) / 1e3)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {"p50_us": p50, "p99_us": p99}


def rate(turn: Callable[[], int], seconds: float) -> dict[str, float]:
    """Take turns, each of which returns how many were answered; return how many per second."""
    begin = now = time.perf_counter()
    answered = 0
    while now < begin + seconds:
        answered += turn()
        now = time.perf_counter()
    return {"per_second": answered / (now - begin)}


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    """Measure what is asked for, until the input ends."""
    kind, way, case, address = sys.argv[1:]
    print(json.dumps(_versions()), flush=True)
    module = importlib.import_module(f"envbus.bench.requests.{kind}")
    opened: dict[str, Any] = {}
    for line in sys.stdin:
        what, seconds = line.split()
        make, measure = (module.ASKS, latency) if what == "latency" else (module.TURNS, rate)
        if what not in opened:
            opened[what] = make[way](RequestCase.of(case), address)
        print(json.dumps(measure(opened[what], float(seconds))), flush=True)


if __name__ == "__main__":
    main()
