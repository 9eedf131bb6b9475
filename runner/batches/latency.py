"""Quantiles of durations in bounded memory.

Pure: whoever measures hands in the durations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["BUCKETS", "LatencyHistogram"]

#: Each bucket is 2 % wider than the last, so that a quantile is off by 1 % at most: less than
#: the same program varies from minute to minute.
_GROWTH = 1.02
#: Bounds of the buckets in seconds; what lies outside is counted in the outermost ones.
_LOWEST = 1e-7
_HIGHEST = 1e4
BUCKETS: Final = math.ceil(math.log(_HIGHEST / _LOWEST, _GROWTH))
_SCALE = 1.0 / math.log(_GROWTH)
_OFFSET = -math.log(_LOWEST) * _SCALE


class LatencyHistogram:
    """Counts durations in buckets of equal ratio. A run of hours takes the same 10 kB."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = int(math.log(seconds) * _SCALE + _OFFSET) if seconds > _LOWEST else 0
        self._counts[bucket if bucket < BUCKETS else -1] += 1
        self._total += 1

    def counts(self) -> dict[int, int]:
        """Return the buckets that are not empty, for `add_counts` of another one."""
        return {bucket: count for bucket, count in enumerate(self._counts) if count}

    def add_counts(self, counts: Mapping[int, int]) -> None:
        """Count what another one has counted."""
        for bucket, count in counts.items():
            self._counts[bucket] += count
            self._total += count

    def cumulative(self, bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
        """Return, for a histogram of Prometheus, how many do not exceed each bound, and their sum.

        Args:
            bounds: In seconds, ascending; "+Inf" is added.
        """
        found: list[tuple[str, float]] = []
        seen, total = 0, 0.0
        left = deque(bounds)
        for bucket, count in enumerate(self._counts):
            middle = _LOWEST * _GROWTH ** (bucket + 0.5)
            while left and middle > left[0]:
                found.append((str(left.popleft()), float(seen)))
            seen += count
            total += count * middle
        found += [(str(bound), float(seen)) for bound in left]
        return [*found, ("+Inf", float(seen))], total

    def quantile(self, fraction: float) -> float | None:
        """Return the duration in seconds that `fraction` of all do not exceed; None without any.

        Raises:
            ValueError: `fraction` is not from 0 to 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a fraction lies between 0 and 1, got {fraction}")
        if not self._total:
            return None
        rank = max(1, math.ceil(fraction * self._total))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return float(_LOWEST * _GROWTH ** (bucket + 0.5))
        raise AssertionError("fewer durations in the buckets than counted")
