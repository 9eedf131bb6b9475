"""When Ctrl-C may come: not while something is half done, once while things are being ended.

The same holds for the other signals whose handlers may raise, as those of time limits do. Leaves
out signals at all other times, which are the caller's. Only the main thread is ever interrupted;
in others nothing is done here.
"""

from __future__ import annotations

# `signal.signal` without its enums, in a tenth of the time; typeshed does not know it.
import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

__all__ = [
    "exit_on_termination",
    "hand_out",
    "interruptible",
    "join_ending",
    "uninterrupted",
    "uninterrupted_call",
    "without_interrupts",
]

P = ParamSpec("P")
R = TypeVar("R")

#: Signals that are kept: those whose handlers raise in practice. Not those of profilers, which want
#: to know where they came.
_KEPT: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
    if hasattr(signal, name)
)

#: Signals by which a program is told to end, and which end it at once unless it says otherwise.
_TERMINATING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Seconds after a signal that was kept after which the next one is not: something has got stuck.
#: What it breaks off may be anywhere, so it is longer than any wait that ends by itself.
_PATIENCE: Final = 15.0

#: Seconds for a thread that was told to end; it may have a socket to close, with bounded linger.
_END_TIMEOUT: Final = 5.0

#: Who is interrupted; asked at each step, where `threading` takes four calls for it.
_main_thread = threading.main_thread().ident


def _on_fork() -> None:
    global _main_thread
    _main_thread = threading.main_thread().ident


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_on_fork)

_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class _Keeper:
    """Stands in for handlers of signals, and keeps what comes for them."""

    __slots__ = ("depth", "handlers", "is_open", "kept", "kept_at", "raised")

    def __init__(self) -> None:
        #: By signal: whom it stands in for.
        self.handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        #: Contexts that it is of; 0: nothing is kept any more.
        self.depth = 1
        #: Whether the code waits, or is the user's: then nothing is kept.
        self.is_open = False
        #: What a handler has raised since it was opened last.
        self.raised: BaseException | None = None
        #: By signal that came, and that its handler has not been told of: where.
        self.kept: dict[int, FrameType | None] = {}
        #: When the first of these came (monotonic).
        self.kept_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            # If the handler raises, what waits is over, and its end may be broken off once more.
            self.is_open = False
            try:
                self.handlers[number](number, frame)
            except BaseException as exc:
                self.raised = exc
                raise
            self.open()
        elif not self.depth:  # a debugger has put it back after its context
            self.handlers[number](number, frame)
        elif not self.kept:
            self.kept_at = time.monotonic()
            self.kept[number] = frame
        elif time.monotonic() - self.kept_at <= _PATIENCE:
            self.kept.setdefault(number, frame)
        else:  # raised here; what its end does is not to be broken off by the next one
            self.kept[number] = frame
            self.deliver()

    def open(self) -> None:
        """Let signals through from now on, also those that were kept."""
        self.is_open = True
        if self.kept:
            self.is_open = False
            self.deliver()
            self.is_open = True

    def take_place(self) -> None:
        """Stand in for all handlers that there are."""
        for number in _KEPT:
            handler = _get(number)
            while type(handler) is _Keeper:  # one that was left behind, and keeps nothing
                handler = handler.handlers[number]
            if callable(handler):
                self.handlers[number] = handler
                _set(number, self)

    def leave(self) -> None:
        """Put the handlers back, and tell them what was kept."""
        try:
            self._put_back()
        except BaseException:  # of one that was back already
            self._put_back()
            raise
        finally:
            self.depth = 0
            if self.kept:
                self.deliver()

    def _put_back(self) -> None:
        for number, handler in self.handlers.items():
            if _get(number) is self:  # else the user has set another one, which counts
                _set(number, handler)

    def deliver(self) -> None:
        """Tell the handlers of what was kept."""
        number = next(iter(self.kept))
        frame = self.kept.pop(number)
        try:
            self.handlers[number](number, frame)
        finally:
            if self.kept:
                self.deliver()


