"""What is counted of policy workers. Pure: whoever measures hands in the durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from envbus.runner.latency import LatencyHistogram
from envbus.runner.policies import Policy
from envbus.runner.policy_protocol import PolicyCounts

__all__ = ["HostedPolicy", "PolicyStatistics", "PolicyWorkersStatistics", "summed"]

_MS = 1e3


class PolicyStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one policy, over the workers' present lives."""

    #: Version by worker.
    versions: dict[str, int]
    requests: int
    rows: int
    #: Calls of the policy; `rows / batches` is how much was gathered.
    batches: int
    failures: int
    #: Refused at once as too much waited / for weights that were too old; not computed as too late.
    overloaded: int
    behind: int
    expired: int
    #: How many calls had how many rows, by rows.
    batch_sizes: dict[int, int]
    #: In the worker, from a request's arrival to its answer; None: there was none.
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    #: Of one call of the policy.
    compute_p50_ms: float | None
    compute_p99_ms: float | None

    def describe(self) -> str:
        """Return them for people, with a bar for each batch size (in powers of two)."""
        if not self.batches:
            return "no batches"
        lines = [
            f"{self.requests} requests, {self.rows} rows in {self.batches} batches; latency "
            f"p50 {self.latency_p50_ms:.3g} ms, p99 {self.latency_p99_ms:.3g} ms; compute "
            f"p50 {self.compute_p50_ms:.3g} ms, p99 {self.compute_p99_ms:.3g} ms"
        ]
        buckets: Counter[int] = Counter()
        for size, count in self.batch_sizes.items():
            buckets[1 << (size - 1).bit_length()] += count
        most = max(buckets.values())
        for bound, count in sorted(buckets.items()):
            bar = "#" * max(1, round(30 * count / most))
            lines.append(f"  <= {bound:6} rows  {count:8}  {bar}")
        return "\n".join(lines)


class PolicyWorkersStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all workers."""

    workers: int
    workers_ready: int
    #: Worker processes started again after they ended.
    restarts: int
    #: Rows that wait in all workers now.
    rows_waiting: int
    policies: dict[str, PolicyStatistics]
    #: Workers that did not answer when they were asked for their counts.
    silent: list[str]


class HostedPolicy:
    """A policy in one worker, how new its weights are, and what is counted of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.push = 0
        self.failures = 0
        self.overloaded = 0
        self.behind = 0
        self.expired = 0
        self._requests = 0
        self._rows = 0
        self._batch_sizes: Counter[int] = Counter()
        self._latency = LatencyHistogram()
        self._compute = LatencyHistogram()

    def add_batch(self, rows: int, seconds: float) -> None:
        """Count one call of the policy."""
        self._batch_sizes[rows] += 1
        self._compute.add(seconds)

    def add_request(self, rows: int, seconds: float) -> None:
        """Count one answer."""
        self._requests += 1
        self._rows += rows
        self._latency.add(seconds)

    def counts(self) -> PolicyCounts:
        """Return what was counted."""
        return PolicyCounts(
            version=self.policy.policy_version,
            push=self.push,
            requests=self._requests,
            rows=self._rows,
            failures=self.failures,
            overloaded=self.overloaded,
            behind=self.behind,
            expired=self.expired,
            batch_sizes=dict(self._batch_sizes),
            latency=self._latency.counts(),
            compute=self._compute.counts(),
        )


def summed(counts: Mapping[str, PolicyCounts]) -> PolicyStatistics:
    """Return the counts of one policy in all workers, which are given by name."""
    sizes: Counter[int] = Counter()
    latency, compute = LatencyHistogram(), LatencyHistogram()
    for one in counts.values():
        sizes.update(one.batch_sizes)
        latency.add_counts(one.latency)
        compute.add_counts(one.compute)
    added = ("requests", "rows", "failures", "overloaded", "behind", "expired")
    return PolicyStatistics(
        versions={name: one.version for name, one in counts.items()},
        batches=sum(sizes.values()),
        batch_sizes=dict(sorted(sizes.items())),
        latency_p50_ms=_ms(latency.quantile(0.5)),
        latency_p99_ms=_ms(latency.quantile(0.99)),
        compute_p50_ms=_ms(compute.quantile(0.5)),
        compute_p99_ms=_ms(compute.quantile(0.99)),
        **{name: sum(getattr(one, name) for one in counts.values()) for name in added},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MS
