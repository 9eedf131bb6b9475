"""Where processes are that hang: the line of Python of each, asked for as seldom as can be.

Leaves out how a process is asked (`runs.py`), and how it looks (`envbus.runner.cli`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from envbus.bus.errors import EnvbusError
from envbus.bus.process.exit_report import innermost_line
from envbus.runner.monitoring.observer import ObservedRun
from envbus.runner.monitoring.overview import hung_processes
from envbus.runner.monitoring.runs import stacks_of

__all__ = ["HungLines"]

#: Seconds for the questions of one look; the others are asked at the next one.
_TIME: Final = 0.5
#: A process is asked again when it has hung so many times as long: the signal that asks ends
#: sleeps of C code early.
_AGAIN: Final = 2.0


class HungLines:
    """Remembers the lines between two looks.

    Args:
        stacks: Returns the stacks of a process by its id.
        clock: Seconds.
    """

    def __init__(
        self,
        stacks: Callable[[int], str] = stacks_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stacks = stacks
        self._clock = clock
        #: By process: for how long it had hung when it was asked, and where it was.
        self._known: dict[int, tuple[float, str]] = {}

    def look(self, runs: Sequence[ObservedRun]) -> Mapping[int, str]:
        """Return by process id where those are that hang; "" where that is not known."""
        hung = hung_processes(runs)
        self._known = {pid: known for pid, known in self._known.items() if pid in hung}
        due = [pid for pid in hung if self._is_due(pid, hung[pid])]
        due.sort(key=lambda pid: (pid in self._known, -hung[pid]))  # those of no line yet first
        ends = self._clock() + _TIME
        for pid in due:
            if self._clock() >= ends:
                break
            self._known[pid] = hung[pid], self._ask(pid)
        return MappingProxyType({pid: line for pid, (_, line) in self._known.items()})

    def _is_due(self, pid: int, stalled: float) -> bool:
        asked, _ = self._known.get(pid, (0.0, ""))
        return not asked or stalled < asked or stalled >= _AGAIN * asked

    def _ask(self, pid: int) -> str:
        try:
            text = self._stacks(pid)
        except EnvbusError:  # gone meanwhile, or no process of its own
            return ""
        return innermost_line(text) or text.partition("\n")[0].rpartition(": ")[2]
