"""What actors are doing that do not answer: the stacks of their threads, as text.

Leaves out how a process is asked (`bus/stacks.py`) and who counts as hung (`endings.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from envbus.bus.nursery import Nursery
from envbus.bus.process import Child
from envbus.runner.actor import Member

__all__ = ["StackReports"]

#: Seconds for all actors that are asked at one time. They need some ten milliseconds, unless they
#: were stopped.
_TIMEOUT: Final = 0.3
#: Seconds for which an answer is shown again instead of asking anew: whoever waits in short turns
#: is not to be held up each time.
_FRESH: Final = 1.0


class StackReports:
    """Asks the actors of one nursery."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        #: By child: when it was asked last, and what came.
        self._known: dict[Child, tuple[float, str]] = {}

    def of(self, actors: Sequence[Member]) -> list[str]:
        """Return for each actor the stacks of its threads with a headline, or why there are none.

        Holds the caller up for 0.3 s at most; with py-spy installed for some seconds more.
        """
        now = time.monotonic()
        children = {actor.child for actor in actors}
        running = self._nursery.children
        self._known = {child: known for child, known in self._known.items() if child in running}
        fresh = {child for child, (asked_at, _) in self._known.items() if now - asked_at <= _FRESH}
        asked = [child for child in running if child in children and child not in fresh]
        if asked:
            texts = self._nursery.stacks(asked, _TIMEOUT)
            self._known.update(
                (child, (now, text)) for child, text in zip(asked, texts, strict=True)
            )
        return [self._describe(actor, now) for actor in actors]

    def _describe(self, actor: Member, now: float) -> str:
        if actor.child is None or actor.child not in self._known:
            why = "it runs on another machine" if actor.remote else "its process has ended"
            return f"No stack of {actor.describe()}: {why}."
        asked_at, text = self._known[actor.child]
        age = f", {now - asked_at:.1f} s ago" if now - asked_at >= _FRESH / 2 else ""
        indented = text.replace("\n", "\n  ")
        return f"Stack of {actor.describe()}{age}:\n  {indented}"
