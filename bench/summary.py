"""Medians and spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Spread", "spread_of"]


@dataclass(frozen=True)
class Spread:
    """What several measurements of one thing came to, in the unit of the measurements."""

    min: float
    q1: float
    median: float
    q3: float
    max: float
    n: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the five-number summary of `values`; quartiles by linear interpolation.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no measurement to summarise")
    if len(values) == 1:
        q1 = median = q3 = float(values[0])
    else:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    low, q1, median, q3, high = (
        float(f"{value:.5g}") for value in (min(values), q1, median, q3, max(values))
    )
    return Spread(min=low, q1=q1, median=median, q3=q3, max=high, n=len(values))
