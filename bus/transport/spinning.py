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
#: Weight of the latest wait in the running share.
_WEIGHT: Final = 0.125
#: Share of waits that must end within a spin for spins to pay.
_ENOUGH: Final = 0.6
#: Seconds of a wait that was slept through which are the wake-up's: who spins does without.
_WAKE_UP: Final = 60e-6
#: Seconds after which somebody else had the core, where a spin has found its answer at last.
_TAKEN: Final = 1e-3
#: Waits without a spin after that: at first, and at most, if it happens again and again.
_FIRST_REST: Final = 16
_LONGEST_REST: Final = 4096
#: Waits that were spun for without that, and halve the next rest.
_FORGOTTEN: Final = 16


class SpinBudget:
    """Remembers how many waits are short, and says how long to spin in the next one.

    Not how long they take on average: one of many that is long would keep the others asleep, and
    that they take longer asleep would keep them so.

    Whoever spins gives the core away again and again. A busy process may then keep it for
    milliseconds, where whoever sleeps is woken at once. So it rests after that, for longer the more
    often it happens.

    Args:
        limit: Longest spin, in seconds; 0.0: never.

    Attributes:
        waited: Seconds of all waits.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._share_of_short = 0.0
        #: Waits that are still to be slept through, how many are the next time, and how many were
        #: spun for since, or since it was halved.
        self._rest, self._next_rest, self._spun = 0, _FIRST_REST, 0
        self.waited = 0.0

    @property
    def rests(self) -> bool:
        """Whether somebody else wants the core."""
        return self._rest > 0

    def seconds(self) -> float:
        """Return for how long to spin: 0.0 if that is not likely to help."""
        return self._limit if self._share_of_short > _ENOUGH and not self._rest else 0.0

    def observe(self, waited: float, *, slept: bool) -> None:
        """Take in how many seconds a wait took, and whether it was slept through at last."""
        self.waited += waited
        slept_at_once = slept and not self.seconds()
        is_short = waited < (self._limit + _WAKE_UP if slept_at_once else self._limit)
        self._share_of_short += (is_short - self._share_of_short) * _WEIGHT
        if self._rest:
            self._rest -= slept
        elif not slept:
            self._spun += 1
            if waited > _TAKEN:
                self._rest, self._spun = self._next_rest, 0
                self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
            elif self._spun >= _FORGOTTEN:
                self._next_rest, self._spun = max(self._next_rest // 2, _FIRST_REST), 0
