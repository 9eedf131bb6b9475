from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.memory.arena import Arena
from envbus.runner.group.sample_memory import (
    MOST_SLOTS,
    ArrayLocation,
    Asked,
    JointMemory,
    Placed,
    SampleLayout,
    SampleMemory,
    SharedSlot,
    fetch,
)
from envbus.runner.sampling.config import Quota
from envbus.runner.testing import assert_same

ASKED: Asked = {0: Quota(), 1: Quota()}
#: Rows of each runner.
ROWS = {0: 600, 1: 400}
WIDTH = 100


def columns(runner: int, number: int = 0) -> dict[str, Any]:
    rows = ROWS[runner]
    obs = np.arange(rows * WIDTH, dtype=np.float64).reshape(rows, WIDTH) + 1000 * runner + number
    return {"obs": obs, "more": {"next": obs + 1}, "small": np.full(rows, runner)}


class Side:
    """A group of two runners."""

    def __init__(self) -> None:
        self.joint = JointMemory()
        self.fds: list[int] = []
        self.memories = {i: SampleMemory(self.send, self.receive) for i in ROWS}
        self.arenas: dict[int, Arena] = {}
        self.held = dict.fromkeys(ROWS, 0)
        self.known: dict[int, list[int]] = {i: [] for i in ROWS}

    def send(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds)

    def receive(self, number: int) -> int:
        return self.fds[number - 1]

    def announce(self, runner: int, slot: SharedSlot | None) -> SharedSlot | None:
        if slot is None:
            return None
        self.joint.lend(slot.number, runner)
        passed = 0
        if slot.number not in self.known[runner]:
            passed = self.send(self.joint.fd(slot.number))
            self.known[runner] = [*self.known[runner], slot.number][-MOST_SLOTS:]
        return SharedSlot(
            number=slot.number, passed=passed, size=slot.size, locations=slot.locations
        )

    def sample(self, number: int = 0, *, made: bool = True) -> tuple[dict[str, Any], int]:
        """Return the joined columns, and how many of the large ones had slots."""
        slots = self.joint.slots(ASKED)
        parts: dict[int, dict[str, Any]] = {}
        locations = {}
        for runner, memory in self.memories.items():
            slot = self.announce(runner, slots.get(runner))
            memory.enter(slot, self.held[runner])
            tree = columns(runner, number)
            if made:
                for name in ("obs",):
                    array = memory.make(tree[name].shape, tree[name].dtype)
                    if array is not None:
                        array[...] = tree[name]
                        tree[name] = array
            placed = memory.place(tree)
            parts[runner] = self.fetched(runner, slot, placed)
            locations[runner] = placed.locations
            if slot is not None:
                self.joint.release(slot.number, runner)
        self.joint.learn(ASKED, locations)
        joined = {
            "obs": self.joint.join([part["obs"] for part in parts.values()]),
            "next": self.joint.join([part["more"]["next"] for part in parts.values()]),
        }
        return joined, sum(location.in_slot for own in locations.values() for location in own)

    def fetched(self, runner: int, slot: SharedSlot | None, placed: Placed) -> Any:
        if placed.passed:
            self.held[runner] = placed.passed
            self.arenas[runner] = Arena.attach(self.fds[placed.passed - 1], placed.size)
        return fetch(
            placed.tree,
            placed.locations,
            self.arenas.get(runner),
            lambda location: self.joint.view(0 if slot is None else slot.number, location),
        )


def expected(number: int = 0) -> Any:
    return np.concatenate([columns(runner, number)["obs"] for runner in ROWS])


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    monkeypatch.setattr("envbus.runner.group.sample_memory._WORTHWHILE", 1)
    side = Side()
    yield side
    for memory in side.memories.values():
        memory.close()


def test_samples_like_those_before_need_no_copy(side: Side) -> None:
    for number in range(6):
        joined, in_slots = side.sample(number)
        assert in_slots == (4 if number > 1 else 0)
        assert np.array_equal(joined["obs"], expected(number))
        assert np.array_equal(joined["next"], expected(number) + 1)


def test_columns_that_were_made_elsewhere_are_copied_to_their_slot(side: Side) -> None:
    for number in range(4):
        joined, in_slots = side.sample(number, made=False)
        assert np.array_equal(joined["obs"], expected(number))
    assert in_slots == 4


