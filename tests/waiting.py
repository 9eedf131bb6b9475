"""How tests wait: for what happens, under a limit. The only file of the tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE", "pass_time", "wait_until"]

#: Seconds; never expected to pass.
PATIENCE = 60.0
_INTERVAL = 0.005


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll `condition`: other processes' ends, or a file, cannot be waited for otherwise."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(_INTERVAL)


def pass_time(seconds: float) -> None:
    """Let time pass, where that is what is tested: a slow env, an owner that is away, a lease.

    No test may hold because enough time has passed for something to be done by others: it waits for
    that with `wait_until`.
    """
    time.sleep(seconds)
