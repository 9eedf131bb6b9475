from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envbus.bus.errors import ConfigError
from envbus.runner import ActorPool, BusVectorEnv
from envbus.runner.workers.config import (
    ActorSettings,
    FleetConfig,
    choose_autoreset_mode,
    choose_num_actors,
    env_sources,
)


@pytest.mark.parametrize("word", ["SameStep", "SAME_STEP", "same_step", AutoresetMode.SAME_STEP])
def test_a_mode_is_named_by_its_value_or_its_name(word: object) -> None:
    assert choose_autoreset_mode(word) is AutoresetMode.SAME_STEP


@pytest.mark.parametrize("word", ["sometimes", "", None, 1])
def test_what_is_no_mode_is_refused_with_those_that_there_are(word: object) -> None:
    with pytest.raises(ValueError, match="one of 'NextStep', 'SameStep', 'Disabled', not"):
        choose_autoreset_mode(word)


@pytest.mark.parametrize("count", ["1", -1, 0.5, None, True])
def test_a_number_of_remote_actors_that_is_none_is_refused_by_name(count: object) -> None:
    with pytest.raises(ConfigError, match="remote_actors must be"):
        FleetConfig(remote_actors=count, bind="ipc:///nowhere/bus")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["local_links", "shared_memory", "insecure"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be bool"):
        FleetConfig(**{name: value})


@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
def test_a_signature_shows_each_setting_with_type_and_default(kind: Any) -> None:
    shown = inspect.signature(kind).parameters
    for name, hint in get_type_hints(ActorSettings).items():
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].annotation == hint
        assert shown[name].default == getattr(FleetConfig(), name)
    assert "settings" not in shown


def test_each_setting_is_explained_where_it_is_declared() -> None:
    explained = inspect.getdoc(ActorSettings) or ""
    assert [n for n in ActorSettings.__annotations__ if f"\n    {n}: " not in explained] == []


@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
def test_an_argument_that_there_is_not_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"'num_actor'; did you mean 'num_actors'\?"):
        kind(["CartPole-v1"], num_actor=2)
    with pytest.raises(TypeError, match=r"'gravity'; see envbus\.runner\.ActorSettings"):
        kind(["CartPole-v1"], gravity=2)


def test_time_outs_of_none_are_the_default_ones_and_one_endpoint_is_a_list_of_one() -> None:
    assert FleetConfig.of({"timeouts": None}) == FleetConfig.of({}) == FleetConfig()
    assert FleetConfig.of({"bind": "ipc:///nowhere"}).bind == ("ipc:///nowhere",)


@pytest.mark.parametrize("limit", [None, 3, np.int32(3)])
def test_a_limit_of_concurrent_envs_is_a_positive_integer_or_none(limit: Any) -> None:
    assert FleetConfig(max_concurrency=limit).max_concurrency == limit


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        *(
            (limit, "`max_concurrency` must be an integer or None, got <cla")
            for limit in (2.5, "2")
        ),
        *((limit, "`max_concurrency` must be a positive or None, got") for limit in (0, -1)),
    ],
)
def test_what_is_no_limit_of_concurrent_envs_is_refused(limit: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FleetConfig(max_concurrency=limit)


def test_a_limit_of_a_small_numpy_type_is_a_plain_number_of_actors() -> None:
    limited = choose_num_actors(300, 300, cores=1, max_concurrency=np.uint8(255))
    assert (limited, type(limited)) == (255, int)


def test_a_sequence_has_a_source_per_env_and_one_function_is_called_by_index() -> None:
    assert env_sources("envs", ("A-v0", "B-v0"), None, "[...]") == ["A-v0", "B-v0"]
    made = env_sources("envs", lambda index: index, 3, "[...]")
    assert [make() for make in made] == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "num_envs", "told"),
    [
        (["A-v0"], 1, "leave num_envs out for a sequence"),
        (lambda index: None, 0, "num_envs must be a positive integer"),
        (lambda index: None, None, r"a function of an env's index with num_envs="),
        ("A-v0", None, "envs is a sequence"),
    ],
)
def test_what_is_neither_is_refused(given: Any, num_envs: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        env_sources("envs", given, num_envs, "[...]")
