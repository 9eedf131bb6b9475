"""Reads what `faulthandler` writes: the stacks of a process' threads, innermost frame first.

Pure: no file, clock or process in this file. Who is asked for it: `stacks.py`.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_complete", "tidy"]

#: What each thread's section begins with, and that of the thread in the signal's handler.
_THREAD, _CURRENT = "Thread 0x", "Current thread 0x"
#: The outermost frame of a child that is its own business, and its watchdog's only one.
_ENTRY: Final = re.compile(r'bus/child\.py", line \d+ in _run$')
_WATCHDOG: Final = re.compile(r'bus/child\.py", line \d+ in _watch$')
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


def _is_watchdog(lines: list[str]) -> bool:
    return any(_WATCHDOG.search(line) for line in lines)


def _without_entry(lines: list[str]) -> list[str]:
    for number, line in enumerate(lines):
        if _ENTRY.search(line):
            return lines[:number]
    return lines
