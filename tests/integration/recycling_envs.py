"""Envs that keep a ledger of what they were asked, and that use memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envbus.actors.testing import CountingEnv

MB = 2**20


class LedgerEnv(CountingEnv):
    """A `CountingEnv` that writes a line to a file for each thing it does, with the time."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(length)
        self._file = path.open("a", buffering=1)
        self._note("made")

    def _note(self, what: str) -> None:
        self._file.write(f"{what} {time.monotonic()}\n")

    def reset(self, **kwargs: Any) -> Any:
        self._note("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._note("step")
        return super().step(action)

    def close(self) -> None:
        self._note("closed")


class Ledger(NamedTuple):
    """What one env did, over all of its lives."""

    steps: int
    made: int
    #: For each exchange: from when the old one was closed until the new one was made.
    gaps: list[tuple[float, float]]


def read_ledger(path: Path) -> Ledger:
    lines = [line.split() for line in path.read_text("utf-8").splitlines()]
    closed = [float(at) for what, at in lines if what == "closed"]
    made = [float(at) for what, at in lines if what == "made"]
    steps = sum(what == "step" for what, _ in lines)
    return Ledger(steps, len(made), list(zip(closed, made[1:], strict=False)))


class LeakingEnv(CountingEnv):
    """Keeps 256 KiB more with each step."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self._kept: list[Any] = []

    def step(self, action: Any) -> Any:
        self._kept.append(np.ones(MB // 4, np.uint8))
        return super().step(action)


class GreedyEnv(CountingEnv):
    """Action 13 takes 300 MiB, action 14 has another process take them; then it never returns."""

    def step(self, action: Any) -> Any:
        if action == 13:
            self._kept = np.ones(300 * MB, np.uint8)
        if action == 14:
            script = "import time; kept = bytearray(300 * 2**20); time.sleep(1000)"
            self._process = subprocess.Popen([sys.executable, "-c", script])
        if action in (13, 14):
            time.sleep(1000)
        return super().step(action)
