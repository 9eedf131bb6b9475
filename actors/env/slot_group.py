"""What the kinds of slots have in common, and which slot of an actor belongs to which group.

Pure: their interface, what goes in and comes out, and lists that go to and from the groups; no env
is stepped here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt

from envbus.actors.arrays.blocks import Blocks
from envbus.actors.failures import slot_error
from envbus.actors.protocol import SlotError
from envbus.actors.spaces.spaces import Space
from envbus.bus.forking import Origin

__all__ = [
    "Exchange",
    "Info",
    "Options",
    "Outcome",
    "Part",
    "SlotGroup",
    "SlotTable",
    "check_callable_name",
    "info_list",
    "merge",
    "pick",
    "wrong_info",
]

#: What `reset(options=...)` takes: a dict as a rule, but that is the env's business.
Options: TypeAlias = Any
#: What an env returned as its info: a dict, if the env is right.
Info: TypeAlias = Any
#: A list or an array with one item per addressed slot, or None.
Picked: TypeAlias = Any
#: Some positions of a request, and what belongs there; positions None: all.
Part: TypeAlias = tuple[Sequence[int] | None, list[Any] | None]

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


class SlotGroup(ABC):
    """Consecutive slots of an actor that are stepped by the same code.

    Slots count from 0 within the group; those in `SlotError` count within the actor.

    Args:
        num_slots: How many.
        first_slot: Number of the first of them in the actor, for errors.
    """

    def __init__(self, num_slots: int, first_slot: int) -> None:
        self.num_slots = num_slots
        self._first_slot = first_slot
        self._exchange: Exchange | None = None
        self._origin = Origin()

    def bind(self, exchange: Exchange | None) -> None:
        """Exchange arrays here from now on; None lets go of all views."""
        self._exchange = exchange

    def _bound(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("no place to exchange arrays yet: ask MapBlocks first")
        return self._exchange

    def _failed(self, slot: int, phase: str, error: BaseException) -> SlotError:
        """Return what is to be told of a slot's env, before anything is made of what it raised.

        Does not return in a copy of this process that the env has forked, and that ends thus.
        """
        self._origin.end_copy(error)
        return slot_error(self._first_slot + slot, phase, error)

    @abstractmethod
    def reset(
        self, slots: Sequence[int] | None, seeds: Sequence[int | None] | None, options: Options
    ) -> Outcome:
        """Reset the addressed slots; None addresses all."""

    @abstractmethod
    def rebuild(self, slots: Sequence[int] | None, close_timeout: float) -> list[SlotError]:
        """Close the addressed slots' envs and make new ones, which are to be reset first.

        Raises:
            ValueError: They cannot be made anew without others.
        """

    def check_step(self, slots: Sequence[int] | None) -> None:  # noqa: B027 - no rule is one
        """See whether these slots can be stepped together; any can, where nothing else is said.

        Raises:
            ValueError: They cannot.
        """

    @abstractmethod
    def step(
        self,
        slots: Sequence[int] | None,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Outcome:
        """Step the addressed slots, in order.

        Args:
            slots: Which; None: all.
            leaves: Leaves of the action space, `(len(slots), *leaf_shape)` each.
            items: Single actions, if not None; they win over `leaves`.
                If both are None the actions are in the blocks.

        Raises:
            ValueError: They cannot be stepped without others; nothing was stepped.
        """

    @abstractmethod
    def call(
        self, slots: Sequence[int] | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Call a method or read an attribute."""

    @abstractmethod
    def set_attr(
        self, slots: Sequence[int] | None, name: str, values: Sequence[Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Set an attribute, one value per addressed slot."""

    @abstractmethod
    def execute(
        self,
        slots: Sequence[int] | None,
        function: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[SlotError]]:
        """Run `function(env, *args, **kwargs)`."""

    @abstractmethod
    def close(self) -> list[SlotError]:
        """Close what the slots hold. Idempotent; never raises."""


class SlotTable:
    """Consecutive groups of slots.

    Attributes:
        groups: In the order of their slots.
        firsts: First slot of each group.
        num_slots: Of all groups.
    """

    def __init__(self, groups: Sequence[SlotGroup] = ()) -> None:
        self.groups = list(groups)
        self.firsts: list[int] = []
        self.num_slots = 0
        for group in self.groups:
            self.firsts.append(self.num_slots)
            self.num_slots += group.num_slots

    def addressed(self, slots: Sequence[int] | None) -> int:
        """Check the slots of a request and return how many they are.

        Raises:
            ValueError: A slot does not exist, or is named twice.
            RuntimeError: There are no slots.
        """
        if not self.groups:
            raise RuntimeError("this actor has no envs: they were not built, or were closed")
        if slots is None:
            return self.num_slots
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots {slots} name one of them twice")
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"slot {slot} is not among this actor's {self.num_slots}")
        return len(slots)

    def split(
        self, slots: Sequence[int] | None
    ) -> Iterator[tuple[SlotGroup, Sequence[int] | None, Sequence[int] | None]]:
        """Yield each addressed group, its own slots, and their positions in the request.

        None instead of slots means all of the group's, None instead of positions all of the
        request's.
        """
        if slots is not None and not slots:
            return
        if len(self.groups) == 1:
            yield self.groups[0], slots, None
            return
        for group, first in zip(self.groups, self.firsts, strict=True):
            behind = first + group.num_slots
            if slots is None:
                yield group, None, range(first, behind)
                continue
            positions = [at for at, slot in enumerate(slots) if first <= slot < behind]
            if positions:
                yield group, [slots[at] - first for at in positions], positions


def pick(values: Picked, positions: Sequence[int] | None) -> Picked:
    """The values at `positions`, or all; None stays None."""
    if values is None or positions is None:
        return values
    if isinstance(values, list | tuple):
        return [values[at] for at in positions]
    return values[list(positions)]


def merge(
    addressed: int,
    parts: Sequence[Part],
    missing: Callable[[], Any],
) -> list[Any] | None:
    """One list from the groups' lists; None if none of them has one."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1]
    if all(values is None for _, values in parts):
        return None
    merged = [missing() for _ in range(addressed)]
    for positions, values in parts:
        for at, value in zip(positions or (), values or (), strict=False):
            merged[at] = value
    return merged


def check_callable_name(name: str) -> None:
    """Refuse names that have requests of their own, in Gymnasium's words.

    Raises:
        ValueError: `name` is one of them.
    """
    if name in _REFUSED:
        raise ValueError(
            f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        )


def wrong_info(info: object) -> TypeError:
    """Return the error of an info that is no dict."""
    return TypeError(f"an env's info must be a dict, got {type(info).__qualname__}")


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
    if set(map(type, infos.values())) != {dict}:  # in one go, as nearly always all are dicts
        for slot, info in list(infos.items()):
            if not isinstance(info, dict):
                del infos[slot]
                errors.append(slot_error(first_slot + slot, phase, wrong_info(info)))
    return [infos.get(slot, {}) for slot in addressed] if any(infos.values()) else None
