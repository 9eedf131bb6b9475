"""Asks a process for the Python stacks of its threads, also one that is stuck in C code.

`faulthandler` writes them in the handler of a signal, without the interpreter's help, into a
nameless file that the asking process can open. The signal disturbs little: system calls go on
after it, but for sleeps and polls of C code, which may return early. Leaves out who is asked, and
how the signal gets there (`process_group.py`, `forkserver.py`).
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from envbus.bus.memory.memfd import FOUND_BY_LABEL, create_memfd, open_labelled
from envbus.bus.process.descendants import process_state
from envbus.bus.process.exit_report import is_complete, tidy

__all__ = [
    "LEFT_TO_WRITERS",
    "STACK_SIGNAL",
    "StackFile",
    "describe_stacks",
    "native_stacks",
    "offer_stacks",
]

#: Whether a process that reads stacks need not keep the file open: see `StackFile.leave_to`.
LEFT_TO_WRITERS: Final = FOUND_BY_LABEL

#: The signal, SIGRTMIN + 11 on Linux. Programs use SIGUSR1 and SIGUSR2 for themselves, the C
#: library and language runtimes the first few and the last few of the real-time signals.
STACK_SIGNAL: Final[int] = (
    signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has no others
)
#: What the file is called, for people, and in `/proc/<pid>/fd`.
_LABEL: Final = "envbus-stacks"
#: Seconds between looks at the files.
_INTERVAL: Final = 0.005
#: Bytes that are read of a file, which another process may have filled with anything.
_MOST_BYTES: Final = 2**20
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

    Args:
        fd: A descriptor of a file that is there, which is closed with this; None: of a new one.

    Attributes:
        fd: Its descriptor, to be handed to the process that writes; -1 once that one alone has it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = create_memfd(_LABEL) if fd is None else fd
        # Writes go to the end, wherever that is after `clear`.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        self._inode = os.fstat(self.fd).st_ino
        #: The writer's descriptor, by which the file is opened when `fd` is closed.
        self._path = ""

    @classmethod
    def of(cls, pid: int) -> StackFile | None:
        """Open the file of a process that writes its stacks to one; whoever started it.

        None: it does not, so that `STACK_SIGNAL` would end it; it is another user's; it is gone.
        """
        with contextlib.suppress(OSError):
            if _catches_the_signal(pid):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        path = f"/proc/{pid}/fd/{number}"
                        return cls(open_labelled(path, _LABEL, os.O_RDWR))
        return None

    def leave_to(self, pid: int) -> None:
        """Close this process' descriptor if the file can be opened by that of process `pid`."""
        with contextlib.suppress(OSError):  # no /proc, or another one's; it is kept then
            for number in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    os.close(self._open(path))
                    self.close()
                    self._path = path
                    return

    def clear(self) -> None:
        """Forget what was written."""
        with contextlib.suppress(OSError), self._opened() as fd:
            os.ftruncate(fd, 0)

    def read(self) -> str:
        """Return what was written since `clear`; nothing if the file is gone with its writer."""
        with contextlib.suppress(OSError), self._opened() as fd:
            return os.pread(fd, _MOST_BYTES, 0).decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        """Close this process' descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.dup(self.fd) if self.fd >= 0 else self._open(self._path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        """Open what must be this file.

        Raises:
            OSError: It is another one, or its process is gone or of another user.
        """
        fd = open_labelled(path, _LABEL, os.O_RDWR)
        if os.fstat(fd).st_ino != self._inode:  # of another process that has got the same id
            os.close(fd)
            raise FileNotFoundError(path)
        return fd


def _catches_the_signal(pid: int) -> bool:
    """Return whether a process has a handler for `STACK_SIGNAL`, as Linux tells.

    Raises:
        OSError: It is gone.
    """
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


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
