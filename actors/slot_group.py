"""What the kinds of slots have in common: their interface, and what goes in and comes out.

Vocabulary and two small rules; no env is stepped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from envbus.actors.blocks import Blocks
from envbus.actors.failures import slot_error
from envbus.actors.protocol import SlotError
from envbus.actors.spaces import Space

__all__ = [
    "Exchange",
    "Info",
    "Options",
    "Outcome",
    "SlotGroup",
    "check_callable_name",
    "info_list",
]

#: What `reset(options=...)` takes: a dict as a rule, but that is the env's business.
Options: TypeAlias = Any
#: What an env returned as its info: a dict, if the env is right.
Info: TypeAlias = Any

#: Names that `Call` refuses, as Gymnasium does: they have requests of their own.
_REFUSED = frozenset({"reset", "step", "close", "_setattr", "_check_spaces"})


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where a group of slots finds its actions and leaves its results."""

    #: Single spaces of the whole pool.
    observation_space: Space
    action_space: Space
    #: The group's rows only: row i belongs to its slot i.
    blocks: Blocks


@dataclass(slots=True)
class Outcome:
    """What a group's reset or step leaves outside the blocks; one entry per addressed slot."""

    #: None if all are empty.
    infos: list[dict[str, Any]] | None = None
    #: None if the observations are in the blocks.
    observations: list[Any] | None = None
    errors: list[SlotError] = field(default_factory=list)

    @property
    def says_nothing(self) -> bool:
        """Whether all that happened stands in the blocks."""
        return self.infos is None and self.observations is None and not self.errors


class SlotGroup(Protocol):
    """Consecutive slots of an actor that are stepped by the same code.

    Slots count from 0 within the group; those in `SlotError` count within the actor.
    """

    num_slots: int

    def bind(self, exchange: Exchange | None) -> None:
        """Exchange arrays here from now on; None lets go of all views."""

    def reset(
        self, slots: Sequence[int] | None, seeds: Sequence[int | None] | None, options: Options
    ) -> Outcome:
        """Reset the addressed slots; None addresses all."""

    def rebuild(self, slots: Sequence[int] | None, close_timeout: float) -> list[SlotError]:
        """Close the addressed slots' envs and make new ones, which are to be reset first.

        Raises:
            ValueError: They cannot be made anew without others.
        """

    def check_step(self, slots: Sequence[int] | None) -> None:
        """See whether these slots can be stepped together.

        Raises:
            ValueError: They cannot.
        """

    def step(
        self,
        slots: Sequence[int] | None,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Outcome:
        """Step the addressed slots with `items`, else `leaves`, else the blocks' actions."""

    def call(
        self, slots: Sequence[int] | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Call a method or read an attribute."""

    def set_attr(
        self, slots: Sequence[int] | None, name: str, values: Sequence[Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Set an attribute, one value per addressed slot."""

    def execute(
        self,
        slots: Sequence[int] | None,
        function: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[SlotError]]:
        """Run `function(env, *args, **kwargs)`."""

    def close(self) -> list[SlotError]:
        """Close what the slots hold. Idempotent; never raises."""


def check_callable_name(name: str) -> None:
    """Refuse names that have requests of their own, in Gymnasium's words.

    Raises:
        ValueError: `name` is one of them.
    """
    if name in _REFUSED:
        raise ValueError(
            f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        )


def info_list(
    addressed: Sequence[int],
    infos: dict[int, Any],
    errors: list[SlotError],
    *,
    first_slot: int,
    phase: str,
) -> list[dict[str, Any]] | None:
    """Return one info dict per addressed slot, or None if all are empty.

    An info that is no dict is added to `errors`.
    """
    for slot, info in list(infos.items()):
        if not isinstance(info, dict):
            del infos[slot]
            wrong = TypeError(f"an env's info must be a dict, got {type(info).__qualname__}")
            errors.append(slot_error(first_slot + slot, phase, wrong))
    return [infos.get(slot, {}) for slot in addressed] if any(infos.values()) else None
