from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from envbus.bus.arena import Arena
from envbus.bus.errors import ConfigError
from envbus.runner.group.sample_memory import Placed, SampleMemory, fetch

LARGE = np.arange(20_000, dtype=np.float64).reshape(100, 200)


class Group:
    """The other side."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.memory = SampleMemory(self.take)
        self.arena: Arena | None = None

    def take(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds)

    def fetch(self, placed: Placed) -> object:
        if placed.parcel:
            self.arena = Arena.attach(self.fds[placed.parcel - 1], placed.size)
        return fetch(placed.tree, placed.places, self.arena)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.memory.close()
    if group.arena is not None:
        group.arena.close()


def assert_same(one: object, other: object) -> None:
    if isinstance(one, dict | tuple):
        assert isinstance(other, type(one))
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else None
        for a, b in pairs or zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    else:
        assert one == other


def test_large_arrays_are_placed_and_small_ones_stay(group: Group) -> None:
    tree = {
        "p": {
            "obs": {"a": LARGE, "b": (LARGE.astype(np.float32)[::2], np.arange(3))},
            "flags": LARGE > 5,
            "names": np.full(9000, "agent0"),
            "infos": np.array([{"a": 1}] * 9000, dtype=object),
        }
    }
    placed = group.memory.place(tree)
    assert len(placed.places) == 3
    assert isinstance(placed.tree["p"]["obs"]["a"], int)
    assert placed.tree["p"]["infos"] is tree["p"]["infos"]
    assert_same(group.fetch(placed), tree)


def test_memory_stays_and_grows_where_a_sample_needs_more(group: Group) -> None:
    assert_same(group.fetch(group.memory.place({"a": LARGE})), {"a": LARGE})
    again = group.memory.place({"a": LARGE + 1})
    assert again.parcel == 0
    assert_same(group.fetch(again), {"a": LARGE + 1})
    larger = np.concatenate([LARGE, LARGE])
    placed = group.memory.place({"a": larger, "b": LARGE})
    assert placed.parcel == 2
    assert_same(group.fetch(placed), {"a": larger, "b": LARGE})


def test_nothing_large_needs_no_memory(group: Group) -> None:
    placed = group.memory.place({"a": np.arange(3)})
    assert (placed.places, placed.parcel, group.fds) == ([], 0, [])
    assert_same(group.fetch(placed), {"a": np.arange(3)})


def test_where_there_is_no_memory_all_stays_in_the_message(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> Arena:
        raise ConfigError(f"no {size} bytes")

    monkeypatch.setattr(Arena, "create", full)
    placed = group.memory.place({"a": LARGE})
    assert placed.places == []
    assert_same(group.fetch(placed), {"a": LARGE})
