"""What takes an env's place when it failed: bounded closing, and a new one that must fit.

Used by the slots; leaves out when this is done, which their runner decides.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NoReturn

import gymnasium
from gymnasium.vector import VectorEnv

from envbus.actors.env_source import AnyEnv
from envbus.actors.spaces import Space, is_fixed_size, leaves

__all__ = ["NoEnv", "RestartRequest", "check_fits", "close_within"]

logger = logging.getLogger("envbus.actors.renewal")


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


def close_within(env: AnyEnv, timeout: float, who: str) -> None:
    """Close `env`; what it raises is logged, and after `timeout` seconds it is left to itself.

    In a thread of its own, since nothing else bounds a call that never returns.
    """

    def close() -> None:
        try:
            env.close()
        except BaseException:  # it failed before, and is thrown away
            logger.warning("%s: closing it raised", who, exc_info=True)

    thread = threading.Thread(target=close, name="envbus-close", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        logger.warning("%s: closing it took over %g s; it is left as it is", who, timeout)


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
