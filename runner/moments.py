"""Mean and variance of rows that come in batches, in several places, and are merged. Pure.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances", Stanford STAN-CS-79-773, 1979: for parts A and B, with `d` the
difference of their means, `mean = mean_A + d * n_B / n` and `M2 = M2_A + M2_B + d^2 * n_A * n_B /
n`. It does not cancel as the difference of the mean square and the squared mean does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Moments"]


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the rows of several arrays at once; a value: nothing changes it.

    `Moments()` is that of no rows and merges with all.
    """

    #: Rows.
    count: int = 0
    #: Per array, float64, shape of a row.
    means: tuple[npt.NDArray[np.float64], ...] = ()
    #: Sums of squared deviations from the mean, likewise.
    m2s: tuple[npt.NDArray[np.float64], ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[npt.NDArray[Any]]) -> Moments:
        """Return the moments of arrays `(rows, ...)`.

        Raises:
            ValueError: A row holds NaN or infinity, which nothing would ever wash out again.
        """
        if not arrays or not len(arrays[0]):
            return cls()
        rows = [array.astype(np.float64) for array in arrays]
        with np.errstate(all="ignore"):  # it is told below
            means = tuple(array.mean(axis=0) for array in rows)
            m2s = tuple(
                np.square(array - mean).sum(axis=0) for array, mean in zip(rows, means, strict=True)
            )
        if not all(np.isfinite(m2).all() for m2 in m2s):
            raise ValueError("an observation holds NaN, infinity, or a number too large to square")
        return cls(len(rows[0]), means, m2s)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows together.

        Raises:
            ValueError: They are of arrays of different numbers or shapes.
        """
        if not self.count or not other.count:
            return self if self.count else other
        shapes = [mean.shape for mean in self.means]
        if shapes != [mean.shape for mean in other.means]:
            raise ValueError(
                f"rows of shapes {shapes} and {[mean.shape for mean in other.means]} do not merge"
            )
        count = self.count + other.count
        means, m2s = [], []
        for mean, m2, mean_b, m2_b in zip(
            self.means, self.m2s, other.means, other.m2s, strict=True
        ):
            difference = mean_b - mean
            means.append(mean + difference * (other.count / count))
            m2s.append(m2 + m2_b + np.square(difference) * (self.count * other.count / count))
        return Moments(count, tuple(means), tuple(m2s))

    def variances(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Return the variance of the rows (not an estimate from a sample); 0 without any."""
        return tuple(m2 / max(self.count, 1) for m2 in self.m2s)

    def to_plain(self) -> dict[str, Any]:
        """Return numbers, lists and arrays."""
        return {"count": self.count, "means": list(self.means), "m2s": list(self.m2s)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Moments:
        """Return what `to_plain` was called on."""
        return cls(int(plain["count"]), *(_float64(plain[name]) for name in ("means", "m2s")))


def _float64(arrays: Sequence[npt.ArrayLike]) -> tuple[npt.NDArray[np.float64], ...]:
    return tuple(np.array(array, np.float64) for array in arrays)
