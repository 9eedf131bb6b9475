"""What belongs to one process, and is let go of in every copy that is forked from it.

A forked copy has all descriptors of what it was forked from. Used there, they would take away
what is meant for the owner. Leaves out what letting go means.

A copy that somebody's code forks while envbus calls it, and that leaves this code by an exception,
is at its end: it must not go on as the process that it was forked from.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import weakref
from typing import Any, Final, Protocol, SupportsIndex

__all__ = ["Origin", "StaysHere", "disown_in_forks", "exit_status"]


class StaysHere:
    """What has sockets or processes of its own: it is neither pickled nor copied, and says so."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        """Refuse.

        Raises:
            TypeError: Always.
        """
        name = type(self).__name__
        raise TypeError(
            f"a {name} belongs to the process that made it, and cannot be pickled or copied; send "
            "a function that makes one, and call it there"
        )


class Origin:
    """The process that calls somebody's code; made there."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def end_copy(self, error: BaseException) -> None:
        """End this process, as the interpreter would, if it is a copy that this code has forked.

        Args:
            error: By which it has left that code.
        """
        if os.getpid() == self._pid:
            return
        status = 1
        try:
            if isinstance(error, SystemExit):
                status = exit_status(error)
            else:
                traceback.print_exception(error)
            for stream in (sys.stdout, sys.stderr):
                # The program may have closed or replaced it, or nobody reads it any more.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        finally:  # it may have closed its stderr, so that nothing can be told
            os._exit(status)


def exit_status(error: SystemExit) -> int:
    """Return the exit code that the interpreter would choose, having told what it would tell."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    if sys.stderr is not None:
        sys.stderr.write(f"{error.code}\n")
    return 1


class _Disownable(Protocol):
    def disown(self) -> None:
        """In a forked copy: let go of what is the owner's, without a word to anybody."""


_owned: Final[weakref.WeakSet[_Disownable]] = weakref.WeakSet()


def disown_in_forks(thing: _Disownable) -> None:
    """Have `thing.disown()` called in each process that is forked from this one with `os.fork`.

    Not in copies of these: what is used there as well calls this again in its `disown`.
    """
    _owned.add(thing)


def _disown_all() -> None:
    things = list(_owned)
    _owned.clear()  # first: what goes on in the copy belongs to it now, and says so again
    for thing in things:
        thing.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
