"""What others do, logged within a rate: they choose how often they do it, and may be many."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from envbus.bus.brief import cut, printable

__all__ = ["PROGRESS_AFTER", "Complaints", "Lines"]

#: Seconds of silence until what takes its time says so.
PROGRESS_AFTER: Final = 2.0
#: Seconds between two log lines of one kind; what lies between is counted.
_EVERY: Final = 5.0
#: Characters of a line: texts may hold what others have sent.
_LONGEST: Final = 2000
#: Lines about others in so many seconds, whatever they are about.
_MOST_LINES: Final = 100
_WINDOW: Final = 60.0


class Complaints:
    """Counts, and a log that nobody can fill. One thread uses it.

    Attributes:
        counts: By kind. Kinds are chosen by the program, never by those who are complained about.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        every: float = _EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._every = every
        self._clock = clock
        #: By kind: when it was told last, and the count then.
        self._told: dict[str, tuple[float, int]] = {}

    def add(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Count one, and tell of it unless one of its kind was told just now.

        Args:
            kind: What it is about.
            text: For people; one line is made of it.
            error: Whose traceback is logged, too.
        """
        self.counts[kind] += 1
        count, now = self.counts[kind], self._clock()
        last, told = self._told.get(kind, (-self._every, 0))
        if told and now - last < self._every:
            return
        self._told[kind] = now, count
        between = count - told - 1
        more = f" (and {between} more like it)" if between else ""
        self._logger.warning("%s%s", printable(cut(text, _LONGEST)), more, exc_info=error)


class Lines:
    """Lines of a log that others cause: each is worth reading, too many are not. One thread."""

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._since = -_WINDOW
        self._count = 0

    def add(self, level: int, text: str) -> None:
        """Tell of something, unless too much was told just now."""
        now = self._clock()
        if now - self._since >= _WINDOW:
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= _MOST_LINES:
            left = self._since + _WINDOW - now
            more = f" (more is left out for {left:.0f} s)" if self._count == _MOST_LINES else ""
            self._logger.log(level, "%s%s", printable(cut(text, _LONGEST)), more)