def _present() -> _Keeper | None:
    """Return who keeps signals now."""
    for number in _KEPT:
        handler = _get(number)
        if type(handler) is _Keeper and handler.depth:
            return handler
    return None


class uninterrupted:
    """A context that Ctrl-C does not break off: it is raised at the context's end.

        with uninterrupted():
            packet = socket.recv(...)
            queue.append(packet)

    What waits inside, and what calls code of the user's, does so in `interruptible`. Contexts may
    be nested, also below that. A result that is handed out of one takes `hand_out`.
    """

    __slots__ = ("_keeper", "_was_open")

    def __enter__(self) -> None:
        self._keeper: _Keeper | None = None
        if _thread.get_ident() != _main_thread:
            return
        keeper = _present()
        if keeper is not None:
            self._keeper = keeper
            self._was_open = keeper.is_open
            keeper.is_open = False
            keeper.depth += 1
        else:
            self._was_open = False
            self._keeper = keeper = _Keeper()
            try:
                keeper.take_place()
            except BaseException:  # of a handler whose turn it was not yet
                keeper.leave()
                raise

    def __exit__(self, *exc_info: object) -> None:
        keeper = self._keeper
        if keeper is None or not keeper.depth:
            return
        if keeper.depth == 1:
            keeper.leave()
            return
        keeper.depth -= 1
        if self._was_open:
            keeper.open()


class interruptible:
    """Within `uninterrupted`: a wait, or code of the user's, that Ctrl-C may break off.

    Attributes:
        raised: Afterwards: what a signal's handler has raised in it, also if that was caught there.
    """

    __slots__ = ("_keeper", "raised")

    def __enter__(self) -> interruptible:
        self._keeper: _Keeper | None = None
        self.raised: BaseException | None = None
        if _thread.get_ident() == _main_thread:
            keeper = _present()
            if keeper is not None and not keeper.is_open:
                self._keeper = keeper
                keeper.raised = None
                keeper.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        keeper = self._keeper
        if keeper is not None:
            self.raised = keeper.raised
            keeper.is_open = False


def uninterrupted_call(function: Callable[P, R]) -> Callable[P, R]:
    """Have all of a function be `uninterrupted`, whose result is lost if Ctrl-C came meanwhile."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterrupted():
            return function(*args, **kwargs)

    return call


def hand_out(
    make: Callable[[], R],
    keep: Callable[[R], object],
    was_raised: Callable[[BaseException], object] = lambda _: None,
) -> R:
    """Return what `make` returns, which is `uninterrupted`.

    Args:
        make: Makes a result that is gone if the caller does not get it.
        keep: Called with it, before Ctrl-C that came meanwhile is raised.
        was_raised: Called with what is raised: an error of `make` was told if it is that one, and
            not if Ctrl-C came in its place.
    """
    made: list[R] = []
    try:
        with uninterrupted():
            made.append(make())
        return made[0]
    except BaseException as exc:
        if made:
            keep(made[0])
        was_raised(exc)
        raise exc  # by name: `was_raised` may have dropped the frames below


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C within the context, or the function that it decorates; it must be short.

    For what is run by the interpreter itself, at its end or on garbage collection: it prints an
    exception from there with its traceback and goes on, with half of the work undone.
    """
    if _thread.get_ident() != _main_thread:
        yield  # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # None: not Python's to put back
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def exit_on_termination() -> Iterator[None]:
    """Have SIGTERM, SIGHUP and SIGQUIT raise `SystemExit` within the context.

    For programs with folders of their own, or processes that nothing else looks after: what ends
    these does so then, as after Ctrl-C. Signals that are ignored, or have handlers, are left alone.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    taken = []
    if _thread.get_ident() == _main_thread:
        taken = [it for it in _TERMINATING if signal.getsignal(it) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def join_ending(thread: threading.Thread, timeout: float = _END_TIMEOUT) -> None:
    """Wait until a thread that was told to end has done so, for some seconds.

    Not in itself, where a garbage collection may end what it works for: by its number, as
    `current_thread` is another one in a thread's last lines.
    """
    if thread.is_alive() and thread.ident != threading.get_ident():
        thread.join(timeout)
