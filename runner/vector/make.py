"""`make_vec`: one call from an env's id or factory to a vector env."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal

import gymnasium
from gymnasium.vector import AutoresetMode

from envbus.actors.env.source import (
    AnyEnv,
    EntryPoint,
    EnvSource,
    GymId,
    by_index,
    make,
    parse_source,
)
from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.settings import positive_int
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import MOST_ENVS, Timeouts, check_kind

__all__ = ["make_vec"]

#: What `make_vec` hands to the vector env, if it is given.
_SETTINGS: Final = frozenset(inspect.signature(BusVectorEnv).parameters) - {"env_fns", "num_envs"}


def make_vec(
    id_or_factory: str | Callable[..., AnyEnv] | Any,
    num_envs: int = 1,
    *,
    num_actors: int | Literal["auto"] | None = None,
    restart: bool | RestartPolicy | None = None,
    autoreset_mode: str | AutoresetMode | None = None,
    timeouts: Timeouts | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    env_kwargs: Mapping[str, Any] | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    with_index: bool = False,
    **others: Any,
) -> BusVectorEnv:
    """Return a vector env of `num_envs` equal envs.

        envs = make_vec("CartPole-v1", 64)
        envs = make_vec("Pendulum-v1", 8, restart=True, num_actors=4, g=9.81)

    Arguments that `BusVectorEnv` has go to the vector env, all others to each env's constructor.

    Args:
        id_or_factory: A Gymnasium id (`"module:Env-v0"` imports the module first), an import path
            `"module:function"`, or any callable that returns an env.
        num_envs: How many.
        num_actors: Processes that host them; by default as many as there are usable CPU cores.
        restart: Start again what failed; by default errors are raised.
        autoreset_mode: What happens at the end of an episode; by default the next step resets.
        timeouts: Default deadline of each verb, in seconds.
        wrappers: Applied to each env, the first one innermost.
        env_kwargs: Arguments of the env's constructor, whatever their names.
        vector_kwargs: Arguments of `BusVectorEnv`, as `gymnasium.make_vec` has them.
        with_index: Call the factory with each env's index, from 0, before all other arguments. It
            is not told by the signature, where the index could be taken for a missing argument.
        **others: Further arguments of `BusVectorEnv`, or of the env's constructor.

    Raises:
        ConfigError: A setting cannot be used, is given twice, or is known to the vector env and
            to the env's constructor alike: the message says how to say which is meant. No module
            is imported to look at a constructor.
        Exception: What the env's constructor raised, and what `BusVectorEnv` raises.
    """
    num_envs = positive_int("num_envs", num_envs, most=MOST_ENVS)
    named = {
        "num_actors": num_actors,
        "restart": restart,
        "autoreset_mode": autoreset_mode,
        "timeouts": timeouts,
    }
    plain = {**{name: value for name, value in named.items() if value is not None}, **others}
    for_vector = {name: value for name, value in plain.items() if name in _SETTINGS}
    for_env = {name: value for name, value in plain.items() if name not in _SETTINGS}
    settings = _merge("vector_kwargs", for_vector, vector_kwargs)
    kwargs = _merge("env_kwargs", for_env, env_kwargs)
    source = parse_source(id_or_factory, kwargs)
    _check_meant(for_vector.keys() - kwargs.keys(), id_or_factory, source)
    given: Any = wrappers
    if given and not (isinstance(given, Sequence) and all(map(callable, given))):
        raise ConfigError(f"wrappers are a list of functions of an env, not {brief(wrappers)}")
    check_kind("with_index", with_index, bool, example="True")
    if with_index:
        sources = by_index(source, num_envs)
        sources = [_wrapped(one, tuple(wrappers)) for one in sources] if wrappers else sources
    else:
        sources = [_wrapped(source, tuple(wrappers)) if wrappers else source] * num_envs
    try:
        envs = BusVectorEnv(sources, **settings)
    except TypeError as exc:
        _hint(exc, for_env)
        if not with_index:
            _hint_at_index(exc)
        raise
    if isinstance(source, GymId) and source.id in gymnasium.registry:
        spec = copy.deepcopy(gymnasium.spec(source.id))
        spec.kwargs = {**spec.kwargs, **kwargs}
        envs.spec = spec
    return envs


def _merge(name: str, plain: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that were given by themselves and those of a mapping.

    Raises:
        ConfigError: `given` is no mapping, or has one of them again.
    """
    if given is None:
        return dict(plain)
    example = '{"g": 9.81}' if name == "env_kwargs" else '{"copy": False}'
    check_kind(name, given, Mapping, example=example)
    if twice := sorted(plain.keys() & given.keys()):
        raise ConfigError(
            f"{', '.join(twice)}: given as an argument of make_vec and in {name}=; leave one out"
        )
    return {**plain, **given}


def _hint(error: TypeError, names: Iterable[str]) -> None:
    """Say of a name that no env knows which argument of `make_vec` it may be meant to be."""
    for name in names:
        close = get_close_matches(name, _SETTINGS, 1, 0.8)
        if close and repr(name) in str(error) and sys.version_info >= (3, 11):
            error.add_note(f"did you mean {close[0]!r}, which is an argument of make_vec?")


def _hint_at_index(error: TypeError) -> None:
    """Say how a factory gets its env's index, of one that lacks an argument."""
    if "missing 1 required positional argument" in str(error) and sys.version_info >= (3, 11):
        error.add_note("if it is the env's index, say make_vec(..., with_index=True)")


def _check_meant(names: set[str], given: object, source: EnvSource) -> None:
    """See that the env's constructor knows none of the names that go to the vector env."""
    if not names:
        return
    if both := sorted(names & _known(given, source)):
        name = both[0]
        raise ConfigError(
            f"{', '.join(both)}: known to the vector env and to the env's constructor; write "
            f"env_kwargs={{{name!r}: ...}} for the env, or vector_kwargs={{{name!r}: ...}} for the "
            "vector env"
        )


def _known(given: object, source: EnvSource) -> set[str]:
    """Return the names of a constructor's arguments, as far as no import is needed for them."""
    target: object = given
    preset: set[str] = set()
    if isinstance(source, GymId):
        spec = gymnasium.registry.get(source.id)
        target = None if spec is None else spec.entry_point
        preset = set() if spec is None else set(spec.kwargs)
    elif isinstance(source, EntryPoint):
        target = source.target
    elif isinstance(given, gymnasium.envs.registration.EnvSpec):
        target, preset = given.entry_point, set(given.kwargs)
    if isinstance(target, str):
        module, _, path = target.partition(":")
        try:
            target = functools.reduce(getattr, path.split("."), sys.modules.get(module))
        except AttributeError:
            target = None
    try:
        parameters = inspect.signature(target).parameters if callable(target) else {}
    except (TypeError, ValueError):  # of something built in
        parameters = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return preset | {name for name, one in parameters.items() if one.kind in by_name}


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
