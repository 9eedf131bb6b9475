"""What is done while a server runs: when a file was changed, and when the operator asks for it.

Leaves out what is done, and whence the operator asks (`cli/serve.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from envbus.bus.watched_files import FileWatch

__all__ = ["LOOK_EVERY", "Upkeep"]

logger = logging.getLogger("envbus.runner.serving")

#: Seconds between two looks at the files.
LOOK_EVERY: Final = 1.0


class Upkeep:
    """Does what is due. What fails is logged, and tried again with the next change, or demand."""

    def __init__(self) -> None:
        self._duties: list[tuple[str, FileWatch | None, Callable[[], object]]] = []
        self._look_at = 0.0

    def add(self, what: str, do: Callable[[], object], watch: FileWatch | None = None) -> None:
        """Add something that is done on demand, and after a change of files.

        Args:
            what: For people, "tokens".
            do: Does it.
            watch: Looks at the files, since before they were read first; None: on demand only.
        """
        self._duties.append((what, watch, do))

    def look(self, now: float, *, demanded: bool = False) -> None:
        """Do what is due at a time of a monotonic clock; on demand all there is."""
        if not demanded and now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY
        for what, watch, do in self._duties:
            changed = watch is not None and watch.changed()
            if not demanded and not changed:
                continue
            try:
                do()
            except Exception as exc:  # a file that is half written: the server goes on
                logger.warning("%s: not loaded anew: %s", what, exc)
            else:
                logger.info("%s: looked at again", what)
