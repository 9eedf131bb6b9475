"""How an env is given, and how it is made in the actor that hosts it.

No env is made in the process that only passes a source on.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.vector import VectorEnv

from envbus.actors.env.agents import in_agents_env
from envbus.actors.env.import_rule import ImportRule
from envbus.actors.env.old_gym import in_new_api
from envbus.bus.errors import ConfigError
from envbus.bus.process.pickling import pickled
from envbus.bus.wire.codec import register_struct

__all__ = [
    "AnyEnv",
    "EntryPoint",
    "EnvSource",
    "GymId",
    "LocalRegistry",
    "by_index",
    "from_plain",
    "keep",
    "local_registry",
    "make",
    "parse_source",
    "register_missing",
    "sendable",
    "to_plain",
]

#: What an actor hosts: one env, or a vector env that fills `num_envs` slots.
AnyEnv: TypeAlias = "gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]"


@dataclass(frozen=True, slots=True)
class GymId:
    """An id of Gymnasium's registry, made by `gymnasium.make` or `gymnasium.make_vec`."""

    #: `"Env-v0"`, `"namespace/Env-v0"`, or `"module:Env-v0"`, which imports the module first.
    id: str
    #: Keyword arguments of `gymnasium.make`.
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Modules whose import registers the id.
    modules: tuple[str, ...] = ()
    #: None: one env. Else the id's own vector env (its `vector_entry_point`) with so many.
    num_envs: int | None = None


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """Something callable at an import path, `"module:function"` or `"module:Class.method"`."""

    target: str
    #: Keyword arguments of the call.
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Modules to import first.
    modules: tuple[str, ...] = ()
    #: Positional arguments of the call.
    args: tuple[Any, ...] = ()


#: The first two can go over a socket; a callable only over the pipe of a local actor.
EnvSource: TypeAlias = GymId | EntryPoint | Callable[[], AnyEnv]


def parse_source(
    value: object, kwargs: Mapping[str, Any] | None = None, *, modules: Iterable[str] = ()
) -> EnvSource:
    """Return what a user gave as a source.

    A string with a colon is an entry point if a (dotted) Python name follows the colon, as in
    `"package.module:make_env"`, and else an id with the module that registers it, as in
    `"module:Env-v0"`.

    Args:
        value: An id, an import path, an `EnvSpec`, a callable that returns an env, or a source.
        kwargs: Keyword arguments of the constructor; they win over those of `value`.
        modules: Modules whose import registers the id.

    Raises:
        ConfigError: `value` is none of these.
    """
    extra = dict(kwargs or {})
    also = tuple(modules)
    if isinstance(value, GymId):
        return GymId(value.id, {**value.kwargs, **extra}, value.modules + also, value.num_envs)
    if isinstance(value, EntryPoint):
        merged = {**value.kwargs, **extra}
        return EntryPoint(value.target, merged, value.modules + also, value.args)
    if isinstance(value, str):
        module, colon, name = value.partition(":")
        if not (name if colon else value) or ":" in name or (colon and not _is_dotted_name(module)):
            raise ConfigError(
                f"{value!r} is neither a Gymnasium id ('Env-v0', 'module:Env-v0') nor an import "
                f"path ('module:function')"
            )
        if colon and _is_dotted_name(name):
            return EntryPoint(value, extra, also)
        return GymId(value, extra, also)
    if isinstance(value, EnvSpec):
        return functools.partial(gymnasium.make, value, **extra)
    if callable(value):
        factory = cast("Callable[..., AnyEnv]", value)
        return functools.partial(factory, **extra) if extra else factory
    raise ConfigError(
        f"an env is given as a Gymnasium id, 'module:function', or a callable that returns an "
        f"env; got {_name(value)}{_hint(value)}"
    )


