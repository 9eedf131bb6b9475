"""Which slot of an actor belongs to which group, and lists that go to and from the groups.

Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from envbus.actors.slot_group import SlotGroup

__all__ = ["Part", "SlotTable", "merge", "pick"]

#: A list or an array with one item per addressed slot, or None.
Picked: TypeAlias = Any
#: Some positions of a request, and what belongs there; positions None: all.
Part: TypeAlias = tuple[Sequence[int] | None, list[Any] | None]


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
