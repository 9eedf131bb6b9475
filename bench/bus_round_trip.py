"""The bus alone: round trips and messages per second, beside bare pyzmq and a Pipe, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from envbus.bench.adapters.base import Measurement, measurement_of
from envbus.bench.bus_carriers import BUS_CASES, CARRIERS, BusCase, Carrier
from envbus.bench.cases import Schedule
from envbus.bench.record import Record, new_record
from envbus.bench.summary import spread_of

__all__ = ["measure_bus"]

#: Requests in flight while throughput is measured: enough that neither side waits for the other.
WINDOW = 16


@dataclass
class _Carried:
    """One carrier's measurements in one case."""

    carrier: Carrier
    round_trips: list[Measurement] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "case": self.carrier.case.name,
            "answer_bytes": self.carrier.case.answer_bytes,
            "carrier": self.carrier.name,
            "status": "ok",
            "round_trip_p50_us": asdict(spread_of([m.latency_p50_us for m in self.round_trips])),
            "round_trip_p99_us": asdict(spread_of([m.latency_p99_us for m in self.round_trips])),
            "messages_per_second": asdict(spread_of(self.rates)),
        }


def measure_bus(
    schedule: Schedule,
    cases: Sequence[BusCase] = tuple(BUS_CASES.values()),
    say: Callable[[str], None] = print,
) -> Record:
    """Measure all cases; return the record with one row per case and carrier."""
    versions = {name: metadata.version(name) for name in ("pyzmq", "msgspec", "numpy")}
    record = new_record("bus", schedule, {"bus": versions})
    for case in cases:
        carried: list[_Carried] = []
        try:
            carried += [_Carried(carrier(case)) for carrier in CARRIERS.values()]
            order = schedule.order(case.name)
            for _ in range(schedule.rounds):
                order.shuffle(carried)
                for each in carried:
                    _round_trips(each.carrier, schedule.warm_up)
                    each.round_trips.append(_round_trips(each.carrier, schedule.seconds))
                    each.rates.append(_rate(each.carrier, schedule.seconds))
        finally:
            for each in carried:
                each.carrier.close()
        for each in sorted(carried, key=lambda each: list(CARRIERS).index(each.carrier.name)):
            row = each.row()
            record["rows"].append(row)
            say(
                f"bus, {case.name:10} {each.carrier.name:8} round trip "
                f"p50 {row['round_trip_p50_us']['median']:7.1f} us, "
                f"p99 {row['round_trip_p99_us']['median']:7.1f} us, "
                f"{row['messages_per_second']['median']:9,.0f} messages/s"
            )
    return record


def _round_trips(carrier: Carrier, seconds: float) -> Measurement:
    """Ask and wait, one request at a time."""
    ask, wait, clock = carrier.ask, carrier.wait, time.perf_counter_ns
    latencies: list[int] = []
    start = now = clock()
    end = start + int(seconds * 1e9)
    while now < end:
        ask()
        while not wait():
            pass
        before, now = now, clock()
        latencies.append(now - before)
    return measurement_of(len(latencies), latencies, (now - start) / 1e9)


def _rate(carrier: Carrier, seconds: float) -> float:
    """Return answers per second with `WINDOW` requests in flight."""
    for _ in range(WINDOW):
        carrier.ask()
    answered = 0
    start = time.perf_counter()
    end = start + seconds
    while time.perf_counter() < end:
        came = carrier.wait()
        answered += came
        for _ in range(came):
            carrier.ask()
    elapsed = time.perf_counter() - start
    left = WINDOW
    while left:
        left -= carrier.wait()
    return answered / elapsed
