"""`make_vec`: one call from an env's id or factory to a vector env."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium

from envbus.actors.env_source import AnyEnv, EnvSource, GymId, make, parse_source
from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.settings import positive_int
from envbus.bus.threads import ThreadsPerProcess
from envbus.runner.vector_env import BusVectorEnv

__all__ = ["make_vec"]


def make_vec(
    id_or_factory: str | Callable[..., AnyEnv] | Any,
    num_envs: int = 1,
    *,
    num_actors: int | Literal["auto"] = "auto",
    threads_per_process: ThreadsPerProcess = "auto",
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    vector_kwargs: Mapping[str, Any] | None = None,
    **env_kwargs: Any,
) -> BusVectorEnv:
    """Return a vector env of `num_envs` equal envs.

        envs = make_vec("CartPole-v1", 64)

    Args:
        id_or_factory: A Gymnasium id (`"module:Env-v0"` imports the module first), an import path
            `"module:function"`, or any callable that returns an env.
        num_envs: How many.
        num_actors: Processes that host them; "auto": as many as there are usable CPU cores.
        threads_per_process: Threads that NumPy, PyTorch and their like start in each; see
            `BusVectorEnv`.
        wrappers: Applied to each env, the first one innermost.
        vector_kwargs: Further arguments of `BusVectorEnv`.
        **env_kwargs: Arguments of the env's constructor.

    Raises:
        ConfigError: A setting cannot be used.
        Exception: What the env's constructor raised, and what `BusVectorEnv` raises.
    """
    num_envs = positive_int("num_envs", num_envs)
    source = parse_source(id_or_factory, env_kwargs)
    given: Any = wrappers
    if given and not (isinstance(given, Sequence) and all(map(callable, given))):
        raise ConfigError(f"wrappers are a list of functions of an env, not {brief(wrappers)}")
    one = _wrapped(source, tuple(wrappers)) if wrappers else source
    settings = {"threads_per_process": threads_per_process, **dict(vector_kwargs or {})}
    envs = BusVectorEnv([one] * num_envs, num_actors=num_actors, **settings)
    if isinstance(source, GymId) and source.id in gymnasium.registry:
        spec = copy.deepcopy(gymnasium.spec(source.id))
        spec.kwargs = {**spec.kwargs, **env_kwargs}
        envs.spec = spec
    return envs


def _wrapped(
    source: EnvSource,
    wrappers: tuple[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]], ...],
) -> Callable[[], AnyEnv]:
    def factory() -> AnyEnv:
        env: Any = make(source)
        for wrapper in wrappers:
            env = wrapper(env)
        wrapped: AnyEnv = env
        return wrapped

    return factory
