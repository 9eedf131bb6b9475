"""What a crew tells of its processes: replies, losses, ends, fresh starts.

Vocabulary only; what follows from news is for those who poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from envbus.bus.messages import Failed
from envbus.runner.actor import Member
from envbus.runner.faults import FaultCause

__all__ = ["STRAY", "Answer", "Gone", "Lost", "News", "Ready", "taken_from"]

M = TypeVar("M", bound=Member)

#: What is said of a request whose end got lost on its way to who waits for it.
STRAY = "an exception, e.g. of a signal's handler, has broken off the taking of its answer"


class Answer(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A request got its reply."""

    actor: M
    #: What the caller gave to `ask`.
    tag: Any
    reply: Any


class Lost(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A request ended without a reply."""

    actor: M
    tag: Any
    failed: Failed
    #: Why, if the actor was killed or died.
    cause: FaultCause = FaultCause.CRASH


class Gone(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """An actor's process ended. What it held is reported as `Lost` besides."""

    actor: M
    reason: str
    cause: FaultCause
    #: Which life of it ended.
    incarnation: int


class Ready(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """An actor that had ended, or was recycled, runs again; its envs are built and not reset."""

    actor: M


News: TypeAlias = Answer[M] | Lost[M] | Gone[M] | Ready[M]


def taken_from(waiting: deque[News[M]]) -> Iterator[News[M]]:
    """Take one after the other out of `waiting`: what is not asked for stays in it."""
    while waiting:
        yield waiting.popleft()
