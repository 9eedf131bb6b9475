"""Tells once that envs wait for most of their steps, and the argument that helps.

An env that waits (for a program, a network, a device) leaves its core idle, and all that stand
behind it in the same actor wait with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import psutil

from envbus.actors.env.cost import seconds_without_core

__all__ = ["WaitingNote", "busy_seconds", "cpu_seconds"]

logger = logging.getLogger("envbus.runner")

#: Seconds for which a runner has waited for its actors before it judges what they did meanwhile.
_SECONDS: Final = 3.0
#: An actor that computes for less than this share of the time waits.
_COMPUTES: Final = 0.1


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes in seconds, each with all below it that lives."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
    return total


def busy_seconds(pids: Sequence[int]) -> float:
    """Return `cpu_seconds`, and the time for which others had the core that a process wanted."""
    return cpu_seconds(pids) + sum(map(seconds_without_core, pids))


class WaitingNote:
    """Compares what actors compute with how long their runner waits for them.

    Args:
        num_envs: Of all actors.
        busy: As `busy_seconds`.

    Attributes:
        due: Seconds for which the runner has to have waited until `look` does anything.
    """

    def __init__(
        self, num_envs: int, busy: Callable[[Sequence[int]], float] = busy_seconds
    ) -> None:
        self._num_envs = num_envs
        self._busy = busy
        self._began: tuple[float, dict[int, float]] | None = None
        self.due = 0.0

    def look(self, waited: float, pids: Sequence[int]) -> bool:
        """Look whether it is time to judge; tell if so. Return whether it was.

        Where what actors compute cannot be read, as without a descriptor, it begins anew later.

        Args:
            waited: Seconds for which the runner has waited for actors until now.
            pids: Of the actors that run now.
        """
        try:
            return self._look(waited, pids)
        except (OSError, psutil.Error) as exc:
            logger.debug("what actors compute cannot be read: %s", exc)
            self._began, self.due = None, waited + _SECONDS
            return False

    def _look(self, waited: float, pids: Sequence[int]) -> bool:
        if self._began is None:
            self._began = waited, {pid: self._busy([pid]) for pid in pids}
            self.due = waited + _SECONDS
            return False
        began, before = self._began
        if waited < self.due:
            return False
        if before.keys() != set(pids):  # some were started anew meanwhile
            self._began = None
            return self._look(waited, pids)
        spent = max(self._busy([pid]) - used for pid, used in before.items())
        busiest = spent / (waited - began)
        if busiest < _COMPUTES:
            logger.warning(
                "these envs wait for %d %% of their steps, and %d of them wait in %d "
                "actors one after another: with `num_actors=%d` all wait side by side. "
                "`envbus tune` measures what that brings",
                100 * (1.0 - busiest),
                self._num_envs,
                len(pids),
                self._num_envs,
            )
        return True
