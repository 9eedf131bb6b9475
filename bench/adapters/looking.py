"""Looks at a run once a second, as `envbus top` does: what a process of its own does."""

from __future__ import annotations

import time

from envbus.runner.monitoring.observer import Observer

__all__ = ["look_at"]

#: Seconds between two looks.
_INTERVAL = 1.0


def look_at(pid: int) -> None:
    """Look at the run of a process until this one is terminated."""
    observer = Observer(pid)
    while True:
        observer.look()
        time.sleep(_INTERVAL)
