"""The set of supervised children: who is started, when, and who is given up.

Each child lives and dies for itself (OTP's one-for-one). Pure: no socket, clock, thread or
process in this file; the policy of one child is in `restart.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from envbus.bus.supervision.restart import ChildState, Exit, RestartPolicy, SupervisedLife

__all__ = [
    "ChildGivenUp",
    "StartChild",
    "Supervision",
    "SupervisionEffect",
]


#: Seconds at least until a start that found no process, or no memory, is tried again: what is
#: missing is not there at once, and each attempt is logged.
_UNSTARTED_PAUSE = 0.1


class StartChild(msgspec.Struct, frozen=True, gc=False):
    """Effect: start the child, as this incarnation."""

    name: str
    incarnation: int


class ChildGivenUp(msgspec.Struct, frozen=True, gc=False):
    """Effect: the child is not started again; tell the owner (`RestartLimitError`)."""

    name: str
    #: How often it failed, and which setting allows more; follows a name in a sentence.
    how_often: str
    #: Detail of the last exit.
    cause: str


SupervisionEffect: TypeAlias = StartChild | ChildGivenUp


class Supervision:
    """Children by name.

    Events of a former incarnation are dropped: a late exit says nothing about the new life.

    Args:
        random: Returns a number from [0, 1), for the policies' jitter; None: none.
    """

    def __init__(self, random: Callable[[], float] | None = None) -> None:
        self._random = random
        self._children: dict[str, SupervisedLife] = {}
        self._starts: dict[str, float] = {}
        self._removed_restarts = 0

    def __contains__(self, name: object) -> bool:
        return name in self._children

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def add(self, name: str, policy: RestartPolicy) -> list[SupervisionEffect]:
        """Add a child and start it.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._children:
            raise ValueError(f"there is a child {name!r} already")
        self._children[name] = SupervisedLife(policy, self._random)
        return [StartChild(name, 0)]

    def renew(self, name: str, now: float) -> int:
        """Exchange a child that works for a fresh one; return the new one's incarnation.

        It is no restart: neither counted nor held against the policy.
        """
        child = self._children[name]
        child.on_renewed(now)
        return child.incarnation

    def remove(self, name: str) -> None:
        """Forget a child."""
        self._starts.pop(name, None)
        self._removed_restarts += self._children.pop(name).restarts

    def state(self, name: str) -> ChildState:
        """Return where a child is in its life."""
        return self._children[name].state

    def incarnation(self, name: str) -> int:
        """Return which life of the child this is, from 0."""
        return self._children[name].incarnation

    def restarts(self, name: str) -> int:
        """Return how often the child was restarted, over its whole life."""
        return self._children[name].restarts

    def on_ready(self, name: str, incarnation: int, now: float) -> None:
        """The child said hello; nothing changes if it is too late to matter."""
        child = self._living(name, incarnation)
        if child is not None and child.state is ChildState.STARTING:
            child.on_ready(now)

    def on_exit(
        self,
        name: str,
        incarnation: int,
        reason: Exit,
        now: float,
        detail: str = "",
        idle: float = 0.0,
        *,
        began: bool = True,
    ) -> list[SupervisionEffect]:
        """The child's process, and all that it started, is gone; return what to do about it.

        Args:
            name: Of the child; one that is unknown changes nothing.
            incarnation: Which life; a former one changes nothing.
            reason: Why.
            now: Seconds of a clock that never goes back.
            detail: For people, e.g. `"signal SIGKILL"`; the last one is in `ChildGivenUp`.
            idle: Seconds before its end in which it did not work, but hang.
            began: Whether there was a process; if not, nobody is started before the next `due`.
        """
        child = self._living(name, incarnation)
        if child is None:
            return []
        delay = child.on_exit(reason, now, idle)
        if delay is not None:
            self._starts[name] = now + (delay if began else max(delay, _UNSTARTED_PAUSE))
        elif child.state is ChildState.GIVEN_UP:
            how_often = child.policy.exhausted(child.in_a_row)
            return [ChildGivenUp(name, how_often, detail or reason.value)]
        # Without a pause it is started at once. After a start that failed nobody is, others either:
        # where starts take longer than pauses, each failure would lead to the next start, for ever.
        return [*self.due(now)] if began else []

    def due(self, now: float) -> list[StartChild]:
        """Return who is to be started by now, in the order in which their pauses end."""
        due = sorted((at, name) for name, at in self._starts.items() if at <= now)
        effects: list[StartChild] = []
        for _, name in due:
            del self._starts[name]
            child = self._children[name]
            child.on_started_again()
            effects.append(StartChild(name, child.incarnation))
        return effects

    def wake_at(self) -> float | None:
        """Return by when `due` has somebody, or None if it never will."""
        return min(self._starts.values(), default=None)

    def all_restarts(self) -> int:
        """Return how often children were restarted, those that were removed included."""
        return self._removed_restarts + sum(child.restarts for child in self._children.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if a child backs off without end, or starts without reason."""
        waiting = {
            name for name, child in self._children.items() if child.state is ChildState.BACKING_OFF
        }
        assert waiting == self._starts.keys(), "those who back off are not those with a start"

    def _living(self, name: str, incarnation: int) -> SupervisedLife | None:
        child = self._children.get(name)
        if child is None or child.incarnation != incarnation:
            return None
        return child if child.state in (ChildState.STARTING, ChildState.READY) else None
