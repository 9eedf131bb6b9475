from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv, VectorEnv

from envbus.actors.env.source import (
    EntryPoint,
    EnvSource,
    GymId,
    _build_spec,
    by_index,
    from_plain,
    keep,
    local_registry,
    make,
    parse_source,
    register_missing,
    to_plain,
)
from envbus.actors.protocol import CallResult
from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Tree


def make_counting(length: int = 3) -> CountingEnv:
    return CountingEnv(length)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that exists during one test, and a registry that forgets what the test added."""
    new = types.ModuleType("envbus_test_module")
    monkeypatch.setitem(sys.modules, new.__name__, new)
    known = dict(gymnasium.registry)
    yield new
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("CartPole-v1", GymId("CartPole-v1")),
        ("ALE/Pong-v5", GymId("ALE/Pong-v5")),
        ("minigrid:MiniGrid-Empty-5x5-v0", GymId("minigrid:MiniGrid-Empty-5x5-v0")),
        ("a.b:ns/Env-v0", GymId("a.b:ns/Env-v0")),
        ("a.b:make_env", EntryPoint("a.b:make_env")),
        ("a.b:Class.method", EntryPoint("a.b:Class.method")),
        (make_counting, make_counting),
        (CountingEnv, CountingEnv),
    ],
)
def test_what_a_source_may_look_like(value: object, source: EnvSource) -> None:
    assert parse_source(value) == source


def test_keyword_arguments_and_modules_are_kept() -> None:
    assert parse_source("E-v0", {"a": 1}, modules=["m"]) == GymId("E-v0", {"a": 1}, ("m",))
    assert parse_source("m:f", {"a": 1}) == EntryPoint("m:f", {"a": 1})
    assert parse_source(GymId("E-v0", {"a": 1, "b": 2}), {"a": 3}) == GymId(
        "E-v0", {"a": 3, "b": 2}
    )
    env = make(parse_source(make_counting, {"length": 7}))
    assert isinstance(env, CountingEnv)
    assert env.length == 7


@pytest.mark.parametrize("value", ["", ":", "m:", ":f", "a b:f", 3, None, ["CartPole-v1"]])
def test_what_is_no_source_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="Gymnasium id"):
        parse_source(value)


def by_length(index: int, more: int = 0) -> CountingEnv:
    return CountingEnv(index + more)


@pytest.mark.parametrize(
    "factory", [by_length, f"{__name__}:by_length", EntryPoint(f"{__name__}:by_length")]
)
def test_one_factory_makes_each_env_by_its_index(factory: object) -> None:
    for _ in range(2):  # as after a restart
        lengths = [make(source).length for source in by_index(factory, 3, {"more": 5})]
        assert lengths == [5, 6, 7]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: None, "takes no argument"),
        (CountingEnv, "its first argument, 'length', has a default"),
        (lambda *, index: None, "takes none by position"),
        (lambda index, config: None, "missing a required argument: 'config'"),
        ("CartPole-v1", r"a list has one id per env: \['CartPole-v1'\] \* 3"),
        (3, "an env is given as a Gymnasium id"),
    ],
)
def test_what_is_no_factory_of_an_index_is_told_why(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        by_index(value, 3)


def test_a_factory_of_an_index_is_no_id_without_its_version(module: types.ModuleType) -> None:
    gymnasium.register("Lost-v0", entry_point=CountingEnv)
    with pytest.raises(AttributeError, match="has no attribute 'Lost'"):
        make(by_index(f"{module.__name__}:Lost", 1)[0])


def reset_without_arguments(env: CountingEnv) -> Any:
    return CountingEnv.reset(env)[0]


def test_an_env_whose_reset_takes_no_seed_is_wrapped() -> None:
    class Old(CountingEnv):
        reset: Any = reset_without_arguments

    observation, info = make(Old).reset(seed=3)
    assert (observation.tolist(), info) == ([1.0, 0.0, 0.0, 3.0], {})


def test_an_env_in_the_place_of_a_factory_is_explained() -> None:
    with pytest.raises(ConfigError, match="a function that makes the env, not the env itself"):
        parse_source(CountingEnv())


@pytest.mark.parametrize(
    "source",
    [
        GymId("E-v0", {"a": 1}, ("m",)),
        GymId("E-v0", num_envs=4),
        EntryPoint("m:f", {"a": (1, "x")}, ("m",)),
        EntryPoint("m:f", {"a": 1}, (), (3,)),
    ],
)
def test_sources_survive_a_socket(source: GymId | EntryPoint) -> None:
    reply = CallResult(values=Tree(to_plain(source)))
    arrived = decode(CallResult, [bytes(frame) for frame in encode(reply)])
    assert from_plain(arrived.values.value) == source


@pytest.mark.parametrize("plain", [None, {}, {"gym": 3}, "CartPole-v1", []])
def test_a_bad_plain_form_is_refused(plain: object) -> None:
    with pytest.raises(ValueError, match="not the plain form"):
        from_plain(plain)


def test_what_a_caller_makes_of_its_config_later_is_not_a_kept_source_s() -> None:
    config: dict[str, Any] = {"levels": [1, (2, [3])]}
    big = object()
    given = [
        to_plain(GymId("A-v0", {"config": config})),
        functools.partial(dict, config, config=config, big=big),
        CountingEnv,
    ]
    first, second, third = keep(given)
    config["levels"][1][1].append(4)
    config["more"] = True
    assert first == to_plain(GymId("A-v0", {"config": {"levels": [1, (2, [3])]}}))
    assert isinstance(first, dict)
    assert isinstance(second, functools.partial)
    made = second()
    assert made == {"levels": [1, (2, [3])], "config": {"levels": [1, (2, [3])]}, "big": big}
    assert made["config"] is first["kwargs"]["config"]
    assert third is CountingEnv


def test_an_id_is_made_with_its_arguments() -> None:
    env = make(GymId("CartPole-v1", {"max_episode_steps": 7}))
    assert env.spec is not None
    assert env.spec.max_episode_steps == 7


def test_a_vector_env_of_an_id_is_made() -> None:
    env = make(GymId("CartPole-v1", num_envs=3))
    assert isinstance(env, VectorEnv)
    assert env.num_envs == 3


def test_modules_are_imported_first(module: types.ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match="envbus_no_such_module"):
        make(GymId("CartPole-v1", modules=("envbus_no_such_module",)))
    assert make(GymId("CartPole-v1", modules=(module.__name__,)))


@pytest.mark.parametrize("target", ["make", "Holder.make"])
def test_an_entry_point_is_called(module: types.ModuleType, target: str) -> None:
    module.make = make_counting  # type: ignore[attr-defined]
    module.Holder = types.SimpleNamespace(make=make_counting)  # type: ignore[attr-defined]
    env = make(parse_source(f"{module.__name__}:{target}", {"length": 9}))
    assert isinstance(env, CountingEnv)
    assert env.length == 9


def test_a_name_that_is_an_id_is_made_by_gymnasium(module: types.ModuleType) -> None:
    gymnasium.register("EnvbusUnversioned", functools.partial(CountingEnv, 4))
    env = make(parse_source(f"{module.__name__}:EnvbusUnversioned"))
    assert env.unwrapped.length == 4  # type: ignore[attr-defined]


def test_an_attribute_wins_over_an_id(module: types.ModuleType) -> None:
    gymnasium.register("EnvbusBoth", functools.partial(CountingEnv, 4))
    module.EnvbusBoth = functools.partial(CountingEnv, 5)  # type: ignore[attr-defined]
    env = make(parse_source(f"{module.__name__}:EnvbusBoth"))
    assert env.length == 5  # type: ignore[union-attr]


def test_a_missing_attribute_is_named(module: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="'envbus_test_module' has no attribute 'nothing'"):
        make(parse_source(f"{module.__name__}:nothing"))


def test_an_attribute_error_inside_the_function_passes_through(module: types.ModuleType) -> None:
    def broken() -> None:
        raise AttributeError("inside")

    module.broken = broken  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="inside"):
        make(parse_source(f"{module.__name__}:broken"))


def test_what_is_not_callable_is_named(module: types.ModuleType) -> None:
    module.number = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="'envbus_test_module:number' is not callable"):
        make(parse_source(f"{module.__name__}:number"))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: None, r"got builtins\.NoneType; does the factory lack a `return`\?"),
        (lambda: CountingEnv, r"got the class .*CountingEnv; return an instance"),
        (lambda: "env", r"from .*<lambda>, got builtins\.str$"),
    ],
)
def test_what_is_no_env_is_named(factory: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(factory)


def test_a_vector_env_is_an_env_too() -> None:
    assert isinstance(make(lambda: SyncVectorEnv([CountingEnv])), SyncVectorEnv)


def test_what_is_a_vector_env_and_an_env_is_a_vector_env() -> None:
    class Both(SyncVectorEnv, gymnasium.Env[Any, Any]):
        """As EnvPool's are."""

        def reset(self, *, seed: Any = None) -> Any:
            return super().reset(seed=seed)

    env = make(lambda: Both([make_counting] * 2))
    assert type(env) is Both


