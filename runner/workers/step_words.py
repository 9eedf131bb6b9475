"""Steps of all actors at once, asked by words in shared memory instead of messages.

Leaves out when a step may be asked so, and what follows if it does not end so
(`vector/quick_steps.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from envbus.actors.arrays.info_columns import InfoReader
from envbus.actors.protocol import MapInfos
from envbus.bus.errors import NoPeerError
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.transport.spinning import BROKER_SPIN_SECONDS, SpinBudget
from envbus.bus.transport.words import Asker
from envbus.bus.wire.messages import Tree
from envbus.runner.workers.worker import Actor, ActorState

__all__ = ["StepWords"]

#: Seconds of one sleep, at most; less where steps have less time.
_LONGEST_SLEEP: Final = 0.01
#: Infos of one round that are looked at for new forms, and rounds without any after which no more
#: are: infos that never fit cost nothing then.
_LOOKED_AT: Final = 4
_MAX_LESSONS: Final = 100


class StepWords:
    """Asks all actors to step, and waits for them.

    Args:
        asker: The words, by actor.
        infos: What is left beside them.
        actors: All of the fleet, each on this host.
        links: On which they ring.
        spins: Whether to spin in short waits.
        ask: Sends an actor a request whose end nobody waits for.
        timeout: Seconds that a step may take; None: no limit.

    Attributes:
        longest_sleep: Seconds of one sleep. Then what is missing is asked for by message, with all
            that belongs to one: a deadline, and events of all actors.
    """

    def __init__(
        self,
        asker: Asker,
        infos: InfoReader,
        actors: Sequence[Actor],
        links: LocalRouter,
        spins: bool,
        ask: Callable[[Actor, MapInfos], object],
        timeout: float | None,
    ) -> None:
        self.longest_sleep = min(_LONGEST_SLEEP, timeout or math.inf)
        self._ask = ask
        self._asker = asker
        self.infos = infos
        #: Rounds since the last of which a new form of infos was learnt.
        self._learnt_nothing = 0
        #: By index of the actor: its life, and how many forms of infos it was told of.
        self._told: dict[int, tuple[int, int]] = {}
        self._actors = actors
        self._links = links
        #: How often all actors were asked together, and how often one by itself.
        self.rounds = 0
        self._asked_one = 0
        #: Whether an actor may wait for this process' core.
        self._shares_core = len(actors) >= usable_cores()
        self._spinning = SpinBudget(BROKER_SPIN_SECONDS if spins else 0.0)
        #: Seconds of the last wait for all, and whether it was slept through at last.
        self._last_wait = 0.0, False

    @property
    def asked(self) -> int:
        """How often an actor was asked by a word."""
        return self.rounds * len(self._actors) + self._asked_one

    @property
    def waited(self) -> float:
        """Seconds for which it has waited for actors."""
        return self._spinning.waited

    def begin(self) -> int:
        """Return the number of a new step, which nobody has been asked for yet."""
        return self._asker.begin()

    def ask(self) -> None:
        """Ask all for the step that was begun, by the actions in the arena."""
        self.rounds += 1
        for index in self._asker.ask():
            self._links.ring(self._actors[index].identity)

    def ask_one(self, actor: Actor, number: int) -> None:
        """Ask one actor for the step that was begun, by the actions in the arena."""
        self._asked_one += 1
        if self._asker.ask_one(actor.index, number):
            self._links.ring(actor.identity)

    def wait(self) -> bool:
        """Wait until all have stepped; False: somebody has more to tell, or has not for long.

        Raises:
            ClosedError: A signal's handler has closed all.
        """
        asker, clock = self._asker, time.perf_counter
        start = clock()
        waited, slept = self._last_wait
        self._spinning.observe(waited, slept=slept)  # while actors are at work
        number, missing = asker.number, asker.undone()
        if missing >= 0 and self._shares_core and not self._spinning.rests:
            os.sched_yield()  # to go to sleep would take as long as a small step
            missing = asker.undone(missing)
        if missing >= 0 and (spin := self._spinning.seconds()):
            missing = asker.spin(missing, start + spin)
        slept = missing >= 0
        while missing >= 0 and not asker.has_more(missing, number):
            rung = True
            asker.fall_asleep(missing)
            if not asker.answered(missing, number):
                rung = self._links.doze(self.longest_sleep)
            asker.wake_up(missing)
            missing = asker.undone(missing)
            if not rung:
                break
        self._last_wait = clock() - start, slept
        return missing < 0

    def is_more_told(self) -> bool:
        """Return whether anybody has stepped who has more to tell."""
        asker = self._asker
        return any(asker.has_more(index, asker.number) for index in asker.all_undone())

    def learn(self, infos: Mapping[int, Any]) -> bool:
        """Take in infos that came in messages, and have actors leave such in their records.

        Args:
            infos: By env.

        Returns:
            Whether any actor was told of a form that it did not know.
        """
        layout = self.infos.layout
        if infos and self._learnt_nothing < _MAX_LESSONS:
            for info in itertools.islice(infos.values(), _LOOKED_AT):
                layout = layout.with_form_of(info) or layout
            self._learnt_nothing += 1
            if layout is not self.infos.layout:
                self._learnt_nothing = 0
                self.infos.learn(layout)
        count, has_told = len(layout.forms), False
        if not count:
            return False
        for actor in self._actors:
            if self._told.get(actor.index) != (actor.incarnation, count):
                if actor.state is not ActorState.READY:
                    continue
                self._told[actor.index] = (actor.incarnation, count)
                with contextlib.suppress(NoPeerError):  # the event of its end follows
                    self._ask(actor, MapInfos(layout=Tree(layout.to_plain())))
                has_told = True
        return has_told

    def is_busy(self, index: int, number: int) -> bool:
        """Return whether an actor has not done what it was asked under that number."""
        return not self._asker.answered(index, number)

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
        slept = not found
        if slept and timeout > 0.0:
            for index in asked:
                asker.fall_asleep(index)
            rung = True
            while not (found := asker.spin_for_one(asked, 0.0)) and rung:
                rung = self._links.doze(min(self.longest_sleep, timeout))
            for index in asked:
                asker.wake_up(index)
        if found or timeout > 0.0:
            self._spinning.observe(clock() - start, slept=slept)
        return found
