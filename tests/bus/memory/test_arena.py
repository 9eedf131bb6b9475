from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from envbus.bus.errors import ClosedError, ConfigError
from envbus.bus.memory.arena import Arena
from envbus.bus.memory.memfd import create_memfd
from tests.descriptors import open_descriptors


def files_in_memory() -> set[tuple[int, int, int]]:
    """The open ones. Threads that tests before have left may open sockets meanwhile."""
    with Arena.create(1) as arena:
        device = os.fstat(arena.fd).st_dev
    return {one for one in open_descriptors() if one[1] == device}


def test_an_arena_is_zeros_of_the_size_asked_for() -> None:
    with Arena.create(5000) as arena:
        assert len(arena.buffer) == arena.size == 5000
        assert not arena.buffer.readonly
        assert not any(arena.buffer)


def test_what_one_side_writes_the_other_reads() -> None:
    with Arena.create(4096) as arena, Arena.attach(os.dup(arena.fd), 4096) as attached:
        np.frombuffer(arena.buffer, np.int64)[7] = 42
        assert np.frombuffer(attached.buffer, np.int64)[7] == 42


def test_an_arena_has_no_name_anywhere() -> None:
    with Arena.create(4096) as arena:
        assert os.fstat(arena.fd).st_nlink == 0
        assert not os.get_inheritable(arena.fd)


def test_an_arena_cannot_shrink_under_its_users() -> None:
    with Arena.create(4096) as arena, pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_more_memory_than_there_is_is_refused_at_once() -> None:
    before = files_in_memory()
    with pytest.raises(ConfigError, match="shared memory"):
        Arena.create(2 * psutil.virtual_memory().total)
    assert files_in_memory() <= before


def test_more_memory_than_the_container_has_left_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envbus.bus.memory.arena.memory_left", lambda: 4096)
    with pytest.raises(ConfigError, match="4096 bytes of memory are available"):
        Arena.create(4097)
    Arena.create(4096).close()


@pytest.mark.parametrize("size", [0, -1])
def test_an_arena_has_at_least_one_byte(size: int) -> None:
    with pytest.raises(ConfigError):
        Arena.create(size)


def test_less_memory_than_announced_is_refused() -> None:
    with Arena.create(100) as arena:
        before = files_in_memory()
        for size in (101, 0):
            with pytest.raises(ConfigError, match="announced"):
                Arena.attach(os.dup(arena.fd), size)
        assert files_in_memory() <= before


@pytest.mark.parametrize(
    "view",
    [
        lambda buffer: np.frombuffer(buffer, np.float64),
        lambda buffer: np.ndarray((10,), np.float64, buffer),
        lambda buffer: np.ndarray((5, 2), np.float64, buffer)[:],
    ],
)
def test_arrays_outlive_the_arena_that_they_look_into(view: Callable[[memoryview], Any]) -> None:
    arena = Arena.create(80)
    array = view(arena.buffer)
    array[:] = 1.5
    arena.close()
    arena.close()
    assert array.sum() == 15.0
    for use in (lambda: arena.buffer, lambda: arena.fd):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("looked_into", [True, False])
def test_no_descriptor_stays(closed: bool, looked_into: bool) -> None:
    before = files_in_memory()
    for _ in range(10):
        arena = Arena.create(4096)
        array = np.frombuffer(arena.buffer, np.uint8) if looked_into else None
        if closed:
            arena.close()
        del arena, array
    assert files_in_memory() <= before


def test_without_memfd_there_is_still_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = create_memfd("label")
    try:
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    with Arena.create(4096) as arena:
        arena.buffer[:3] = b"abc"
