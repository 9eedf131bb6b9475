from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envbus.actors.env.slot_group import SlotTable, merge, pick
from envbus.actors.env.slots import EnvSlots
from envbus.actors.testing import NullEnv


def table(*sizes: int) -> SlotTable:
    return SlotTable(
        [EnvSlots([NullEnv() for _ in range(size)], AutoresetMode.DISABLED) for size in sizes]
    )


def split(slots: SlotTable, asked: list[int] | None) -> list[tuple[int, object, object]]:
    return [
        (slots.groups.index(group), own, positions) for group, own, positions in slots.split(asked)
    ]


def test_one_group_gets_the_request_as_it_is() -> None:
    assert split(table(3), None) == [(0, None, None)]
    assert split(table(3), [2, 0]) == [(0, [2, 0], None)]


def test_each_group_gets_its_own_slots() -> None:
    slots = table(2, 3)
    assert split(slots, None) == [(0, None, range(0, 2)), (1, None, range(2, 5))]
    assert split(slots, [4, 0, 2]) == [(0, [0], [1]), (1, [2, 0], [0, 2])]
    assert split(slots, [3]) == [(1, [1], [0])]


@pytest.mark.parametrize(
    ("asked", "message"), [([5], "slot 5"), ([-1], "slot -1"), ([1, 1], "twice")]
)
def test_slots_that_make_no_sense_are_refused(asked: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(2, 3).addressed(asked)


def test_an_empty_table_answers_nothing() -> None:
    with pytest.raises(RuntimeError, match="no envs"):
        SlotTable().addressed(None)


def test_picking() -> None:
    assert pick(None, [0]) is None
    assert pick(["a", "b"], None) == ["a", "b"]
    assert pick(["a", "b", "c"], [2, 0]) == ["c", "a"]
    assert pick(np.array([5, 6, 7]), range(1, 3)).tolist() == [6, 7]


def test_merging() -> None:
    assert merge(2, [(None, ["a", "b"])], dict) == ["a", "b"]
    assert merge(3, [([1], None), ([0, 2], None)], dict) is None
    assert merge(3, [([1], None), ([0, 2], ["a", "c"])], dict) == ["a", {}, "c"]
