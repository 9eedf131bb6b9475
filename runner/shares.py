"""What an env has to contribute to a sample, and which rows of it wait to be taken. Pure.

Leaves out how much is asked of whom (`sampling.py`) and how rows come about (`episodes.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from envbus.runner.fragment import Fragment
from envbus.runner.sampling import Demand, Phase
from envbus.runner.slot import Slot

__all__ = ["Share"]


class Share:
    """The part of one env.

    Attributes:
        index: Which of all shares.
        slots: The env, by its id.
    """

    def __init__(self, index: int, slots: Iterable[Slot] = ()) -> None:
        self.index = index
        self.slots = {slot.env_id: slot for slot in slots}
        #: Of episodes that are over, and how much these have.
        self._waiting: deque[Fragment] = deque()
        self._env_steps = 0
        self._agent_steps = 0
        self._episodes = 0
        self._quota = 0

    @property
    def live(self) -> bool:
        """Whether it can contribute: the env was not given up."""
        return any(slot.phase is not Phase.LOST for slot in self.slots.values())

    @property
    def stepping(self) -> bool:
        """Whether the env was sent actions and has not answered."""
        return any(slot.phase is Phase.STEPPING for slot in self.slots.values())

    def begin(self, quota: int) -> None:
        """Begin a sample to which it is to contribute as much."""
        self._quota = quota

    def collect(self, fragment: Fragment, *, faulty: bool) -> None:
        """An episode is over, with these rows."""
        self._waiting.append(fragment)
        self._env_steps += fragment.env_steps
        self._agent_steps += fragment.agent_steps
        self._episodes += not faulty

    def met(self, demand: Demand) -> bool:
        """Return whether it has contributed its part, or cannot."""
        if not self.live or (self._quota == 0 and demand.complete):
            return True
        if demand.complete and any(slot.phase >= Phase.WAITING for slot in self.slots.values()):
            return False
        if demand.unit == "episodes":
            return self._episodes >= self._quota
        running = [slot.episode for slot in self.slots.values() if slot.episode is not None]
        if demand.unit == "agent_steps":
            count = self._agent_steps + sum(episode.agent_steps for episode in running)
        else:
            count = self._env_steps + sum(episode.env_steps for episode in running)
        return count >= self._quota

    def take(self, demand: Demand) -> list[Fragment]:
        """Return what it contributes to the sample that ends."""
        fragments = [*self._waiting]
        if not demand.complete:
            for slot in self.slots.values():
                if slot.episode is not None and slot.episode.env_steps:
                    fragments.append(slot.episode.cut())
        self._waiting.clear()
        self._env_steps = self._agent_steps = self._episodes = 0
        return fragments
