"""How tests wait: for what happens, under a limit. Nobody else sleeps."""

from __future__ import annotations

import time

# There, as programs of tests import that file where this one cannot be found.
from tests.integration.group_children import PATIENCE, wait_until

__all__ = ["PATIENCE", "pass_time", "wait_until"]


def pass_time(seconds: float) -> None:
    """Let time pass, where that is what is tested: a slow env, an owner that is away, a lease.

    No test may hold because enough time has passed for something to be done by others: it waits for
    that with `wait_until`.
    """
    time.sleep(seconds)
