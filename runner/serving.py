"""Answers simulators in a thread of its own, while its owner does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from envbus.bus.interrupts import uninterrupted_call

__all__ = ["ServingThread"]


class ServingThread:
    """Runs `serve(is_over)` in a thread, from `start` to `end`.

    Sockets go over into that thread and come back: nothing that `serve` uses may be used meanwhile.

    Args:
        serve: Returns soon after `is_over()` has become true.
    """

    def __init__(self, serve: Callable[[Callable[[], bool]], None]) -> None:
        self._serve = serve
        self._over = threading.Event()
        #: Not `Thread.join`: one that an exception breaks off takes the thread for ended (3.11).
        self._ended = threading.Event()
        self._is_started = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="envbus serving", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether it was to end; Ctrl-C may have broken off the wait for it."""
        return self._over.is_set()

    @uninterrupted_call
    def start(self) -> None:
        """Begin; after Ctrl-C, too, it runs."""
        self._thread.start()
        self._is_started = True

    @uninterrupted_call
    def end(self) -> None:
        """Wait until nothing is used any more. Idempotent; `serve` itself may call it."""
        self._over.set()
        if self._is_started and self._thread is not threading.current_thread():
            self._ended.wait()

    def raise_error(self) -> None:
        """Raise what `serve` raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._serve(self._over.is_set)
        except BaseException as exc:
            self._error = exc
        finally:
            self._ended.set()