def by_index(value: object, num_envs: int, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """Return `num_envs` sources of one factory, which is called with 0, 1, 2, ...

    Each source keeps its number: an env that is made again is made with the same one.

    Args:
        value: A function whose first argument is the number, or its import path.
        num_envs: How many.
        kwargs: Further keyword arguments of the call.

    Raises:
        ConfigError: `value` is no such function, as far as that can be told without an import.
    """
    source = parse_source(value, kwargs)
    if isinstance(source, GymId):
        raise ConfigError(
            f"the id {source.id!r} is no function that could be called with each env's index; "
            f"a list has one id per env: [{source.id!r}] * {num_envs}"
        )
    if isinstance(source, EntryPoint):
        args = source.args
        return [dataclasses.replace(source, args=(i, *args)) for i in range(num_envs)]
    if (why_not := _why_not_by_index(source)) is not None:
        raise ConfigError(
            f"{_name(source)} is called with each env's index, and {why_not}; a list has one "
            f"factory without argument per env: [make_env] * {num_envs}"
        )
    factory = cast("Callable[..., AnyEnv]", source)
    return [functools.partial(factory, index) for index in range(num_envs)]


def to_plain(source: EnvSource) -> object:
    """Return `source` as plain data, or, a callable, as it is."""
    if isinstance(source, GymId):
        return {
            "gym": source.id,
            "kwargs": dict(source.kwargs),
            "modules": list(source.modules),
            "num_envs": source.num_envs,
        }
    if isinstance(source, EntryPoint):
        plain: dict[str, object] = {
            "call": source.target,
            "kwargs": dict(source.kwargs),
            "modules": list(source.modules),
        }
        return plain | ({"args": list(source.args)} if source.args else {})
    return source


def keep(sources: Sequence[object]) -> list[object]:
    """Return the plain forms of sources, with dicts, lists and tuples in their arguments copied.

    Envs may be made again much later: what their caller makes of its own config by then, for other
    envs, does not concern them. Arrays and other objects stay what they are, as they may be large.
    What several sources share they share afterwards.
    """
    copies: dict[int, object] = {}
    return [_kept(source, copies) for source in sources]


def _kept(value: Any, copies: dict[int, Any]) -> Any:
    if (known := copies.get(id(value))) is not None:
        return known
    kind = type(value)
    if kind is dict:
        copy = copies[id(value)] = {}
        copy.update((key, _kept(item, copies)) for key, item in value.items())
        return copy
    if kind is list:
        items = copies[id(value)] = []
        items += [_kept(item, copies) for item in value]
        return items
    if kind is tuple:
        return tuple([_kept(item, copies) for item in value])
    if kind is functools.partial and not vars(value):
        args, keywords = _kept(value.args, copies), _kept(value.keywords, copies)
        copies[id(value)] = bound = functools.partial(value.func, *args, **keywords)
        return bound
    return value


def from_plain(plain: object) -> EnvSource:
    """Return the source that `to_plain` described.

    Raises:
        ValueError: `plain` does not describe a source.
    """
    if isinstance(plain, Mapping):
        kwargs = dict(plain.get("kwargs") or {})
        modules = tuple(plain.get("modules") or ())
        if isinstance(plain.get("gym"), str):
            return GymId(plain["gym"], kwargs, modules, plain.get("num_envs"))
        if isinstance(plain.get("call"), str):
            return EntryPoint(plain["call"], kwargs, modules, tuple(plain.get("args") or ()))
    elif callable(plain):
        return cast("Callable[[], AnyEnv]", plain)
    raise ValueError(f"not the plain form of an env source: {str(plain)[:200]}")


def make(source: EnvSource, rule: ImportRule | None = None) -> AnyEnv:
    """Make the env, one with several agents as an `AgentsEnv`.

    What its import or its constructor raises passes through.

    Args:
        source: What to make.
        rule: What may be imported and called; None: everything.

    Raises:
        PermissionError: The rule is against it. Nothing was imported that it is against.
        TypeError: What came is no `gymnasium.Env`, no `gymnasium.vector.VectorEnv`, and no env
            with several agents.
    """
    env: object
    if isinstance(source, GymId):
        if rule is not None:
            rule.check_id(source.id)
        _import_all(source.modules, rule)
        env = _make_id(source)
    elif isinstance(source, EntryPoint):
        _import_all(source.modules, rule)
        env = _call_target(source, rule)
    elif rule is not None:
        raise PermissionError(f"a remote actor does not call {_name(source)}")
    else:
        env = source()
    env = in_agents_env(env)
    if isinstance(env, VectorEnv):  # first: EnvPool's are both
        return env
    if isinstance(env, gymnasium.Env):
        return in_new_api(env)
    raise TypeError(
        f"expected a gymnasium.Env or a gymnasium.vector.VectorEnv from {_name(source)}, got "
        f"{_name(env)}{_hint(env)}"
    )


class LocalRegistry(list[EnvSpec]):
    """Env specs in one object, so that the pipe carries one pickle and not a thousand."""


def local_registry() -> LocalRegistry:
    """Return what is registered in this process and is not Gymnasium's own, nor envbus' own.

    Nor RLlib's: under these ids an env runner finds the functions that it has made for itself, and
    these hold the runner with all that it has.
    """
    return LocalRegistry(
        spec
        for spec in gymnasium.registry.values()
        if not str(spec.entry_point).startswith("gymnasium.envs.")
        and not (spec.entry_point is None and str(spec.vector_entry_point).startswith("envbus."))
        and spec.id not in ("rllib-single-agent-env-v0", "rllib-multi-agent-env-v0")
    )


def sendable(specs: LocalRegistry) -> tuple[LocalRegistry, list[str]]:
    """Return the specs that can be pickled, and the ids of the others."""
    kept, left = LocalRegistry(), []
    for spec in specs:
        try:
            pickled(spec)
        except Exception:  # any object's own code may run here
            left.append(spec.id)
        else:
            kept.append(spec)
    return kept, left


def register_missing(specs: Iterable[EnvSpec] | Mapping[str, EnvSpec]) -> None:
    """Register the env specs that this process does not know yet; others are left alone."""
    for spec in specs.values() if isinstance(specs, Mapping) else specs:
        gymnasium.registry.setdefault(spec.id, spec)


def _why_not_by_index(factory: Callable[..., Any]) -> str | None:
    """Return why a factory is not one of an env's index; None: it may be one.

    An argument with a default is another one, such as a class' first option: the index must not be
    taken for that in silence.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of something built in
        return None
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return "takes no argument"
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return "takes none by position"
    if first.default is not first.empty:
        return f"its first argument, {first.name!r}, has a default"
    try:
        signature.bind(0)
    except TypeError as exc:
        return f"cannot be: {exc}"
    return None


def _is_dotted_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _import_all(modules: Iterable[str], rule: ImportRule | None) -> None:
    for module in modules:
        if rule is not None:
            rule.check_module(module)
        importlib.import_module(module)


def _make_id(source: GymId) -> object:
    if source.num_envs is None:
        return gymnasium.make(source.id, **source.kwargs)
    return gymnasium.make_vec(
        source.id,
        num_envs=source.num_envs,
        vectorization_mode="vector_entry_point",
        **source.kwargs,
    )


def _call_target(source: EntryPoint, rule: ImportRule | None) -> object:
    module_name, _, name = source.target.partition(":")
    if rule is not None:
        rule.check_module(module_name)
    target: Any = importlib.import_module(module_name)
    try:
        for part in name.split("."):
            target = getattr(target, part)
            if rule is not None:
                rule.check_found(source.target, target)
    except AttributeError:
        # "module:Env" may also be an id without its version, as `gymnasium.make` takes it.
        is_id = name in gymnasium.registry or any(
            spec.name == name and spec.namespace is None for spec in gymnasium.registry.values()
        )
        if is_id and not source.args:
            if rule is not None:
                rule.check_id(name)
            return gymnasium.make(name, **source.kwargs)
        raise AttributeError(
            f"module {module_name!r} has no attribute {name!r}, and no Gymnasium id has that name"
        ) from None
    if not callable(target):
        raise TypeError(f"{source.target!r} is not callable: it is {_name(target)}")
    return target(*source.args, **source.kwargs)


def _name(value: object) -> str:
    if isinstance(value, GymId):
        return f"id {value.id!r}"
    if isinstance(value, EntryPoint):
        return f"{value.target!r}"
    if isinstance(value, functools.partial):
        return _name(value.func)
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '?')}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hint(value: object) -> str:
    """What to do about the usual mistakes."""
    if value is None:
        return "; does the factory lack a `return`?"
    if isinstance(value, type):
        return "; return an instance, not the class"
    if isinstance(value, gymnasium.Env | VectorEnv):
        return "; give a function that makes the env, not the env itself"
    if type(value).__module__.partition(".")[0] == "gym":
        return "; gym is incompatible with gymnasium, derive from gymnasium.Env instead"
    if callable(getattr(value, "step", None)):
        return "; an env with several agents needs `possible_agents` or `observation_spaces`"
    return ""


def _describe_spec(spec: EnvSpec) -> dict[str, Any]:
    plain = {
        field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init
    }
    plain["additional_wrappers"] = [
        (wrapper.name, wrapper.entry_point, wrapper.kwargs) for wrapper in spec.additional_wrappers
    ]
    return plain


def _build_spec(plain: Any) -> EnvSpec:
    """Return the spec, or raise TypeError or ValueError."""
    fields = dict(plain)
    wrappers = [WrapperSpec(*wrapper) for wrapper in fields.pop("additional_wrappers", ())]
    try:
        return EnvSpec(**fields, additional_wrappers=tuple(wrappers))
    except gymnasium.error.Error as error:
        raise ValueError(f"bad env spec: {error}") from error


# So that an env's spec can leave an actor on another host, if its arguments can.
register_struct(EnvSpec, "gymnasium.EnvSpec", _describe_spec, _build_spec)
