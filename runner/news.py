"""What a fleet tells of its actors: replies, losses, ends, fresh starts.

Vocabulary only; what follows from news is for those who poll.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from envbus.bus.messages import Failed
from envbus.runner.actor import Actor
from envbus.runner.faults import FaultCause

__all__ = ["Answer", "Gone", "Lost", "News", "Ready"]


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A request got its reply."""

    actor: Actor
    #: What the caller gave to `ask`.
    tag: Any
    reply: Any


class Lost(msgspec.Struct, frozen=True, gc=False):
    """A request ended without a reply."""

    actor: Actor
    tag: Any
    failed: Failed
    #: Why, if the actor was killed or died.
    cause: FaultCause = FaultCause.CRASH


class Gone(msgspec.Struct, frozen=True, gc=False):
    """An actor's process ended. What it held is reported as `Lost` besides."""

    actor: Actor
    reason: str
    cause: FaultCause
    #: Which life of it ended.
    incarnation: int


class Ready(msgspec.Struct, frozen=True, gc=False):
    """An actor that had ended, or was recycled, runs again; its envs are built and not reset."""

    actor: Actor


News: TypeAlias = Answer | Lost | Gone | Ready
