"""A child process of a driver, and how it ended.

Leaves out who starts and watches it (`nursery.py`).
"""

from __future__ import annotations

import signal

import msgspec

from envbus.bus.channel import Started
from envbus.bus.pipe import Pipe
from envbus.bus.stacks import StackFile

__all__ = ["Child", "ExitStatus"]


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


class Child:
    """One child process.

    Attributes:
        name: As given to `start`.
        pid: Its process id; also that of its session and process group.
        pipe: The driver's end of its pipe. Closed by `Nursery.close`; after the child's end it
            may still hold parcels.
        exit_status: How it ended; None until `exits` or `close` has reported it.
        number: The fork server's of it.
        mark: By which what it has started is known (`descendants.py`).
        stacks: Where it writes its stacks when asked.
    """

    def __init__(self, name: str, started: Started, pipe: Pipe, stacks: StackFile) -> None:
        self.name = name
        self.pid = started.pid
        self.pipe = pipe
        self.exit_status: ExitStatus | None = None
        self.number = started.number
        self.mark = started.mark
        self.stacks = stacks

    def __repr__(self) -> str:
        state = self.exit_status.describe() if self.exit_status else "running"
        return f"<Child {self.name} pid={self.pid} {state}>"
