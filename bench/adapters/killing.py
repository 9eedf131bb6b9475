"""Kills a worker of a library that does not survive it, and starts again by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess

from envbus.bench.adapters.base import Broken

__all__ = ["kill_and_start_again"]

#: Seconds after which a call is taken to hang.
HANGS_AFTER = 10.0


class _HangsError(Exception):
    """A call did not return in time."""


def kill_and_start_again(
    processes: Sequence[BaseProcess],
    step: Callable[[], object],
    close: Callable[[], object],
    construct: Callable[[], object],
) -> Broken:
    """Kill the last worker, step until that is noticed, end the others, construct anew.

    Args:
        processes: The library's workers.
        step: Makes one vector step with the workers there are.
        close: Ends the library's processes; it may fail or hang, as one is dead.
        construct: Makes, resets and steps new ones.
    """
    assert processes[-1].pid is not None
    os.kill(processes[-1].pid, signal.SIGKILL)
    start = time.perf_counter()
    raised = ""
    while not raised:
        raised = _outcome(step)
    surfaced = time.perf_counter() - start
    left = sum(process.is_alive() for process in processes[:-1])
    start = time.perf_counter()
    close_error = _outcome(close)
    if close_error:
        start = time.perf_counter()
    for process in processes:
        process.kill()
        process.join()
    construct()
    by_hand = time.perf_counter() - start
    return Broken(raised, surfaced, left, by_hand, close_error)


def _outcome(call: Callable[[], object]) -> str:
    """Return what a call raises, `"hangs"`, or nothing."""
    try:
        with _limit():
            call()
    except _HangsError:
        return "hangs"
    except Exception as error:
        kind = type(error)
        own = kind.__module__ == "builtins"
        return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    return ""


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _HangsError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
