from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.connectors import Moments


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e6]),
)
def test_merged_moments_are_those_of_all_rows_together(
    parts: list[list[float]], offset: float
) -> None:
    merged = Moments()
    for part in parts:
        merged = merged.merge(Moments.of([np.array(part) + offset]))
    rows = np.array([value for part in parts for value in part]) + offset
    assert merged.count == len(rows)
    if len(rows):
        assert merged.means[0] == pytest.approx(rows.mean(), abs=1e-6)
        assert merged.variances()[0] == pytest.approx(rows.var(), rel=1e-6, abs=1e-6)


def test_the_order_of_merging_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (Moments.of([rng.normal(size=(n, 3)), rng.normal(size=n)]) for n in (1, 5, 9))
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert left.means[0] == pytest.approx(right.means[0])
    assert left.m2s[1] == pytest.approx(right.m2s[1])


def test_a_state_goes_there_and_back() -> None:
    before = Moments.of([np.arange(6.0).reshape(3, 2)])
    after = Moments.from_plain(before.to_plain())
    assert (after.count, after.means[0].tolist()) == (3, [2.0, 3.0])
    assert Moments.from_plain(Moments().to_plain()) == Moments()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_would_spoil_the_moments_for_ever_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="NaN, infinity"):
        Moments.of([np.array([0.0, value])])


def test_rows_of_other_shapes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="do not merge"):
        Moments.of([np.zeros((1, 2))]).merge(Moments.of([np.zeros((1, 3))]))
