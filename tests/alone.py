"""A pytest plugin: while a test marked `alone` runs, no other worker of pytest-xdist runs one.

For tests that look at the whole machine, or that need its processors for themselves.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

__all__ = ["pytest_runtest_protocol"]


class _Turns:
    """Locks on two files that are there anyway, so that nothing of them can stay behind."""

    def __init__(self, entrance: Path, room: Path) -> None:
        # Descriptors that stay open as long as the process, as locks are theirs.
        self._entrance = os.open(entrance, os.O_RDONLY)
        self._room = os.open(room, os.O_RDONLY)

    def enter(self, *, alone: bool) -> None:
        """Wait for one's turn. Who waits to be alone holds up those who come later."""
        fcntl.flock(self._entrance, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._entrance, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Unlock, also what forked children have inherited."""
        fcntl.flock(self._room, fcntl.LOCK_UN)


_TURNS = _Turns(Path(__file__), Path(__file__).with_name("conftest.py"))


# First, so that waiting does not count towards the test's time limit.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    _TURNS.enter(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        _TURNS.leave()
