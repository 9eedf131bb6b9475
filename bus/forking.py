"""What belongs to one process, and is let go of in every copy that is forked from it.

A forked copy has all descriptors of what it was forked from. Used there, they would take away
what is meant for the owner. Leaves out what letting go means.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final, Protocol, SupportsIndex

__all__ = ["StaysHere", "disown_in_forks"]


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


class _Disownable(Protocol):
    def disown(self) -> None:
        """In a forked copy: let go of what is the owner's, without a word to anybody."""


_owned: Final[weakref.WeakSet[_Disownable]] = weakref.WeakSet()


def disown_in_forks(thing: _Disownable) -> None:
    """Have `thing.disown()` called in each process that is forked from this one with `os.fork`."""
    _owned.add(thing)


def _disown_all() -> None:
    for thing in list(_owned):
        thing.disown()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
