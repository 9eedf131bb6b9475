"""The parts of this process that are shown to whoever asks, from their begin to their end.

Leaves out who asks, and how (`listener.py`).
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from typing import Any, Final, Protocol

import msgspec

from envbus.bus.brief import printable
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call
from envbus.runner.monitoring.figures import (
    EpisodesFigures,
    PartFigures,
    PictureFigures,
    RunFigures,
)
from envbus.runner.monitoring.listener import Listener, Question
from envbus.runner.monitoring.pictures import to_png

__all__ = ["Part", "run_figures", "show", "unshow"]

logger = logging.getLogger("envbus.runner.monitoring")

#: Switches it off: "0".
VARIABLE: Final = "ENVBUS_MONITORING"
#: How often a part is read again that has changed meanwhile.
_TRIES: Final = 5
#: Characters of a command line.
_LONGEST_COMMAND: Final = 200


class Part(Protocol):
    """What can be shown."""

    def figures(self, name: str) -> PartFigures:
        """Return its figures under this name.

        Called by another thread than uses it, at any time: it reads, and waits for nothing. So
        are these, which a part may have:

        - `picture(env_id)` returns an env's last observation as a picture (`pictures.py`); None: it
          is none.
        - `episode_figures()` returns those of the episodes that are open.
        """


class _ShownParts:
    """The parts of one process, and the listener, which is there as long as there are any."""

    def __init__(self) -> None:
        #: A signal's handler may close a part.
        self._lock = threading.RLock()
        #: By number: `weakref`s, since whoever drops a part without closing it tells nobody.
        self._parts: dict[int, tuple[str, weakref.ref[Part]]] = {}
        self._numbers: Counter[str] = Counter()
        self._count = itertools.count()
        self._listener: Listener | None = None
        self._began = time.time()
        disown_in_forks(self)

    @uninterrupted_call  # or the thread is there, and nobody has it; or all signals stay blocked
    def add(self, part: Part, kind: str) -> None:
        if os.environ.get(VARIABLE) == "0":
            return
        with self._lock:
            self._numbers[kind] += 1
            reference = weakref.ref(part, lambda _: self.remove(None))
            self._parts[next(self._count)] = f"{kind}-{self._numbers[kind]}", reference
            if self._listener is None:
                self._listener = Listener.open(self.answer)

    @uninterrupted_call
    def remove(self, part: Part | None) -> None:
        """Forget a part, and those that are gone."""
        with self._lock:
            for number, (_, reference) in list(self._parts.items()):
                held = reference()
                if held is part or held is None:
                    self._parts.pop(number, None)  # another one may be found gone meanwhile
            if not self._parts and self._listener is not None:
                self._listener.close()
                self._listener = None

    def answer(self, question: Question) -> msgspec.Struct | None:
        if question.what == "figures":
            return self.figures()
        if question.what == "picture":
            picture = self._ask(question.part, "picture", question.env)
            return PictureFigures(png=b"" if picture is None else to_png(picture))
        if question.what == "episodes":
            return EpisodesFigures(episodes=self._ask(question.part, "episode_figures") or [])
        return None

    def _ask(self, part_name: str, method: str, *arguments: object) -> Any:
        """Return what a part says; None: there is no such part, or it has no such method."""
        for name, reference in list(self._parts.values()):
            if name == part_name:
                asked = getattr(reference(), method, None)
                return None if asked is None else asked(*arguments)
        return None

    def figures(self) -> RunFigures:
        parts = []
        for name, reference in list(self._parts.values()):
            part = reference()
            if part is not None and (figures := _read(part, name)) is not None:
                parts.append(figures)
        return RunFigures(
            pid=os.getpid(),
            at=time.time(),
            began=self._began,
            command=_command(),
            version=_version(),
            parts=parts,
        )

    def disown(self) -> None:
        """In a forked copy: the parts are another process'."""
        self._lock = threading.RLock()
        self._parts = {}
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.disown()
        disown_in_forks(self)


def _read(part: Part, name: str) -> PartFigures | None:
    """Return a part's figures; None: it changes all the time, or is at its end."""
    for _ in range(_TRIES):
        try:
            return part.figures(name)
        except RuntimeError:  # a dict has changed while it was read
            continue
        except Exception as exc:  # half made, or half closed: all others are shown
            logger.debug("%s cannot be shown: %s", name, exc, exc_info=True)
            return None
    return None


def _command() -> str:
    words = [os.path.basename(word) if i == 0 else word for i, word in enumerate(sys.argv)]
    # Arguments that are no UTF-8, as names of files may be, cannot be told as they are.
    return printable(" ".join(words)[:_LONGEST_COMMAND]) or "python"


def _version() -> str:
    import envbus

    return envbus.__version__


_registry: Final = _ShownParts()


def show(part: Part, kind: str) -> None:
    """Show a part to whoever asks, until `unshow`, or until it is gone.

    Args:
        part: It.
        kind: What it is, the begin of its name.
    """
    _registry.add(part, kind)


def unshow(part: Part) -> None:
    """Show it no more. Idempotent."""
    _registry.remove(part)


def run_figures() -> RunFigures:
    """Return the figures of all parts of this process."""
    return _registry.figures()
