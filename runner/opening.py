"""Opens the envs that a command names, and sees that no actor outlives it.

Leaves out what is done with them (`job.py`, `tuning.py`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import gymnasium

from envbus.actors import env_source
from envbus.bus.errors import ConfigError
from envbus.bus.threads import ThreadsPerProcess
from envbus.runner.faults import EnvError
from envbus.runner.make import make_vec
from envbus.runner.vector_env import BusVectorEnv

__all__ = ["open_envs"]


@contextmanager
def open_envs(
    env: str,
    num_envs: int,
    *,
    num_actors: int | Literal["auto"],
    threads_per_process: ThreadsPerProcess,
    restart: bool = False,
) -> Iterator[BusVectorEnv]:
    """Make envs, and close them at the end; an exception ends their actors at once.

    Raises:
        ConfigError: There is no such env.
    """
    try:
        envs = make_vec(
            env,
            num_envs,
            num_actors=num_actors,
            threads_per_process=threads_per_process,
            vector_kwargs={"restart_failed_sub_environments": restart},
        )
    except Exception as exc:
        if not _is_not_found(exc):
            raise
        raise ConfigError(f"cannot make {env!r}: {exc}") from exc
    try:
        yield envs
    except BaseException:
        _abort(envs)
        raise
    envs.close()


def _is_not_found(exc: Exception) -> bool:
    """Whether there is no such env, as opposed to one whose own code failed."""
    if isinstance(exc, gymnasium.error.Error | ModuleNotFoundError):
        return True
    if not isinstance(exc.__cause__, EnvError):
        return False
    files = re.findall(r'^ *File "(.+?)", line', exc.__cause__.remote_traceback, re.MULTILINE)
    return bool(files) and files[-1] == env_source.__file__


def _abort(envs: BusVectorEnv) -> None:
    """Kill the actors at once. A step may be pending, which is no news after Ctrl-C."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        envs.close(terminate=True)
