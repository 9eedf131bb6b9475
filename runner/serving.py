"""Answers simulators in a thread of its own, while its owner does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["in_background"]


@contextmanager
def in_background(serve: Callable[[Callable[[], bool]], None]) -> Iterator[None]:
    """Have `serve(is_over)` run in a thread while the block does; wait for its end.

    Sockets go over into that thread and come back: nothing that `serve` uses may be used meanwhile.

    Raises:
        Exception: What `serve` raised, at the end of the block, unless that raises itself.
    """
    over = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(over.is_set)
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, name="envbus serving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
