from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envbus.bus.arena import Arena
from envbus.bus.errors import ConfigError
from envbus.runner.group.sample_memory import (
    MOST_ROOMS,
    Asked,
    JointMemory,
    Layout,
    Place,
    Placed,
    Room,
    SampleMemory,
    fetch,
)
from envbus.runner.sampling import Quota

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
        self.known: dict[int, list[int]] = {i: [] for i in ROWS}

    def send(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds)

    def receive(self, number: int) -> int:
        return self.fds[number - 1]

    def announce(self, runner: int, room: Room | None) -> Room | None:
        if room is None:
            return None
        self.joint.lend(room.number, runner)
        parcel = 0
        if room.number not in self.known[runner]:
            parcel = self.send(self.joint.fd(room.number))
            self.known[runner] = [*self.known[runner], room.number][-MOST_ROOMS:]
        return Room(number=room.number, parcel=parcel, size=room.size, places=room.places)

    def sample(self, number: int = 0, *, made: bool = True) -> tuple[dict[str, Any], int]:
        """Return the joined columns, and how many of the large ones had rooms."""
        rooms = self.joint.rooms(ASKED)
        parts: dict[int, dict[str, Any]] = {}
        places = {}
        for runner, memory in self.memories.items():
            room = self.announce(runner, rooms.get(runner))
            memory.enter(room)
            tree = columns(runner, number)
            if made:
                for name in ("obs",):
                    array = memory.make(tree[name].shape, tree[name].dtype)
                    if array is not None:
                        array[...] = tree[name]
                        tree[name] = array
            placed = memory.place(tree)
            parts[runner] = self.fetched(runner, room, placed)
            places[runner] = placed.places
            if room is not None:
                self.joint.release(room.number, runner)
        self.joint.learn(ASKED, places)
        joined = {
            "obs": self.joint.join([part["obs"] for part in parts.values()]),
            "next": self.joint.join([part["more"]["next"] for part in parts.values()]),
        }
        return joined, sum(place.in_room for own in places.values() for place in own)

    def fetched(self, runner: int, room: Room | None, placed: Placed) -> Any:
        if placed.parcel:
            self.arenas[runner] = Arena.attach(self.fds[placed.parcel - 1], placed.size)
        return fetch(
            placed.tree,
            placed.places,
            self.arenas.get(runner),
            lambda place: self.joint.view(0 if room is None else room.number, place),
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
        joined, in_rooms = side.sample(number)
        assert in_rooms == (4 if number > 1 else 0)
        assert np.array_equal(joined["obs"], expected(number))
        assert np.array_equal(joined["next"], expected(number) + 1)


def test_columns_that_were_made_elsewhere_are_copied_to_their_room(side: Side) -> None:
    for number in range(4):
        joined, in_rooms = side.sample(number, made=False)
        assert np.array_equal(joined["obs"], expected(number))
    assert in_rooms == 4


def test_memory_is_used_again_once_nobody_has_a_sample_in_it(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    addresses = []
    for number in range(2, 8):
        joined, _ = side.sample(number)
        addresses.append(joined["obs"].__array_interface__["data"][0])
        view = joined["obs"][3:]  # holds on to it as well
        del joined
    assert len(set(addresses)) == MOST_ROOMS
    assert np.array_equal(view, expected(7)[3:])


def test_a_caller_that_keeps_samples_gets_others(side: Side) -> None:
    kept = [side.sample(number) for number in range(8)]
    for number, (joined, _) in enumerate(kept):
        assert np.array_equal(joined["obs"], expected(number))
    assert [in_rooms for _, in_rooms in kept] == [0, 0, 4, 4, 0, 0, 0, 0]
    kept.clear()
    assert side.sample()[1] == 4


def test_who_may_still_write_keeps_a_memory_from_others(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    rooms = side.joint.rooms(ASKED)
    side.joint.lend(rooms[0].number, 0)
    assert side.joint.rooms(ASKED)[0].number != rooms[0].number
    side.joint.release(rooms[0].number, 0)
    assert side.joint.rooms(ASKED)[0].number == rooms[0].number


def test_another_share_has_no_rooms(side: Side) -> None:
    for number in range(2):
        side.sample(number)
    assert side.joint.rooms(ASKED)
    assert not side.joint.rooms({0: Quota(), 1: Quota("env_steps", 5)})
    assert not side.joint.rooms({0: Quota()})


def test_after_a_fork_samples_stay_as_they_are_for_the_copy(side: Side) -> None:
    for number in range(3):
        joined, _ = side.sample(number)
    side.joint.leave_to_forks()
    address = joined["obs"].__array_interface__["data"][0]
    kept = joined["obs"].view()
    del joined
    for number in range(4):
        again, in_rooms = side.sample(number)
        assert in_rooms == 4
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
    joined, in_rooms = side.sample(3)
    assert in_rooms == 0
    assert np.array_equal(joined["obs"], expected(3))


def test_small_samples_have_no_rooms() -> None:
    joint = JointMemory()
    assert Layout.of({0: [], 1: []}) is None
    for rows, has_rooms in ((1_000, False), (100_000, True)):
        places = {runner: [Place(0, "<f8", (rows, 4))] for runner in ROWS}
        layout = Layout.of(places)
        assert layout == (((0, rows), (1, rows)), (("<f8", (4,)),))
        for _ in range(2):
            joint.learn(ASKED, places)
        assert bool(joint.rooms(ASKED)) == has_rooms


def test_columns_that_differ_between_runners_have_no_layout() -> None:
    side = Side()
    one = side.memories[0].place(columns(0)).places
    other = side.memories[1].place({"obs": columns(1)["obs"].astype(np.float32)}).places
    assert Layout.of({0: one, 1: other}) is None
    assert Layout.of({0: [*one, *other]}) is None
