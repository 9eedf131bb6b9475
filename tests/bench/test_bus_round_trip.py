from __future__ import annotations

from envbus.bench.bus_carriers import BUS_CASES, CARRIERS
from envbus.bench.bus_round_trip import measure_bus
from envbus.bench.cases import Schedule


def test_each_carrier_carries_small_and_large_answers() -> None:
    schedule = Schedule(rounds=1, seconds=0.02, warm_up=0.01, starts=1)
    cases = [BUS_CASES["signal"], BUS_CASES["one frame"]]
    record = measure_bus(schedule, cases, say=lambda _: None)
    measured = [(row["case"], row["carrier"]) for row in record["rows"]]
    assert measured == [(case.name, carrier) for case in cases for carrier in CARRIERS]
    for row in record["rows"]:
        assert row["round_trip_p50_us"]["median"] > 0
        assert row["messages_per_second"]["median"] > 0
