"""Ctrl-C while things are being ended: once is enough.

Leaves out Ctrl-C at all other times, which is the caller's.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["without_interrupts"]


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C within the context, which must be short.

    For what is run by the interpreter itself, at its end or on garbage collection: it prints an
    exception from there with its traceback and goes on, with half of the work undone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # None: not Python's to put back
            signal.signal(signal.SIGINT, before)
