"""Whether to look again and again for a short while before sleeping. Pure.

Waking a sleeping process, maybe on a sleeping core, costs 20 to 60 us; a message that usually comes
sooner is cheaper to wait for awake. Who spins gives its core away after each look, so that a
process that has work there is not held up, and never spins for long.

Source: spin-then-park, as in adaptive mutexes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BROKER_SPIN_SECONDS", "CHILD_SPIN_SECONDS", "SpinBudget"]

#: Longest spin of a broker that waits for its children, which need the cores more than it does.
BROKER_SPIN_SECONDS: Final = 100e-6
#: Longest spin of a child that waits for its broker.
CHILD_SPIN_SECONDS: Final = 300e-6
#: Weight of the latest wait in the running mean.
_WEIGHT: Final = 0.125
#: Waits count at most this many times the limit, so that one long pause is forgotten after a few
#: short ones.
_LONGEST: Final = 4


class SpinBudget:
    """Remembers how long waits take, and says how long to spin in the next one.

    Args:
        limit: Longest spin, in seconds; 0.0: never.

    Attributes:
        waited: Seconds of all waits.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._typical = _LONGEST * limit
        self.waited = 0.0

    def seconds(self) -> float:
        """Return for how long to spin: 0.0 if that is not likely to help."""
        return self._limit if self._typical < self._limit else 0.0

    def observe(self, waited: float) -> None:
        """Take in how many seconds a wait took."""
        self.waited += waited
        self._typical += (min(waited, _LONGEST * self._limit) - self._typical) * _WEIGHT