def test_an_env_spec_is_a_source(module: types.ModuleType) -> None:
    spec = EnvSpec("EnvbusSpec-v0", CountingEnv, disable_env_checker=True)
    env = make(parse_source(spec, {"length": 6}))
    assert env.unwrapped.length == 6  # type: ignore[attr-defined]


def test_missing_specs_are_registered_and_others_left_alone(module: types.ModuleType) -> None:
    cart_pole = gymnasium.spec("CartPole-v1")
    new = EnvSpec("EnvbusNew-v0", CountingEnv)
    register_missing([new, EnvSpec("CartPole-v1", CountingEnv)])
    assert gymnasium.registry["EnvbusNew-v0"] is new
    assert gymnasium.spec("CartPole-v1") is cart_pole
    register_missing({"EnvbusOther-v0": EnvSpec("EnvbusOther-v0", CountingEnv)})
    assert make(GymId("EnvbusOther-v0"))


def test_the_spec_of_an_env_survives_a_socket() -> None:
    spec = make(GymId("CartPole-v1", {"max_episode_steps": 7})).spec
    reply = CallResult(values=Tree(spec))
    arrived = decode(CallResult, [bytes(frame) for frame in encode(reply)]).values.value
    assert arrived == spec
    assert make(arrived.make).spec == spec


@pytest.mark.parametrize("plain", [None, [], {"id": 3}, {"id": "not an id!"}, {"other": 1}])
def test_a_bad_spec_is_a_value_error(plain: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"."):
        _build_spec(plain)


def test_rllibs_own_specs_are_not_told_to_actors() -> None:
    gymnasium.register("rllib-single-agent-env-v0", entry_point=make_counting)
    gymnasium.register("EnvbusToldOf-v0", entry_point=make_counting)
    try:
        ids = [spec.id for spec in local_registry()]
    finally:
        for one in ("rllib-single-agent-env-v0", "EnvbusToldOf-v0"):
            del gymnasium.registry[one]
    assert "EnvbusToldOf-v0" in ids
    assert "rllib-single-agent-env-v0" not in ids
