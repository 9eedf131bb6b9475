"""A second process that keeps a lookout while this one is busy and can be stuck for ever.

Another process, as no thread gets to run beside a call that holds the interpreter's lock. Leaves
out what is looked out for and what is done then.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping

__all__ = ["lookout"]


@contextlib.contextmanager
def lookout(watched: Mapping[int, int], act: Callable[[], object]) -> Iterator[None]:
    """Within the context, have a forked process call `act` once a descriptor has an event.

    For a process that has one thread when the context is entered. On leaving the context the
    other process is gone; if it has begun to act, that is waited for.

    Args:
        watched: Events of `select.poll` by descriptor; hang-ups are always looked out for.
        act: Called in the other process, which then ends. May kill this one.

    Raises:
        OSError: There is no room for another process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _look_out(watched, theirs.fileno(), act)
            except BaseException:  # nothing may return into what this process was forked from
                traceback.print_exc()
            finally:
                os._exit(0)
        try:
            yield
        finally:
            # Not only closed: what happened meanwhile may have forked processes that hold a copy.
            ours.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(ChildProcessError):  # reaped by what happened meanwhile
                os.waitpid(pid, 0)


def _look_out(watched: Mapping[int, int], over_fd: int, act: Callable[[], object]) -> None:
    poller = select.poll()
    poller.register(over_fd, 0)
    for fd, events in watched.items():
        poller.register(fd, events)
    seen = {fd for fd, _ in poller.poll()}
    if over_fd not in seen:
        act()
