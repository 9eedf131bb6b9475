"""What takes an env's place when it failed: bounded closing, and a new one that must fit.

Used by the slots; leaves out when this is done, which their runner decides.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import gymnasium
from gymnasium.vector import VectorEnv

from envbus.actors.env.source import AnyEnv
from envbus.actors.spaces.spaces import Space, is_fixed_size, leaves
from envbus.bus.forking import Origin

__all__ = ["NoEnv", "RestartRequest", "check_fits", "close_within", "end_process"]

logger = logging.getLogger("envbus.actors.env.renewal")


class RestartRequest(Exception):
    """Raised by an env that wants to be made anew, e.g. as its simulator asks for it.

    Where failed envs are made anew this is logged as information only, and counts as any fault.
    """


class NoEnv(gymnasium.Env[Any, Any]):
    """Stands where an env could not be made: whatever is asked of it fails with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _fail(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(self._reason)

    reset = step = get_wrapper_attr = set_wrapper_attr = _fail


def end_process(reason: str) -> None:
    """End this process, whatever its threads are at; who watches over it starts another one."""
    os.write(2, f"{reason}\n".encode())
    os._exit(1)


def close_within(
    env: AnyEnv, timeout: float, who: str, give_up: Callable[[str], object] = end_process
) -> None:
    """Close `env` in this thread, in which it was made and used; what it raises is logged.

    Nothing but the end of its process bounds a call that never returns.

    Args:
        env: It failed before, and is thrown away.
        timeout: Seconds that it may take; infinite: as long as it likes.
        who: What to call it.
        give_up: Told, from another thread, that it has taken longer.
    """
    said = f"{who}: closing it took over {timeout:g} s: its process ends, with all envs in it"
    watch, origin = None, Origin()
    if timeout < math.inf:
        watch = threading.Timer(timeout, give_up, [said])
        watch.daemon = True
        # Where there is no memory for a thread, closing the env may be what gives some back.
        with contextlib.suppress(RuntimeError, MemoryError):
            watch.start()
    try:
        env.close()
    except BaseException as error:
        origin.end_copy(error)
        if isinstance(env, VectorEnv):
            env.closed = True  # before Gymnasium 1.3 its `__del__` would try once more
        logger.warning("%s: closing it raised", who, exc_info=True)
    finally:
        if watch is not None:
            watch.cancel()


def check_fits(
    env: AnyEnv, observation_space: Space, action_space: Space, *, num_envs: int | None
) -> None:
    """See that a new env can take the place of the one that failed.

    Args:
        env: The new env.
        observation_space: The pool's single one. Elements of the env's must be exchangeable where
            those of it are: same dtypes and shapes.
        action_space: Likewise.
        num_envs: Of the vector env that failed; None: it was a single env.

    Raises:
        ValueError: It cannot.
    """
    found_envs = env.num_envs if isinstance(env, VectorEnv) else None
    if found_envs != num_envs:
        expected_kind = "one env" if num_envs is None else f"a vector env of {num_envs}"
        raise ValueError(f"the env was made again as {env}, expected {expected_kind}")
    if isinstance(env, VectorEnv):
        pairs = [
            (env.single_observation_space, observation_space),
            (env.single_action_space, action_space),
        ]
    else:
        pairs = [(env.observation_space, observation_space), (env.action_space, action_space)]
    for found, expected in pairs:
        if _layout(found) != _layout(expected):
            raise ValueError(f"the env was made again with the space {found}, expected {expected}")


def _layout(space: Space) -> object:
    return leaves(space) if is_fixed_size(space) else type(space)
