"""What a dead child died of, as far as numbers and its last words tell.

Pure: no file, clock or process in this file. Where the numbers come from: `cgroup.py`,
`reaping.py`.
"""

from __future__ import annotations

import re
from typing import Final

from envbus.bus.thread_dump import tidy

__all__ = ["OomWatch", "StderrTail", "explain_kill", "last_words"]

#: Seconds for which a rise of the kernel's counter explains a SIGKILL. The kernel counts before
#: the process, which may have gigabytes to give back, is gone.
_OOM_WINDOW: Final = 3.0
#: Share of its limit from which on a process' memory is worth a remark.
_NEARLY: Final = 0.9
#: Bytes of a child's stderr that are kept. The dump of a crash in a dozen threads fits.
_TAIL_BYTES: Final = 16 * 1024
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


class OomWatch:
    """Tells whether the kernel's counter of out-of-memory kills has risen lately."""

    def __init__(self, kills: int | None) -> None:
        self._kills = kills
        self._rose_at: float | None = None

    def observe(self, kills: int | None, now: float) -> None:
        """Take note of the counter; None where it cannot be read."""
        if kills is not None and self._kills is not None and kills > self._kills:
            self._rose_at = now
        self._kills = kills

    def rose_lately(self, now: float) -> bool:
        """Return whether it rose so lately that a process which ended now may be meant."""
        return self._rose_at is not None and now - self._rose_at <= _OOM_WINDOW


def explain_kill(*, rose: bool, peak: int, limit: int | None) -> str:
    """Return what is to be said of a SIGKILL that was not ours; empty if nothing.

    Args:
        rose: Whether the kernel's counter of out-of-memory kills rose at that time.
        peak: Most memory that the process ever had, in bytes; 0 if unknown.
        limit: Bytes that it and those beside it may have; None if unknown.
    """
    nearly = limit is not None and peak >= _NEARLY * limit
    if not (rose or nearly):
        return ""
    what = "out of memory, by the kernel's counter" if rose else "perhaps out of memory"
    if not peak:
        return what
    of = "" if limit is None else f" of {_size(limit)}"
    return f"{what}; its memory reached {_size(peak)}{of}"


class StderrTail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        """Take in what came, and forget what is too old."""
        self._bytes += data[-_TAIL_BYTES:]
        del self._bytes[:-_TAIL_BYTES]

    def __bytes__(self) -> bytes:
        return bytes(self._bytes)


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


def _lines(text: str) -> list[str]:
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line]


def _size(count: int) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"
