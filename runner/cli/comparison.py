"""The same envs in Gymnasium's own vector envs, measured by the same loop.

They run in a child process of their own: AsyncVectorEnv forks, which would be unsafe in a
process that has had ZeroMQ contexts, and Ctrl-C would reach each of its workers. The child gets
its task on standard input and answers with one JSON object per line.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from envbus.actors.env import source as env_source
from envbus.runner.cli.stepping import Limits, Measured, OnProgress, Progress, Stepping
from envbus.runner.policies.policy import parse_policy

__all__ = ["PEERS", "NotMeasured", "compare", "serve"]

_Factories: TypeAlias = "Sequence[Callable[[], Any]]"

#: Each with its defaults, as a user would take it.
PEERS: dict[str, Callable[[_Factories], VectorEnv[Any, Any, Any]]] = {
    "AsyncVectorEnv": AsyncVectorEnv,
    "SyncVectorEnv": SyncVectorEnv,
}


class NotMeasured(msgspec.Struct, frozen=True):
    """One of Gymnasium's vector envs cannot run these envs."""

    backend: str
    reason: str


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    env: str
    num_envs: int
    policy: str
    seed: int | None
    seconds: float
    path: list[str]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the child's output; one of its fields is set."""

    progress: Progress | None = None
    measured: Measured | None = None
    not_measured: NotMeasured | None = None


def compare(
    env: str,
    num_envs: int,
    policy: str,
    seed: int | None,
    seconds: float,
    on_progress: OnProgress,
) -> Generator[Measured | NotMeasured, None, None]:
    """Yield what each of `PEERS` did with the same envs and policy, one after the other.

    Closing the iterator, or an exception in `on_progress`, ends the child and all it started.

    Args:
        env: A Gymnasium id or `"module:function"`.
        num_envs: How many.
        policy: As for `parse_policy`.
        seed: For the envs and the random policy.
        seconds: How long to step each, after its start.
        on_progress: Called some times per second.
    """
    task = _Task(
        env=env, num_envs=num_envs, policy=policy, seed=seed, seconds=seconds, path=sys.path
    )
    child = subprocess.Popen(  # noqa: S603  # this interpreter, with arguments of our own
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    left = list(PEERS)
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(task))
            child.stdin.close()
        for text in child.stdout:
            line = msgspec.json.decode(text, type=_Line)
            if line.progress is not None:
                on_progress(line.progress)
                continue
            outcome = line.measured or line.not_measured
            if outcome is not None:
                left.remove(outcome.backend)
                yield outcome
            if not left:  # how it ends is of no interest
                return
        status = child.wait()
    finally:
        # Its workers are in its process group, and no longer of use whatever happened.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        child.wait()
    for name in left:
        yield NotMeasured(name, f"the process that measured it ended with status {status}")


def serve() -> None:
    """Do the task on standard input; the child process's whole program."""
    # Envs may print: what they do goes where the child's errors go.
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    sys.path[:] = task.path
    make_policy = parse_policy(task.policy)
    factory = functools.partial(env_source.make, env_source.parse_source(task.env))

    def tell(**fields: Any) -> None:
        lines.write(msgspec.json.encode(_Line(**fields)) + b"\n")

    for name, make in PEERS.items():
        stepping = Stepping(name, make_policy, lambda progress: tell(progress=progress))
        try:
            made_at = time.perf_counter()
            envs = make([factory] * task.num_envs)
            limits = Limits(seconds=task.seconds)
            stepping.run(envs, limits, seed=task.seed, made_at=made_at)
            envs.close()
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}".splitlines()[0]
            tell(not_measured=NotMeasured(name, reason))
        else:
            tell(measured=stepping.measured())
