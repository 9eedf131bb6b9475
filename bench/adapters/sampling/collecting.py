"""What adapters of the sampling benchmark have in common: fragment after fragment, timed."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from envbus.bench.adapters.base import Measurement, Timed, measurement_of

__all__ = ["Collecting", "Span", "fragment_of", "parts_within"]

#: From when to when something was under way, in any unit.
Span: TypeAlias = tuple[int, int]

#: Steps of each env in one fragment; fewer of pixels, which are large, and more where some take
#: long, which evens out.
_FRAGMENTS = {"pixels": 32, "jitter": 128}
_DEFAULT = 64


def fragment_of(workload: str) -> int:
    """Return the steps of each env in one fragment."""
    return _FRAGMENTS.get(workload, _DEFAULT)


def parts_within(spans: Iterable[Span], start: int, end: int) -> float:
    """Return how many of these were under way from `start` to `end`, by the parts that were.

    Fragments that come at any time are counted right only so: whole ones would make it a question
    of which of them are just ready at both ends.
    """
    return sum(
        max(min(ended, end) - max(begun, start), 0) / (ended - begun) for begun, ended in spans
    )


class Collecting(Timed):
    """Collects fragments; a latency is the time of one."""

    @abstractmethod
    def collect(self) -> int:
        """Collect one fragment with the library's own collector; return its env steps."""

    def run(self, ring: Sequence[npt.NDArray[Any]], seconds: float) -> Measurement:
        """Collect for `seconds` of wall time, whole fragments."""
        del ring  # the policy chooses the actions
        clock = time.perf_counter_ns
        latencies: list[int] = []
        env_steps = 0
        start = now = clock()
        while now < start + int(seconds * 1e9):
            env_steps += self.collect()
            before, now = now, clock()
            latencies.append(now - before)
        return measurement_of(env_steps, latencies, (now - start) / 1e9)
