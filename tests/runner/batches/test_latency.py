from __future__ import annotations

import math

import numpy as np
import pytest

from envbus.runner.batches.latency import LatencyHistogram


def test_a_quantile_is_within_one_percent_of_the_exact_one() -> None:
    durations = np.random.default_rng(0).lognormal(mean=-7.0, sigma=1.0, size=5000)
    histogram = LatencyHistogram()
    for duration in durations:
        histogram.add(float(duration))
    for fraction in (0.01, 0.5, 0.99, 1.0):
        exact = float(np.quantile(durations, fraction, method="inverted_cdf"))
        assert histogram.quantile(fraction) == pytest.approx(exact, rel=0.011)


def test_counts_of_several_processes_add_up() -> None:
    total, part = LatencyHistogram(), LatencyHistogram()
    for seconds in (0.001, 0.001, 0.1):
        part.add(seconds)
    total.add(0.1)
    total.add_counts(part.counts())
    assert len(total) == 4
    assert total.quantile(0.5) == part.quantile(0.5)
    assert total.quantile(0.75) == part.quantile(1.0)


def test_nothing_counted_has_no_quantile() -> None:
    assert LatencyHistogram().quantile(0.5) is None


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e9])
def test_durations_outside_of_the_buckets_are_counted_in_the_outermost(seconds: float) -> None:
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert len(histogram) == 1
    only = histogram.quantile(0.5)
    assert only is not None
    assert only > 0
    assert histogram.quantile(0.0) == histogram.quantile(1.0) == only


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        LatencyHistogram().quantile(fraction)
