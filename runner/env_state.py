"""What an env of a pool is doing, as the pool sees it."""

from __future__ import annotations

import enum

__all__ = ["EnvState"]


class EnvState(enum.Enum):
    """Between `ActorPool`'s asking an env and its caller's taking the result."""

    IDLE = "idle"  # its last result was received: it may be sent an action
    PENDING = "pending"  # a step or reset is under way
    READY = "ready"  # its result waits to be received
    RECOVERING = "recovering"  # its actor died or leaves; a new episode will come by itself
    HELD = "held"  # its episode is over, and its actor leaves once those of the others are
    LOST = "lost"  # its actor died and is not started again
