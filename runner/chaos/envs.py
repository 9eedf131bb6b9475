"""The env of the chaos run: it records what it applies, says so, and breaks when told to."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt

from envbus.runner.chaos.audit import NOTHING_NOTED, RESET, note_of, reward_of
from envbus.runner.chaos.records import Ledger
from envbus.runner.chaos.schedule import COMMANDS, FaultKind

__all__ = ["SLEEPER", "ChaosEnv"]

Array: TypeAlias = npt.NDArray[np.int64]
Info: TypeAlias = dict[str, Any]

#: What a leaked child process runs: longer than any run lasts.
SLEEPER = ("sleep", "86413")
#: Descriptors that one leak takes.
_LEAKED_DESCRIPTORS = 5
_KINDS = {number: kind for kind, number in COMMANDS.items()}


class _UntellableError(Exception):
    """Cannot be made from its arguments, and cannot be printed."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)

    def __str__(self) -> str:
        raise RuntimeError("no text")


class ChaosEnv(gymnasium.Env[Array, Array]):
    """Observes `[env id, life, count, nonce, pid]`, int64; see `audit.Applied`.

    An action is `[nonce, command, amount]`: a command of `schedule.COMMANDS`, or 0, and how
    much of it in thousandths. What must outlive the process is in files of `folder`.

    Args:
        env_id: Which env of the pool.
        folder: Of this run.
        step_seconds: Sleep in each step.
    """

    observation_space = gymnasium.spaces.Box(0, 2**62, (5,), np.int64)
    action_space = gymnasium.spaces.Box(0, 2**62, (3,), np.int64)

    def __init__(self, env_id: int, folder: str, step_seconds: float) -> None:
        self._env_id = env_id
        self._step_seconds = step_seconds
        self._fuses = {kind: Path(folder) / f"{kind.name}-{env_id}" for kind in _FUSED}
        self._blow(FaultKind.RAISE_INIT)
        self._ledger = Ledger(folder, env_id)
        self._life = secrets.randbits(60)
        self._count = 0
        self._left = 0
        self._leaked: list[object] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, Info]:
        """Begin an episode of a random length, by the seed."""
        super().reset(seed=seed, options=options)
        self._blow(FaultKind.RAISE_RESET)
        self._left = int(self.np_random.integers(20, 200))
        return self._apply(RESET), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, Info]:
        """Apply the action, then do what it commands."""
        nonce, command, amount = action.tolist()
        observation = self._apply(nonce)
        self._left -= 1
        if command:
            self._obey(_KINDS[command], amount / 1000)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        note = note_of(nonce)
        info = {} if note == NOTHING_NOTED else {"nonce": note}
        over = self._left <= 0
        odd = nonce % 2 == 1
        return observation, float(reward_of(nonce)), over and odd, over and not odd, info

    def close(self) -> None:
        """Give back what has a process of its own; the rest goes with this one."""
        self._ledger.close()
        for child in self._children:
            child.kill()
            child.wait()

    def _apply(self, nonce: int) -> Array:
        self._count += 1
        self._ledger.write(self._life, self._count, nonce)
        return np.array([self._env_id, self._life, self._count, nonce, os.getpid()], np.int64)

    def _obey(self, kind: FaultKind, amount: float) -> None:
        match kind:
            case FaultKind.RAISE_STEP:
                _raise_one(int(amount))
            case FaultKind.RAISE_RESET:
                self._light(kind, int(amount))
                self._left = 0
            case FaultKind.RAISE_INIT:
                self._light(kind, int(amount))
                raise RuntimeError("on purpose, and the constructor will, too")
            case FaultKind.SLOW | FaultKind.NEARLY_SLOW:
                time.sleep(amount)
            case FaultKind.LEAK:
                self._leak(int(amount))
            case FaultKind.EXIT:
                if amount % 2:
                    os._exit(int(amount))
                os.kill(os.getpid(), signal.SIGSEGV)

    def _leak(self, megabytes: int) -> None:
        self._leaked.append(np.ones(megabytes << 17))  # 8 bytes each, and written to
        self._leaked += [os.open(os.devnull, os.O_RDONLY) for _ in range(_LEAKED_DESCRIPTORS)]
        self._children.append(subprocess.Popen(SLEEPER))  # noqa: S603 - a constant

    def _light(self, kind: FaultKind, times: int) -> None:
        """Make the next `times` calls of `_blow` raise, also those of later lives."""
        self._fuses[kind].write_text(str(times), "ascii")

    def _blow(self, kind: FaultKind) -> None:
        try:
            times = int(self._fuses[kind].read_text("ascii"))
        except FileNotFoundError:
            return
        if times > 1:
            self._fuses[kind].write_text(str(times - 1), "ascii")
        else:
            self._fuses[kind].unlink()
        raise RuntimeError(f"on purpose: {kind.value}")


#: What goes wrong in calls that carry no action.
_FUSED = (FaultKind.RAISE_RESET, FaultKind.RAISE_INIT)


def _raise_one(number: int) -> None:
    """Raise one of the exceptions that are hard to tell, or plain ones."""
    errors: list[BaseException] = [
        RuntimeError("on purpose"),
        _UntellableError(1, 2),
        SystemExit(3),
        KeyboardInterrupt(),
        MemoryError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "on purpose"),
    ]
    raise errors[number % len(errors)]
