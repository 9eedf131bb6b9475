from __future__ import annotations

import pytest

from envbus.bench import policy_round_trip
from envbus.bench.cases import Schedule
from envbus.bench.policy_round_trip import POLICY_CASES, PolicyAlone, measure_policy


def test_each_way_gets_actions_for_small_and_large_observations() -> None:
    schedule = Schedule(rounds=1, seconds=0.02, warm_up=0.01, starts=1)
    cases = (POLICY_CASES[0], POLICY_CASES[2])
    record = measure_policy(schedule, cases, say=lambda _: None)
    ways = ["policy alone", "bus alone", "policy worker", "policy worker, shared rows"]
    measured = [(row["case"], row["way"]) for row in record["rows"]]
    assert measured == [(case.name, way) for case in cases for way in ways]
    assert all(row["p50_us"]["median"] > 0 for row in record["rows"])


class Lost(PolicyAlone):
    name = "lost"

    def ask(self) -> None:
        raise TimeoutError("no answer")


def test_a_way_that_fails_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_round_trip, "WAYS", (PolicyAlone, Lost))
    schedule = Schedule(rounds=1, seconds=0.01, warm_up=0.01, starts=1)
    record = measure_policy(schedule, POLICY_CASES[:1], say=lambda _: None)
    measured, lost = record["rows"]
    assert measured["status"] == "ok"
    assert (lost["status"], lost["reason"]) == ("failed", "TimeoutError: no answer")
