"""An env that fails on demand: by its action, or by what stands in a folder."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from envbus.actors.env.renewal import RestartRequest
from envbus.actors.testing import CountingEnv
from envbus.bus.supervision.restart import RestartPolicy
from tests.waiting import pass_time, wait_until

#: Actions.
OK, RAISE, EXIT, SEGFAULT, KILL, HANG, ASK, SYS_EXIT, NO_MEMORY, STOP = 1, *range(20, 29)
#: Restarts without a wait, and more of them than any test needs.
AT_ONCE = RestartPolicy(max_restarts=1000, window=10000.0, backoff=0.0)
RESTART: dict[str, Any] = {"restart": AT_ONCE}


def hang() -> NoReturn:
    while True:
        threading.Event().wait(3600.0)


def _raise(error: BaseException) -> NoReturn:
    raise error


_DEEDS: dict[int, Callable[[], object]] = {
    RAISE: lambda: _raise(ValueError("raised on purpose")),
    EXIT: lambda: os._exit(7),
    SEGFAULT: lambda: ctypes.string_at(0),
    KILL: lambda: os.kill(os.getpid(), signal.SIGKILL),
    HANG: hang,
    ASK: lambda: _raise(RestartRequest("the simulator wants it")),
    SYS_EXIT: lambda: _raise(SystemExit(3)),
    NO_MEMORY: lambda: _raise(MemoryError("no more")),
    STOP: lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that fails by action, and once per file `init-*`, `reset-*` or `slow-*`.

    What follows the dash is the action whose deed it is; its infos hold its process id.
    """

    def __init__(self, folder: Path | None = None, length: int = 10**6) -> None:
        super().__init__(length)
        self.folder = folder
        self._fail("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._fail("reset")
        observation, info = super().reset(seed=seed)
        return observation, {**info, "pid": os.getpid()}

    def step(self, action: Any) -> Any:
        _DEEDS.get(int(action), int)()
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"pid": os.getpid()}

    def _fail(self, where: str) -> None:
        for file in sorted(self.folder.glob(f"{where}-*[0-9]")) if self.folder else ():
            try:
                file.unlink()
            except FileNotFoundError:  # another env was faster
                continue
            gate = file.with_suffix(".gate")
            wait_until(lambda: not gate.exists(), "the gate")  # noqa: B023 - waits at once
            _DEEDS.get(int(file.name.split("-")[1]), int)()
            return


def plan(folder: Path, where: str, action: int, times: int = 1) -> None:
    """Have the next constructors or resets do what `action` does."""
    for number in range(times):
        (folder / f"{where}-{action}-{number}").touch()


@contextmanager
def held(folder: Path, where: str, action: int = OK) -> Iterator[None]:
    """Have the next constructor or reset wait until this is left, then do what `action` does."""
    gate = folder / f"{where}-{action}-0.gate"
    gate.touch()
    (folder / f"{where}-{action}-0").touch()
    try:
        yield
    finally:
        gate.unlink()


def faulty(num_envs: int, folder: Path | None = None) -> list[Callable[[], FaultyEnv]]:
    return [partial(FaultyEnv, folder)] * num_envs


class LateEnv(CountingEnv):
    """A `CountingEnv` with endless episodes that takes `seconds` for each `every`-th step.

    Reset with its id as its seed, each observation says whose it is, which of its steps and after
    which action.
    """

    def __init__(self, every: int = 3, seconds: float = 0.01) -> None:
        super().__init__(10**6)
        self.every = every
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if (self.count + int(self.np_random_seed or 0)) % self.every == 0:
            pass_time(self.seconds)
        return result

    def late_count(self) -> tuple[int, int]:
        """Return id and steps so far, late."""
        pass_time(self.seconds)
        return int(self.np_random_seed or 0), self.count
