"""When Ctrl-C may come: not while something is half done, once while things are being ended.

Leaves out Ctrl-C at all other times, which is the caller's. Only the main thread is ever
interrupted; in others nothing is done here.
"""

from __future__ import annotations

# `signal.signal` without its enums, in a tenth of the time; typeshed does not know it.
import _signal  # type: ignore[import-not-found]
import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from signal import SIGINT
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

__all__ = [
    "hand_out",
    "interruptible",
    "uninterrupted",
    "uninterrupted_call",
    "without_interrupts",
]

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds after a Ctrl-C that was kept after which the next one is not: something has got stuck.
_PATIENCE: Final = 1.0

_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class _Keeper:
    """Stands in for a handler of SIGINT, and keeps what comes for it."""

    __slots__ = ("depth", "frame", "handler", "is_open", "kept_at")

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.depth = 1
        #: Whether the code waits, or is the user's: then nothing is kept.
        self.is_open = False
        #: When one came that the handler has not been told of (monotonic); 0.0: none did.
        self.kept_at = 0.0
        self.frame: FrameType | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Without depth: a debugger has put it back after its context.
        waited = self.kept_at and now - self.kept_at > _PATIENCE
        if self.is_open or waited or not self.depth:
            self.kept_at = 0.0
            self.handler(number, frame)
        elif not self.kept_at:
            self.kept_at, self.frame = now, frame

    def deliver(self) -> None:
        """Tell the handler of one that was kept."""
        frame, self.frame, self.kept_at = self.frame, None, 0.0
        self.handler(SIGINT, frame)


class uninterrupted:
    """A context that Ctrl-C does not break off: it is raised at the context's end.

        with uninterrupted():
            packet = socket.recv(...)
            queue.append(packet)

    What waits inside, and what calls code of the user's, does so in `interruptible`. Contexts may
    be nested. A result that is handed out of one takes `hand_out`.
    """

    __slots__ = ("_keeper",)

    def __enter__(self) -> None:
        self._keeper: _Keeper | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _get(SIGINT)
        if type(handler) is _Keeper:
            self._keeper = handler
            handler.depth += 1
        elif callable(handler):
            self._keeper = keeper = _Keeper(handler)
            _set(SIGINT, keeper)

    def __exit__(self, *exc_info: object) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        if keeper.depth > 1:
            keeper.depth -= 1
            return
        if _get(SIGINT) is keeper:  # else the user has set another one, which counts
            _set(SIGINT, keeper.handler)
        keeper.depth = 0
        if keeper.kept_at:
            keeper.deliver()


class interruptible:
    """Within `uninterrupted`: a wait, or code of the user's, that Ctrl-C may break off."""

    __slots__ = ("_keeper",)

    def __enter__(self) -> None:
        self._keeper: _Keeper | None = None
        handler = _get(SIGINT)
        if (
            type(handler) is not _Keeper
            or handler.is_open
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        self._keeper = handler
        handler.is_open = True
        if handler.kept_at:
            handler.is_open = False
            handler.deliver()
            handler.is_open = True

    def __exit__(self, *exc_info: object) -> None:
        if self._keeper is not None:
            self._keeper.is_open = False


def uninterrupted_call(function: Callable[P, R]) -> Callable[P, R]:
    """Have all of a function be `uninterrupted`, whose result is lost if Ctrl-C came meanwhile."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterrupted():
            return function(*args, **kwargs)

    return call


def hand_out(make: Callable[[], R], keep: Callable[[R], object]) -> R:
    """Return what `make` returns, which is `uninterrupted`.

    Args:
        make: Makes a result that is gone if the caller does not get it.
        keep: Called with it, before Ctrl-C that came meanwhile is raised.
    """
    made: list[R] = []
    try:
        with uninterrupted():
            made.append(make())
        return made[0]
    except BaseException:
        if made:
            keep(made[0])
        raise


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
