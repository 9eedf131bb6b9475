from __future__ import annotations

from typing import Any

import pytest

from envbus.runner.inference.policy_calls import HostedPolicy
from envbus.runner.inference.policy_workers import summed
from envbus.runner.policies.policy import Policy


class Unasked(Policy):
    def compute_actions(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def hosted(version: int) -> HostedPolicy:
    policy = Unasked()
    policy.policy_version = version
    return HostedPolicy(policy)


def test_latency_and_batch_sizes_of_all_workers_are_readable() -> None:
    one, other = hosted(5), hosted(4)
    for _ in range(3):
        one.add_batch(4, 0.001)
        one.add_request(4, 0.002)
    other.add_batch(9, 0.1)
    other.add_request(9, 0.2)
    other.counted["failures"] = 1
    total = summed({"w0": one.counts(), "w1": other.counts()})
    assert (total.requests, total.rows, total.batches, total.failures) == (4, 21, 4, 1)
    assert total.batch_sizes == {4: 3, 9: 1}
    assert total.versions == {"w0": 5, "w1": 4}
    assert total.latency_p50_ms == pytest.approx(2.0, rel=0.02)
    assert total.latency_p99_ms == pytest.approx(200.0, rel=0.02)
    assert total.compute_p50_ms == pytest.approx(1.0, rel=0.02)
    text = total.describe()
    assert "21 rows in 4 batches" in text
    assert [line.split()[1] for line in text.splitlines()[1:]] == ["4", "16"]
    assert "###" in text


def test_a_policy_that_nobody_asked_has_no_quantiles() -> None:
    total = summed({"w0": hosted(0).counts()})
    assert total.latency_p50_ms is None
    assert total.describe() == "no batches"
