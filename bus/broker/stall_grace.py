"""When deadlines may be judged by one who was away, or stopped as a process. Pure.

Who was away has to take what came meanwhile first. For a process that was stopped (SIGSTOP, a
debugger, a laptop that slept) that is not all: its requests may not have left it, and answers may
be on their way in, since libzmq's own thread was stopped, too. So it looks on for a moment.
"""

from __future__ import annotations

__all__ = ["AWAY", "GRACE", "StallGrace"]

#: Seconds without a look, beyond what was to be waited, after which one was away.
AWAY = 0.1
#: Seconds that are looked on before anything is judged: enough for a request to leave, for a short
#: step, and for its answer, also where other programs have the cores.
GRACE = 0.5


class StallGrace:
    """Notices absences, and postpones judgement once for each."""

    def __init__(self) -> None:
        self._left: float | None = None
        self._was_away = False
        self._judge_at: float | None = None

    def looks(self, begun: float, waited: float, now: float) -> None:
        """A look that began at `begun` and was to wait for `waited` seconds ends `now`."""
        absent = now - begun - waited
        if self._left is not None:
            absent += begun - self._left
        self._was_away = absent > AWAY

    def is_away(self, now: float) -> bool:
        """Return whether the last look was long ago."""
        return self._left is not None and now - self._left > AWAY

    def leaves(self, now: float) -> None:
        """All that the look has found is dealt with."""
        self._left = now

    def wake_at(self, due: float) -> float:
        """Return when to look again at what is due then."""
        return due if self._judge_at is None else max(due, self._judge_at)

    def may_judge(self, due: float | None, now: float) -> bool:
        """Return whether what was due at a time is to be judged now; None: nothing is due ever.

        Absences that follow each other postpone it only once, so that who looks now and then is
        told as well.
        """
        if due is None or due > now:
            self._judge_at = None
            return False
        if self._judge_at is None and self._was_away:
            self._judge_at = now + GRACE
        if self._judge_at is not None and now < self._judge_at:
            return False
        self._judge_at = None
        return True