def test_memory_is_used_again_once_nobody_has_a_sample_in_it(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    addresses = []
    for number in range(2, 8):
        joined, _ = side.sample(number)
        addresses.append(joined["obs"].__array_interface__["data"][0])
        view = joined["obs"][3:]  # holds on to it as well
        del joined
    assert len(set(addresses)) == MOST_SLOTS
    assert np.array_equal(view, expected(7)[3:])


def test_a_caller_that_keeps_samples_gets_others(side: Side) -> None:
    kept = [side.sample(number) for number in range(8)]
    for number, (joined, _) in enumerate(kept):
        assert np.array_equal(joined["obs"], expected(number))
    assert [in_slots for _, in_slots in kept] == [0, 0, 4, 4, 0, 0, 0, 0]
    kept.clear()
    assert side.sample()[1] == 4


def test_who_may_still_write_keeps_a_memory_from_others(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    slots = side.joint.slots(ASKED)
    side.joint.lend(slots[0].number, 0)
    assert side.joint.slots(ASKED)[0].number != slots[0].number
    side.joint.release(slots[0].number, 0)
    assert side.joint.slots(ASKED)[0].number == slots[0].number


def test_another_share_has_no_slots(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    assert side.joint.slots(ASKED)
    assert not side.joint.slots({0: Quota(), 1: Quota("env_steps", 5)})
    assert not side.joint.slots({0: Quota()})


def test_after_a_fork_samples_stay_as_they_are_for_the_copy(side: Side) -> None:
    for number in range(3):
        joined, _ = side.sample(number)
    side.joint.leave_to_forks()
    address = joined["obs"].__array_interface__["data"][0]
    kept = joined["obs"].view()
    del joined
    for number in range(4):
        again, in_slots = side.sample(number)
        assert in_slots == 4
        assert again["obs"].__array_interface__["data"][0] != address
    assert np.array_equal(kept, expected(2))


def test_without_memory_samples_are_joined_by_a_copy(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.sample()
    side.sample()

    def full(size: int) -> Arena:
        raise ConfigError(f"no {size} bytes")

    monkeypatch.setattr(Arena, "create", full)
    joined, in_slots = side.sample(3)
    assert in_slots == 0
    assert np.array_equal(joined["obs"], expected(3))


def test_small_samples_have_no_slots() -> None:
    joint = JointMemory()
    assert SampleLayout.of({0: [], 1: []}) is None
    for rows, has_slots in ((1_000, False), (100_000, True)):
        locations = {runner: [ArrayLocation(0, "<f8", (rows, 4))] for runner in ROWS}
        layout = SampleLayout.of(locations)
        assert layout == (((0, rows), (1, rows)), (("<f8", (4,)),))
        for _ in range(2):
            joint.learn(ASKED, locations)
        assert bool(joint.slots(ASKED)) == has_slots


def test_columns_that_differ_between_runners_have_no_layout() -> None:
    side = Side()
    one = side.memories[0].place(columns(0)).locations
    other = side.memories[1].place({"obs": columns(1)["obs"].astype(np.float32)}).locations
    assert SampleLayout.of({0: one, 1: other}) is None
    assert SampleLayout.of({0: [*one, *other]}) is None


LARGE = np.arange(20_000, dtype=np.float64).reshape(100, 200)


def fetched(side: Side, placed: Placed) -> object:
    """Return what the group finds that a runner without a slot has placed."""
    return side.fetched(0, None, placed)


def test_large_arrays_are_placed_and_small_ones_stay(side: Side) -> None:
    tree = {
        "p": {
            "obs": {"a": LARGE, "b": (LARGE.astype(np.float32)[::2], np.arange(3))},
            "flags": LARGE > 5,
            "names": np.full(9000, "agent0"),
            "infos": np.array([{"a": 1}] * 9000, dtype=object),
        }
    }
    placed = side.memories[0].place(tree)
    assert len(placed.locations) == 3
    assert isinstance(placed.tree["p"]["obs"]["a"], int)
    assert placed.tree["p"]["infos"] is tree["p"]["infos"]
    assert_same(fetched(side, placed), tree)


def test_memory_stays_and_grows_where_a_sample_needs_more(side: Side) -> None:
    assert_same(fetched(side, side.memories[0].place({"a": LARGE})), {"a": LARGE})
    again = side.memories[0].place({"a": LARGE + 1})
    assert again.passed == 0
    assert_same(fetched(side, again), {"a": LARGE + 1})
    larger = np.concatenate([LARGE, LARGE])
    placed = side.memories[0].place({"a": larger, "b": LARGE})
    assert placed.passed == 2
    assert_same(fetched(side, placed), {"a": larger, "b": LARGE})


def test_memory_of_which_the_message_was_lost_is_sent_again(side: Side) -> None:
    memory = side.memories[0]
    for number, rows, is_lost in ((0, 1, False), (1, 3, True), (2, 1, False), (3, 3, False)):
        array = np.concatenate([LARGE + number] * rows)
        memory.enter(None, side.held[0])
        placed = memory.place({"a": array})
        if not is_lost:
            assert_same(fetched(side, placed), {"a": array})
    assert len(side.fds) == 3


def test_a_slot_that_is_announced_again_is_taken_again(side: Side) -> None:
    for number in range(3):
        side.sample(number)
    side.known[0].clear()  # as after a failure, before which it may not have been taken
    for number in range(6):
        joined, in_slots = side.sample(number)
        assert in_slots == 4
        assert np.array_equal(joined["obs"], expected(number))


def test_nothing_large_needs_no_memory(side: Side) -> None:
    placed = side.memories[0].place({"a": np.arange(3)})
    assert (placed.locations, placed.passed, side.fds) == ([], 0, [])
    assert_same(fetched(side, placed), {"a": np.arange(3)})


def test_where_there_is_no_memory_all_stays_in_the_message(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> Arena:
        raise ConfigError(f"no {size} bytes")

    monkeypatch.setattr(Arena, "create", full)
    placed = side.memories[0].place({"a": LARGE})
    assert placed.locations == []
    assert_same(fetched(side, placed), {"a": LARGE})
