"""Steps of all actors at once, asked by words in shared memory instead of messages.

Leaves out when a step may be asked so, and what follows if it does not end so (`quick_steps.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from envbus.bus.spinning import BROKER_SPIN_SECONDS, SpinBudget
from envbus.bus.words import Asker
from envbus.runner.actor import Actor
from envbus.runner.links import Links

__all__ = ["StepWords"]

#: Seconds of one sleep. Then what is missing is asked for by message, with all that belongs to one:
#: a deadline, and news of all actors.
_LONGEST_SLEEP: Final = 0.01


class StepWords:
    """Asks all actors to step, and waits for them.

    Args:
        asker: The words, by actor.
        actors: All of the fleet, each on this host.
        links: By which they ring.
    """

    def __init__(self, asker: Asker, actors: Sequence[Actor], links: Links[Actor]) -> None:
        self._asker = asker
        self._actors = actors
        self._links = links
        self._asked = 0
        self._spinning = SpinBudget(BROKER_SPIN_SECONDS if links.spins else 0.0)

    @property
    def asked(self) -> int:
        """How often an actor was asked by a word."""
        return self._asked

    def begin(self) -> int:
        """Return the number of a new step, which nobody has been asked for yet."""
        return self._asker.begin()

    def ask(self) -> None:
        """Ask all for the step that was begun, by the actions in the arena."""
        self._asked += len(self._actors)
        for index in self._asker.ask():
            self._links.ring(self._actors[index])

    def ask_one(self, actor: Actor) -> int:
        """Ask one actor to step by the actions in the arena; return the step's number."""
        number = self._asker.begin()
        self._asked += 1
        if self._asker.ask_one(actor.index, number):
            self._links.ring(actor)
        return number

    def wait(self) -> bool:
        """Wait until all have stepped; False: somebody has more to tell, or has not for long.

        Raises:
            ClosedError: A signal's handler has closed all.
        """
        asker, clock = self._asker, time.perf_counter
        start = clock()
        number, missing = asker.number, asker.undone()
        if missing >= 0 and (spin := self._spinning.seconds()):
            missing = asker.spin(missing, start + spin)
        while missing >= 0 and not asker.has_more(missing, number):
            rung = True
            asker.fall_asleep(missing)
            if not asker.answered(missing, number):
                rung = self._links.doze(_LONGEST_SLEEP)
            asker.wake_up(missing)
            missing = asker.undone(missing)
            if not rung:
                break
        self._spinning.observe(clock() - start)
        return missing < 0

    def is_more_told(self) -> bool:
        """Return whether anybody has stepped who has more to tell."""
        asker = self._asker
        return any(asker.has_more(index, asker.number) for index in asker.all_undone())

    def missing(self) -> list[int]:
        """Return, by index, who has not stepped, or has more to tell."""
        return self._asker.all_undone()

    def wait_for_one(self, asked: Mapping[int, int], timeout: float) -> dict[int, bool]:
        """Wait until one has stepped; return all who have, and whether they have more to tell.

        Args:
            asked: By index, the numbers of steps.
            timeout: Seconds, of which it takes some milliseconds at most.

        Returns:
            Nobody if it took long, or something else has come that messages tell of.

        Raises:
            ClosedError: A signal's handler has closed all.
        """
        asker, clock = self._asker, time.perf_counter
        start = clock()
        found = asker.spin_for_one(asked, start + min(self._spinning.seconds(), timeout))
        if not found and timeout > 0.0:
            for index in asked:
                asker.fall_asleep(index)
            rung = True
            while not (found := asker.spin_for_one(asked, 0.0)) and rung:
                rung = self._links.doze(min(_LONGEST_SLEEP, timeout))
            for index in asked:
                asker.wake_up(index)
        self._spinning.observe(clock() - start)
        return found
