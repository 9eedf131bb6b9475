"""Open files of this process, for tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_more_files"]


@contextmanager
def no_more_files() -> Iterator[None]:
    """At the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)
