"""Asks a process for the Python stacks of its threads, also one that is stuck in C code.

`faulthandler` writes them in the handler of a signal, without the interpreter's help, into a
nameless file that the asking process shares. Leaves out who is asked, and how the signal gets
there (`process.py`, `forkserver.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from envbus.bus.anonymous import anonymous_file
from envbus.bus.descendants import process_state

__all__ = ["STACK_SIGNAL", "StackFile", "describe_stacks", "is_complete", "offer_stacks", "tidy"]

#: The signal, SIGRTMIN + 11 on Linux. Programs use SIGUSR1 and SIGUSR2 for themselves, the C
#: library and language runtimes the first few and the last few of the real-time signals.
STACK_SIGNAL: Final[int] = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has no others
)
#: Seconds between looks at the files.
_INTERVAL: Final = 0.005
#: Characters of one process' stacks: faulthandler shows up to 100 threads of 100 frames each.
_LONGEST: Final = 8000
#: What each section of faulthandler's text begins with, and that of the thread in the handler.
_THREAD, _CURRENT = "Thread 0x", "Current thread 0x"
#: Seconds that py-spy may take.
_PY_SPY_TIMEOUT: Final = 5.0
_STATES: Final = {
    "D": "it waits inside the kernel (state D)",
    "T": "it was stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
}


class StackFile:
    """A nameless file that one process writes its stacks to and another reads.

    Attributes:
        fd: Its descriptor, to be handed to the process that writes.
    """

    def __init__(self) -> None:
        self.fd = anonymous_file("envbus-stacks")
        # Writes go to the end, wherever that is after `clear`.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)

    def clear(self) -> None:
        """Forget what was written."""
        os.ftruncate(self.fd, 0)

    def read(self) -> str:
        """Return what was written since `clear`."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Close this process' descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def offer_stacks(fd: int) -> None:
    """Have this process write its threads' stacks to `fd` whenever it gets `STACK_SIGNAL`."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def describe_stacks(processes: Sequence[tuple[int, StackFile]], timeout: float) -> list[str]:
    """Wait for what processes write that have been sent `STACK_SIGNAL`.

    Args:
        processes: Process id and file of each.
        timeout: Seconds for all of them together.

    Returns:
        For each, its stacks as text, or why there are none.
    """
    deadline = time.monotonic() + timeout
    texts = [""] * len(processes)
    while True:
        before, texts = texts, [file.read() for _, file in processes]
        if texts == before and all(map(is_complete, texts)):
            break
        if time.monotonic() >= deadline:
            break
        time.sleep(_INTERVAL)
    return [_describe(pid, text, timeout) for (pid, _), text in zip(processes, texts, strict=True)]


def is_complete(text: str) -> bool:
    """Return whether all threads seem to be in `text`.

    The thread in the handler is the main thread, whose stack is written last.
    """
    _, current, frames = text.partition(_CURRENT)
    return bool(current) and frames.count("\n") > 1 and text.endswith("\n")


def tidy(text: str) -> str:
    """Return faulthandler's text with the main thread first and without envbus' own watchdog."""
    sections: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith((_THREAD, _CURRENT)):
            sections.append([])
        if line and sections:
            sections[-1].append(line)
    sections = [section for section in sections if not _is_watchdog(section)]
    sections.sort(key=lambda section: not section[0].startswith(_CURRENT))
    tidied = "\n".join(line for section in sections for line in section)
    return tidied if len(tidied) <= _LONGEST else f"{tidied[:_LONGEST]} ..."


def _is_watchdog(section: Sequence[str]) -> bool:
    return len(section) > 1 and section[1].endswith("in _watch") and "child.py" in section[1]


def _describe(pid: int, text: str, timeout: float) -> str:
    native = _ask_py_spy(pid)
    if native:
        return native
    if text:
        return tidy(text)
    why = _STATES.get(process_state(pid), f"it did not react within {timeout} s")
    return f"no stack of process {pid}: {why}"


def _ask_py_spy(pid: int) -> str:
    """Return the stacks with their native frames, if py-spy is installed and may look."""
    program = Path(sys.executable).with_name("py-spy")  # the extra puts it there
    if not program.exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603 (the program beside our own interpreter)
            [program, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_TIMEOUT,
            check=True,
        )
        return done.stdout.strip()[:_LONGEST]
    return ""
