"""How a child ended and what it died of, as far as can be told; what one says, and hangs at.

Pure: no file, clock or process in this file. Where the numbers come from: `memory/usage.py`,
`forkserver.py`; who is asked for stacks: `stacks.py`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from itertools import takewhile
from typing import Final

import msgspec

from envbus.bus.brief import printable

__all__ = [
    "ExitStatus",
    "KillExplainer",
    "innermost_line",
    "is_complete",
    "last_words",
    "readable",
    "tidy",
]

#: Seconds for which a rise of the kernel's counter explains a SIGKILL. The kernel counts before
#: the process, which may have gigabytes to give back, is gone.
_OOM_WINDOW: Final = 3.0
#: Seconds between looks at that counter.
_OOM_INTERVAL: Final = 1.0
#: Share of its limit from which on a process' memory is worth a remark.
_NEARLY: Final = 0.9
#: Lines and characters that an error shows of it.
_LAST_LINES: Final = 25
_LAST_CHARACTERS: Final = 4000
#: Lines that are shown from before a crash: a C library's own words about it.
_LINES_BEFORE: Final = 5
#: Characters of one line beside a crash's dump.
_LONGEST_LINE: Final = 400
#: First line of what `faulthandler` writes at a crash.
_FATAL: Final = "Fatal Python error:"
#: Colours and cursor movements of a terminal.
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ExitStatus(msgspec.Struct, frozen=True):
    """How a child ended: by its own exit code, or by a signal."""

    code: int | None = None
    signal: int | None = None
    #: What else is known, e.g. that its fork server died, or that it looks out of memory.
    note: str = ""
    #: The last lines that it, or what it had started, wrote to stderr.
    stderr: str = ""

    def describe(self) -> str:
        """Return it in words: `"exit code 9"`, `"signal SIGKILL"`."""
        if self.signal is not None:
            try:
                what = f"signal {signal.Signals(self.signal).name}"
            except ValueError:  # a real-time signal has a number only
                what = f"signal {self.signal}"
        else:
            what = f"exit code {self.code}"
        return f"{what} ({self.note})" if self.note else what

    def report(self) -> str:
        """Return `describe()` and, on lines of their own, the last that it wrote to stderr."""
        if not self.stderr:
            return self.describe()
        shown = self.stderr.replace("\n", "\n  | ")
        return f"{self.describe()}\nThe end of its stderr:\n  | {shown}"


class KillExplainer:
    """Knows what the kernel has lately killed for want of memory.

    Times are in seconds of a clock that never goes back.

    Args:
        count_kills: Returns how many processes it has killed so far; None where that is not known.
        limit: Returns how many bytes there may be in use; None: no limit is known.
    """

    def __init__(
        self, count_kills: Callable[[], int | None], limit: Callable[[], int | None]
    ) -> None:
        self._count_kills = count_kills
        self._limit = limit
        self._kills = count_kills()
        self._rose_at: float | None = None
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Read the kernel's counter, once per second at most; to be called again and again."""
        if now >= self._next_look:
            self._next_look = now + _OOM_INTERVAL
            self._observe(now)

    def explain(self, peak: int, now: float) -> str:
        """Return what is to be said of a SIGKILL that was not ours; empty if nothing.

        Args:
            peak: Most memory that the process ever had, in bytes; 0 if unknown.
            now: When it ended.
        """
        self._observe(now)
        limit = self._limit()
        rose = self._rose_at is not None and now - self._rose_at <= _OOM_WINDOW
        nearly = limit is not None and peak >= _NEARLY * limit
        if not (rose or nearly):
            return ""
        what = "out of memory, by the kernel's counter" if rose else "perhaps out of memory"
        if not peak:
            return what
        of = "" if limit is None else f" of {_size(limit)}"
        return f"{what}; its memory reached {_size(peak)}{of}"

    def _observe(self, now: float) -> None:
        kills = self._count_kills()
        if kills is not None and self._kills is not None and kills > self._kills:
            self._rose_at = now
        self._kills = kills


