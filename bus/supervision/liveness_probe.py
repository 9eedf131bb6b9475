"""Whether a child process hangs: it is asked for a sign of life, which it gives when it can.

Pure: times are handed in, in seconds of a clock that never goes back. Leaves out how it is asked
and killed: `gateway/gateway.py`, `runner/inference/policy_processes.py`.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["PROBE", "LivenessProbe", "Verdict"]

#: What asks a child for a sign of life, over its pipe.
PROBE: Final = b"probe"

#: Questions per `timeout`: a hang is noticed after one to one and a half of it.
_PER_TIMEOUT: Final = 2
#: Seconds by which a look may be late; one that is later says that nobody ran meanwhile.
_SLACK: Final = 1.0


class Verdict(enum.Enum):
    """What is to be done."""

    NOTHING = "nothing"
    ASK = "ask"
    HUNG = "hung"


class LivenessProbe:
    """One life of one child, from the time that it is up.

    Time in which this side did not look does not count: who is stopped, or suspended, together with
    its children does not kill them when it wakes up.

    Args:
        timeout: Seconds without a sign of life after a question; positive.
        now: When it came up.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._looked = now
        self._ask_at = now + timeout / _PER_TIMEOUT
        #: When it hangs; None: it was not asked since its last sign of life.
        self._hung_at: float | None = None
        self._was_given_grace = False

    def wake_at(self) -> float:
        """Return when `look` is worth a call."""
        due = self._ask_at if self._hung_at is None else self._hung_at
        # Often enough to know whether this side was away.
        return min(due, self._looked + self._timeout / _PER_TIMEOUT)

    def look(self, now: float) -> Verdict:
        """Judge; who is to be asked was asked from then on."""
        away = now - self.wake_at() - _SLACK
        self._looked = now
        if self._hung_at is None:
            if now < self._ask_at:
                return Verdict.NOTHING
            self._hung_at, self._was_given_grace = now + self._timeout, False
            return Verdict.ASK
        if away > 0.0:
            self._hung_at += away
            if not self._was_given_grace:  # it may have been away, too; once, or nobody who often
                # is away would ever find out
                self._hung_at = max(self._hung_at, now + _SLACK)
                self._was_given_grace = True
        return Verdict.HUNG if now >= self._hung_at else Verdict.NOTHING

    def alive(self, now: float) -> None:
        """It has given a sign of life."""
        self._hung_at = None
        self._ask_at = now + self._timeout / _PER_TIMEOUT
