"""Asks a process for the Python stacks of its threads, also one that is stuck in C code.

`faulthandler` writes them in the handler of a signal, without the interpreter's help, into a
nameless file that the asking process shares. The signal disturbs little: system calls go on
after it, but for sleeps and polls of C code, which may return early. Leaves out who is asked, and
how the signal gets there (`nursery.py`, `forkserver.py`).
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
from envbus.bus.thread_dump import is_complete, tidy

__all__ = ["STACK_SIGNAL", "StackFile", "describe_stacks", "native_stacks", "offer_stacks"]

#: The signal, SIGRTMIN + 11 on Linux. Programs use SIGUSR1 and SIGUSR2 for themselves, the C
#: library and language runtimes the first few and the last few of the real-time signals.
STACK_SIGNAL: Final[int] = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has no others
)
#: Seconds between looks at the files.
_INTERVAL: Final = 0.005
#: Characters of one process' stacks: faulthandler shows up to 100 threads of 100 frames each.
_LONGEST: Final = 8000
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


def native_stacks(pid: int) -> str:
    """Return a process' stacks with their native frames; empty unless py-spy may look.

    That is where it is installed beside this interpreter (the extra `py-spy`) and the system
    permits it to trace: as root, or with `kernel.yama.ptrace_scope=0`. Takes a tenth of a second
    to some seconds, and stops the process for a part of it.
    """
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
        _, thread, stacks = done.stdout.partition("\nThread ")
        return f"{thread}{stacks}".strip()[:_LONGEST]
    return ""


def _describe(pid: int, text: str, timeout: float) -> str:
    if text:
        shown = "\n".join(tidy(text))
        return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."
    why = _STATES.get(process_state(pid), f"it did not react within {timeout} s")
    return f"no stack of process {pid}: {why}"
