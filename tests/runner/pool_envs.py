"""Envs and short ways to drive a pool, for the tests of `ActorPool`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
from gymnasium import spaces

from envbus.actors.testing import CountingEnv
from envbus.runner.engine.env_results import Batch
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from tests.integration.group_children import is_alive
from tests.waiting import PATIENCE, wait_until

_Kind = TypeVar("_Kind", ActorPool, BusVectorEnv)


class EchoEnv(gymnasium.Env[Any, Any]):
    """Returns its last action as its observation."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return action, 1.0, False, False, {"type": type(action).__name__}


class GatedEnv(CountingEnv):
    """A `CountingEnv` whose steps wait until a file is there."""

    def __init__(self, gate: Path, length: int = 1000) -> None:
        super().__init__(length)
        self.gate = gate

    def step(self, action: Any) -> Any:
        self.await_gate()
        return super().step(action)

    def await_gate(self) -> None:
        wait_until(self.gate.exists, "the gate")


class PidEnv(CountingEnv):
    """A `CountingEnv` whose infos hold its process id; action 13 kills the process."""

    def step(self, action: Any) -> Any:
        if action == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 14:
            os._exit(7)
        if action == 15:
            raise SystemExit(3)
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"pid": os.getpid()}


class KeyEnv(CountingEnv):
    """A `CountingEnv` with the same info in each step; those of two values may not fit together."""

    def __init__(self, value: Any) -> None:
        super().__init__(1000)
        self.value = value

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"first": 1, "key": self.value}


class UnpicklableHere:
    """Unpickles in the process that made it only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (os.getpid(),)


def _rebuild(pid: int) -> UnpicklableHere:
    if pid != os.getpid():
        raise ValueError("only at home")
    return UnpicklableHere()


class TouchingEnv(CountingEnv):
    """A `CountingEnv` that makes a file when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        self.path.touch()


def noted(folder: Path, make: Callable[[], Any] = CountingEnv) -> Callable[[], Any]:
    """Return what makes an env, and leaves a file with the id of its process before."""

    def note_and_make() -> Any:
        (folder / str(os.getpid())).touch()
        return make()

    return note_and_make


def still_alive(folder: Path) -> list[int]:
    """Return the processes that were to make an env, as `noted`, and have not ended."""
    return [pid for file in folder.iterdir() if is_alive(pid := int(file.name))]


def killed_at_the_end(kind: type[_Kind], **settings: Any) -> Iterator[Callable[..., _Kind]]:
    """Yield what makes pools or vector envs; they are killed then, which must leave no process."""
    made: list[_Kind] = []

    def make(*args: Any, **kwargs: Any) -> _Kind:
        made.append(kind(*args, **{**settings, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        pids = one.actor_pids()
        one.close(terminate=True)
        assert [pid for pid in pids if is_alive(pid)] == []


def receive_all(pool: ActorPool, env_ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Receive until each of `env_ids` has come; return a row per env."""
    missing = set(env_ids)
    rows: dict[int, dict[str, Any]] = {}
    while missing:
        batch = pool.recv(timeout=PATIENCE)
        assert not batch.late, f"no answer from {batch.late}"
        rows.update(split(batch))
        missing -= set(batch.env_ids.tolist())
    return rows


def split(batch: Batch) -> dict[int, dict[str, Any]]:
    """Return a batch with array observations row by row."""
    return {
        int(env_id): {
            "observation": batch.observations[row],
            "reward": batch.rewards[row],
            "terminated": batch.terminations[row],
            "truncated": batch.truncations[row],
            "incarnation": batch.incarnations[row],
        }
        for row, env_id in enumerate(batch.env_ids)
    }


def receive_until_back(pool: ActorPool, env_id: int) -> Batch:
    """Receive, sending nothing, until `env_id` is ready."""
    while True:
        batch = pool.recv(timeout=PATIENCE)
        assert not batch.late, f"no answer from {batch.late}"
        if env_id in batch.env_ids:
            return batch


def receive_for_ever(pool: ActorPool) -> None:
    """Receive until it raises."""
    while True:
        assert not pool.recv(timeout=PATIENCE).late
