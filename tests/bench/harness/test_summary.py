from __future__ import annotations

import pytest

from envbus.bench.harness.record import Spread, spread_of


def test_quartiles_are_interpolated() -> None:
    spread = spread_of([4.0, 1.0, 3.0, 2.0])
    assert spread == Spread(min=1.0, q1=1.75, median=2.5, q3=3.25, max=4.0, n=4)


def test_one_measurement_is_its_own_spread() -> None:
    assert spread_of([7.0]) == Spread(min=7.0, q1=7.0, median=7.0, q3=7.0, max=7.0, n=1)


def test_values_keep_five_digits() -> None:
    assert spread_of([123456.789]).median == 123460.0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        spread_of([])
