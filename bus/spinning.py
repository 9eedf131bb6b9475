"""Whether to look again and again for a short while before sleeping. Pure.

Waking a sleeping process, maybe on a sleeping core, costs 20 to 60 us; a message that usually comes
sooner is cheaper to wait for awake. Always bounded: who never spins for longer than `SPIN_SECONDS`
per message takes a core from nobody for long.

Source: spin-then-park, as in adaptive mutexes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SPIN_SECONDS", "SpinBudget"]

#: Longest spin. About what a wake-up across two cores costs here (bench/README.md).
SPIN_SECONDS: Final = 50e-6
#: Weight of the latest wait in the running mean.
_WEIGHT: Final = 0.125
#: Waits count at most this much, so that one long pause is forgotten after a few short ones.
_LONGEST: Final = 4 * SPIN_SECONDS


class SpinBudget:
    """Remembers how long waits take, and says how long to spin in the next one.

    Args:
        allowed: Whether there is a core to spin on.
    """

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._typical = _LONGEST

    def seconds(self) -> float:
        """Return for how long to spin: 0.0 if that is not likely to help."""
        return SPIN_SECONDS if self._allowed and self._typical < SPIN_SECONDS else 0.0

    def observe(self, waited: float) -> None:
        """Take in how many seconds a wait took."""
        self._typical += (min(waited, _LONGEST) - self._typical) * _WEIGHT
