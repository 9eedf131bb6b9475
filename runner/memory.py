"""How much memory each actor uses, looked at now and then.

Leaves out what follows from it: too much ends an actor (`endings.py`) or has it exchanged
(`recycling.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from envbus.bus.memory import tree_memory
from envbus.runner.actor import ActorState, Member

__all__ = ["MemoryWatch"]

M = TypeVar("M", bound=Member)

#: Seconds between two looks.
_INTERVAL = 1.0
#: At most this fraction of the time is spent on looking: 1 s for 100 actors of usual envs.
_MAX_SHARE = 0.01
_MB = 2**20
_WATCHED = (ActorState.STARTING, ActorState.BUILDING, ActorState.BUILT, ActorState.READY)


class MemoryWatch:
    """When to look next, and what was seen.

    Args:
        measure: Returns resident bytes by process id, for processes with all below them.
        clock: Seconds.

    Attributes:
        look_at: When to look next.
    """

    def __init__(
        self,
        measure: Callable[[Iterable[int]], Mapping[int, int]] = tree_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._clock = clock
        self.look_at = clock()

    def look(self, actors: Sequence[M]) -> list[tuple[M, float]]:
        """Return the actors that run here, and the MiB that each uses with all that it started."""
        began = self._clock()
        pids = {
            actor.child.pid: actor
            for actor in actors
            if actor.child is not None and actor.state in _WATCHED
        }
        sizes = self._measure(pids)
        ended = self._clock()
        self.look_at = ended + max(_INTERVAL, (ended - began) / _MAX_SHARE)
        return [(actor, sizes[pid] / _MB) for pid, actor in pids.items()]
