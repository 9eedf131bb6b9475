"""Envs of the old Gym API: `step` returns four values, `reset` no info, or takes no seed.

What such an env gives is told in Gymnasium's form. Leaves out where it is found out: at the first
`step` or `reset` that returns so (`slots.py`, `agents.py`), or from the signature (`source.py`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import gymnasium

__all__ = [
    "CUT_SHORT",
    "OldGymEnv",
    "five_values",
    "in_new_api",
    "is_with_info",
    "note_old_api",
    "takes",
]

logger = logging.getLogger("envbus.actors.env.old_gym")

#: In an info: the episode is over by a time limit only.
CUT_SHORT: Final = "TimeLimit.truncated"
#: What Gymnasium's `reset` takes.
_OF_RESET: Final = frozenset({"seed", "options"})

#: Observation, reward, terminated, truncated, info.
FiveValues: TypeAlias = tuple[Any, Any, bool, bool, Any]


def five_values(returned: Any) -> FiveValues | None:
    """Return what four values of a `step` mean in Gymnasium's form; None: they are no such four.

    An episode that is done is truncated if the info says `TimeLimit.truncated`, else terminated.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        return None
    observation, reward, done, info = returned
    if not isinstance(info, Mapping) or isinstance(done, Mapping):
        return None
    try:
        is_over, is_cut = bool(done), bool(info.get(CUT_SHORT, False))
    except ValueError:  # one flag per agent
        return None
    return observation, reward, is_over and not is_cut, is_over and is_cut, info


def is_with_info(returned: Any) -> bool:
    """Return whether a `reset` has returned observation and info, as far as their form tells."""
    return (
        isinstance(returned, tuple | list)
        and len(returned) == 2
        and isinstance(returned[1], Mapping)
    )


def takes(reset: Callable[..., Any]) -> frozenset[str]:
    """Return which of `seed` and `options` a `reset` takes."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return _OF_RESET
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return _OF_RESET
    return _OF_RESET & {one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY}


def in_new_api(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return `env`, in an `OldGymEnv` if its `reset` lacks arguments of Gymnasium's."""
    return env if takes(env.reset) == _OF_RESET else OldGymEnv(env)


def note_old_api(env: object) -> None:
    """Tell that an env is of the old API: once for each class and process."""
    _note(f"{type(env).__module__}.{type(env).__qualname__}")


@functools.cache
def _note(name: str) -> None:
    logger.warning(
        "%s has the old Gym API: a step of four values, or a reset without info or seed. It is "
        "wrapped: its done is told as terminated, or, where its info says %s, as truncated",
        name,
        CUT_SHORT,
    )


class OldGymEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env of the old Gym API in Gymnasium's form.

    What has Gymnasium's form already is handed on as it is.

    Args:
        env: It; `reset` may take no `seed`: then its `seed` method is called, where it has one, and
            else its `np_random` is seeded.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._takes = takes(env.reset)
        note_old_api(env.unwrapped)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env; return observation and info.

        Raises:
            TypeError: There are options, and it takes none.
        """
        given: dict[str, Any] = {"seed": seed, "options": options}
        if "seed" not in self._takes:
            del given["seed"]
            self._seed(seed)
        if not options and "options" not in self._takes:  # empty: only a mask was given
            del given["options"]
        returned: Any = self.env.reset(**given)
        if returned is None or is_with_info(returned):
            return returned
        return returned, {}

    def step(self, action: Any) -> Any:
        """Step the env; return five values."""
        returned: Any = self.env.step(action)
        five = five_values(returned)
        return returned if five is None else five

    def _seed(self, seed: int | None) -> None:
        if seed is None:
            return
        seed_by_method = getattr(self.unwrapped, "seed", None)
        if callable(seed_by_method):
            seed_by_method(seed)
        else:
            gymnasium.Env.reset(self.unwrapped, seed=seed)
