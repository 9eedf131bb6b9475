"""How often each of many may do something: a bucket for each, from which it takes. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["RateLimit"]

#: Those who took something are forgotten again once there are so many, if their buckets are full.
_LEAST_SWEPT: Final = 1024


class RateLimit:
    """So many per second for each, of which those of one second may come at once.

    Of each is remembered when its bucket is full again, which is one number.

    Args:
        rate: Over 0 and finite.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._interval = 1.0 / rate
        #: Seconds until a bucket is full of which all but one was taken.
        self._tolerance = max(1.0 - self._interval, 0.0)
        self._full_at: dict[str, float] = {}
        self._sweep_at = _LEAST_SWEPT

    def take(self, who: str, now: float) -> float:
        """Take one, if there is one; return 0.0, or in how many seconds there is.

        Args:
            who: Each has a bucket of its own.
            now: Seconds; must not go back.
        """
        full_at = max(self._full_at.get(who, now), now)
        wait = full_at - now - self._tolerance
        if wait > 1e-9:  # what is left of sums of intervals
            return wait
        self._full_at[who] = full_at + self._interval
        if len(self._full_at) >= self._sweep_at:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}
            self._sweep_at = max(2 * len(self._full_at), _LEAST_SWEPT)
        return 0.0

    def __len__(self) -> int:
        return len(self._full_at)