def last_words(tail: bytes) -> str:
    """Return the lines at the end of a stream that are worth showing; empty if there are none.

    Without terminal colours and what a carriage return has overwritten. A crash's dump is shown
    from its beginning, where it names the cause.
    """
    text = _ESCAPES.sub("", tail.decode("utf-8", "replace"))
    before, fatal, dump = text.rpartition(_FATAL)
    if not fatal:
        shown = "\n".join(_lines(text)[-_LAST_LINES:])
        return shown if len(shown) <= _LAST_CHARACTERS else f"... {shown[-_LAST_CHARACTERS:]}"
    lines = _lines(before)[-_LINES_BEFORE:] + tidy(fatal + dump)
    shown = "\n".join(line[:_LONGEST_LINE] for line in lines[:_LAST_LINES])
    return shown if len(shown) <= _LAST_CHARACTERS else f"{shown[:_LAST_CHARACTERS]} ..."


def readable(tail: bytes, *, is_cut: bool) -> str:
    """Return the end of a stream as lines that any terminal and page may be shown.

    Without terminal colours, empty lines and what a carriage return has overwritten; all other
    control characters stand there as escapes.

    Args:
        tail: What the stream ends with.
        is_cut: Whether something stood before it: then it is shown from the next line on, if any.
    """
    text = _ESCAPES.sub("", tail.decode("utf-8", "replace"))
    if is_cut:
        text = text.partition("\n")[2] or text
    return "\n".join(printable(line.expandtabs()) for line in _lines(text))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line]


def _size(count: int) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"


# --- what `faulthandler` writes: the stacks of threads, innermost frame first ----------------

#: What each thread's section begins with, and that of the thread in the signal's handler.
_THREAD, _CURRENT = "Thread 0x", "Current thread 0x"
#: The outermost frame of a child that is its own business, and its watchdog's only one.
_ENTRY: Final = re.compile(r'bus/process/child\.py", line \d+ in _run$')
_WATCHDOG: Final = re.compile(r'bus/process/child\.py", line \d+ in _watch$')
#: One frame.
_FRAME: Final = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Files of envbus; of Python's own library, and what has no file.
_OURS: Final = re.compile(r"/envbus/(?:bus|actors|runner)/")
_LIBRARY: Final = re.compile(r"^<|/lib(?:64)?/python3[.\d]*/(?!(?:site|dist)-packages/)")
#: What follows the sections of a crash, and is long.
_EXTENSIONS: Final = "Extension modules:"


def is_complete(text: str) -> bool:
    """Return whether all threads seem to be in `text`.

    The thread in the handler is the main thread, whose stack is written last.
    """
    _, current, frames = text.partition(_CURRENT)
    return bool(current) and frames.count("\n") > 1 and text.endswith("\n")


def tidy(text: str) -> list[str]:
    """Return the lines of a dump that are worth reading, the current thread's first.

    Without empty lines, envbus' own watchdog thread, and the frames outside a child's entry.
    """
    head: list[str] = []
    sections = [head]
    for line in text.splitlines():
        if line.startswith((_THREAD, _CURRENT)):
            sections.append([line])
        elif line.strip() and not line.startswith(_EXTENSIONS):
            sections[-1].append(line.rstrip())
    threads = [_without_entry(lines) for lines in sections[1:] if not _is_watchdog(lines)]
    threads.sort(key=lambda lines: not lines[0].startswith(_CURRENT))
    return head + [line for lines in threads for line in lines]


def innermost_line(text: str) -> str:
    """Return where the first thread of a tidied dump is: `sims/walker.py:88 in step`; "": nowhere.

    Of what runs inside envbus, an env for example, that is the innermost line that is not of
    Python's own library.
    """
    _, *lines = text.splitlines() or [""]
    section = takewhile(lambda line: not line.startswith((_THREAD, _CURRENT)), lines)
    frames = [frame for line in section if (frame := _FRAME.match(line))]
    guests = list(takewhile(lambda frame: not _OURS.search(frame["file"]), frames))
    own = [frame for frame in guests if not _LIBRARY.search(frame["file"])]
    return next((_place(frame) for frame in [*own, *guests, *frames]), "")


def _place(frame: re.Match[str]) -> str:
    file = "/".join(frame["file"].split("/")[-2:])
    return f"{file}:{frame['line']} in {frame['function']}"


def _is_watchdog(lines: list[str]) -> bool:
    return any(_WATCHDOG.search(line) for line in lines)


def _without_entry(lines: list[str]) -> list[str]:
    for number, line in enumerate(lines):
        if _ENTRY.search(line):
            return lines[:number]
    return lines
