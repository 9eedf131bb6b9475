"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

if TYPE_CHECKING:
    from envbus.runner.pool import ActorPool

__all__ = ["pools", "pytest_make_collect_report", "pytest_runtest_makereport"]

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C, which
# tests send to programs that they start, would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def pools() -> Iterator[list[ActorPool]]:
    """Return a list for pools, which are killed at the end of the test."""
    made: list[ActorPool] = []
    yield made
    for pool in made:
        pool.close(terminate=True)
