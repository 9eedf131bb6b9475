"""Vector entry points: how `gymnasium.make_vec` comes to make a `BusVectorEnv`.

Importing `envbus.runner` registers the id `envbus/VectorEnv-v0`. Gymnasium imports what stands
before the colon of an id, so that a program that knows nothing of envbus can be told of it by name:

    gymnasium.make_vec("envbus.runner:envbus/VectorEnv-v0", num_envs=8, env="CartPole-v1")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium
from gymnasium.wrappers import TimeLimit

from envbus.actors.env.source import AnyEnv, GymId, parse_source
from envbus.bus.errors import ConfigError
from envbus.runner.vector.make import make_vec
from envbus.runner.vector.vector_env import BusVectorEnv

__all__ = ["VECTOR_ENV_ID", "make_any", "vector_entry_point"]

#: Its envs are those of the argument `env`.
VECTOR_ENV_ID: Final = "envbus/VectorEnv-v0"


def vector_entry_point(
    env: str | Callable[..., AnyEnv] | Any, **settings: Any
) -> Callable[..., BusVectorEnv]:
    """Return what `gymnasium.register` takes as `vector_entry_point`: it makes a `BusVectorEnv`.

        gymnasium.register(
            "Mine-v0",
            entry_point="my_package:MyEnv",
            vector_entry_point=envbus.vector_entry_point("my_package:MyEnv", restart=True),
        )
        envs = gymnasium.make_vec("Mine-v0", num_envs=8, num_actors=4)

    Arguments of `gymnasium.make_vec`, and the `kwargs` of `register`, win over `settings`, also
    over those of the same name in `env_kwargs` and `vector_kwargs`.

    Args:
        env: What `envbus.make_vec` makes envs of. Also the very id that is being registered.
        **settings: As `envbus.make_vec` takes them: of the vector env, or of the env's constructor.

    Raises:
        ConfigError: `env` is nothing that envs can be made of. Settings are looked at when a
            vector env is made.
    """
    parse_source(env)
    return functools.partial(_make, env, settings)


def make_any(num_envs: int = 1, *, env: Any = None, **settings: Any) -> BusVectorEnv:
    """Return a vector env of `env`: the entry point of `envbus/VectorEnv-v0`.

    Raises:
        ConfigError: There is no `env`, or a setting cannot be used.
        Exception: What `envbus.make_vec` raises.
    """
    if env is None:
        raise ConfigError(f'{VECTOR_ENV_ID} makes vector envs of any env: pass env="CartPole-v1"')
    return make_vec(env, num_envs, **settings)


def _make(
    env: Any,
    settings: dict[str, Any],
    num_envs: int = 1,
    max_episode_steps: int | None = None,
    **others: Any,
) -> BusVectorEnv:
    """Make what is registered; Gymnasium tells the limit that stands in the spec."""
    given = {**settings, **others}
    for name in ("env_kwargs", "vector_kwargs"):
        if isinstance(registered := settings.get(name), Mapping):
            rest = {key: value for key, value in registered.items() if key not in others}
            given[name] = {**rest, **(others.get(name) or {})}
    if max_episode_steps is not None:
        if isinstance(parse_source(env), GymId):
            given["max_episode_steps"] = max_episode_steps
        else:
            limit = functools.partial(TimeLimit, max_episode_steps=max_episode_steps)
            given["wrappers"] = [*given.get("wrappers", ()), limit]
    return make_vec(env, num_envs, **given)


if VECTOR_ENV_ID not in gymnasium.registry:
    gymnasium.register(VECTOR_ENV_ID, vector_entry_point=f"{__name__}:make_any")
