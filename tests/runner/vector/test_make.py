from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeAwareObservation, TimeLimit

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import BusVectorEnv, Timeouts, make_vec


@pytest.mark.parametrize("num_envs", [1, 3, 10])
def test_an_id_makes_equal_envs_and_gives_their_spec(num_envs: int) -> None:
    envs = make_vec("CartPole-v1", num_envs)
    assert type(envs) is BusVectorEnv
    assert envs.num_envs == num_envs
    assert envs.spec is not None
    assert envs.spec.id == "CartPole-v1"
    assert envs.reset()[0].shape == (num_envs, 4)
    envs.close()


def test_arguments_reach_the_envs_and_stand_in_the_spec_only_there() -> None:
    envs = make_vec("Pendulum-v1", 2, g=9.81)
    assert envs.get_attr("g") == (9.81, 9.81)
    assert envs.spec is not None
    assert envs.spec.kwargs == {"g": 9.81}
    assert gymnasium.spec("Pendulum-v1").kwargs == {}
    envs.close()


@pytest.mark.parametrize(
    "source",
    [
        CountingEnv,
        lambda length, render_mode=None: CountingEnv(length, render_mode=render_mode),
        "envbus.actors.testing:CountingEnv",
    ],
    ids=["class", "lambda", "import path"],
)
def test_a_factory_or_an_import_path_gets_the_arguments(source: Any) -> None:
    envs = make_vec(source, 2, length=7, render_mode="rgb_array")
    assert envs.get_attr("length") == (7, 7)
    assert envs.render_mode == "rgb_array"
    assert envs.spec is None
    envs.close()


@pytest.mark.slow
def test_a_module_that_registers_is_imported() -> None:
    pytest.importorskip("minigrid")
    envs = make_vec("minigrid:MiniGrid-Empty-5x5-v0", 2, vector_kwargs={"shared_memory": False})
    assert envs.reset(seed=0)[0]["image"].shape == (2, 7, 7, 3)
    envs.close()


def test_wrappers_go_around_each_env_the_first_one_innermost() -> None:
    wrappers = (partial(TimeLimit, max_episode_steps=3), TimeAwareObservation)
    envs = make_vec(CountingEnv, 2, wrappers=wrappers, length=100)
    assert envs.env_is_wrapped(TimeLimit) == [True, True]
    assert (
        envs.exec_func(lambda env: [type(env).__name__, type(env.env).__name__])
        == [["TimeAwareObservation", "TimeLimit"]] * 2
    )
    envs.reset()
    for _ in range(3):
        truncations = envs.step([0, 0])[3]
    assert truncations.all()
    envs.close()


def test_further_settings_reach_the_vector_env() -> None:
    settings: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "shared_memory": False}
    envs = make_vec("CartPole-v1", 4, num_actors=2, vector_kwargs=settings)
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    assert len(envs.actor_pids()) == 2
    assert settings == {"autoreset_mode": AutoresetMode.DISABLED, "shared_memory": False}
    envs.close()


def test_settings_of_the_vector_env_and_arguments_of_the_env_go_where_they_belong() -> None:
    envs = make_vec(
        CountingEnv,
        2,
        num_actors=1,
        restart=True,
        autoreset_mode="Disabled",
        timeouts=Timeouts(step=7.0),
        copy=False,
        length=7,
        env_kwargs={"render_mode": "rgb_array"},
        vector_kwargs={"wait": "block"},
    )
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    assert envs.timeouts == Timeouts(step=7.0)
    assert not envs.copy
    assert len(envs.actor_pids()) == 1
    assert envs.get_attr("length") == (7, 7)
    assert envs.render_mode == "rgb_array"
    envs.close()


def _by_length(index: int, more: int = 1) -> CountingEnv:
    return CountingEnv(index + more)


@pytest.mark.parametrize("source", [_by_length, f"{__name__}:_by_length"])
def test_a_factory_is_called_with_each_env_s_index_where_that_is_said(source: Any) -> None:
    wrappers = (partial(TimeLimit, max_episode_steps=9),)
    envs = make_vec(source, 3, with_index=True, num_actors=2, more=5, wrappers=wrappers)
    assert envs.get_attr("length") == (5, 6, 7)
    assert envs.env_is_wrapped(TimeLimit) == [True] * 3
    envs.close()
    with pytest.raises(ConfigError, match="with_index must be bool"):
        make_vec(source, 3, **{"with_index": 3})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_one_that_lacks_an_argument_is_told_how_it_gets_the_index() -> None:
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        make_vec(_by_length, 2)
    assert caught.value.__notes__ == [
        "if it is the env's index, say make_vec(..., with_index=True)"
    ]


class _TimedEnv(CountingEnv):
    def __init__(self, timeouts: int = 3) -> None:
        super().__init__(100)
        self.given = timeouts


def test_a_name_that_both_know_is_refused_until_it_is_said_which_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"timeouts: known to .* env_kwargs=\{'timeouts': ...\}"):
        make_vec(_TimedEnv, timeouts=Timeouts())
    envs = make_vec(
        _TimedEnv, env_kwargs={"timeouts": 5}, vector_kwargs={"timeouts": Timeouts(step=9.0)}
    )
    assert envs.get_attr("given") == (5,)
    assert envs.timeouts.step == 9.0
    envs.close()


def test_a_constructor_that_takes_any_name_knows_none() -> None:
    envs = make_vec(lambda **keys: CountingEnv(**keys), copy=False, length=7)
    assert not envs.copy
    assert envs.get_attr("length") == (7,)
    envs.close()


@pytest.mark.parametrize("source", [_TimedEnv, f"{__name__}:_TimedEnv", "Timed-v0"])
def test_a_constructor_is_looked_at_however_it_is_given(source: Any) -> None:
    gymnasium.register("Timed-v0", entry_point=f"{__name__}:_TimedEnv")
    try:
        with pytest.raises(ConfigError, match="known to the vector env and to the env's"):
            make_vec(source, timeouts=Timeouts())
    finally:
        del gymnasium.registry["Timed-v0"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"g": 1.0, "env_kwargs": {"g": 2.0}}, r"g: given as .* and in env_kwargs="),
        (
            {"restart": True, "vector_kwargs": {"restart": False}},
            "restart: given .* vector_kwargs=",
        ),
        ({"env_kwargs": 5}, r"env_kwargs must be Mapping, \{\"g\": 9.81\} for"),
    ],
)
def test_what_is_given_twice_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_vec("Pendulum-v1", 2, **settings)


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, "2", True, None])
def test_a_number_of_envs_is_a_positive_integer(num_envs: Any) -> None:
    with pytest.raises(ConfigError, match="num_envs must be a positive integer"):
        make_vec("CartPole-v1", num_envs)


def test_what_is_no_env_is_refused() -> None:
    with pytest.raises(gymnasium.error.NameNotFound):
        make_vec("NoSuchEnv-v3", 2)
    with pytest.raises(TypeError, match="g_force"):
        make_vec("Pendulum-v1", 2, g_force=3)


@pytest.mark.parametrize("odd", [5, "abc", [3]])
def test_wrappers_that_are_no_list_of_functions_are_refused(odd: Any) -> None:
    with pytest.raises(ConfigError, match="wrappers are a list of functions of an env"):
        make_vec("CartPole-v1", wrappers=odd)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_name_that_is_nearly_an_argument_of_make_vec_is_told() -> None:
    with pytest.raises(TypeError, match="num_actor") as caught:
        make_vec("CartPole-v1", 2, num_actor=1)
    assert caught.value.__notes__ == [
        "did you mean 'num_actors', which is an argument of make_vec?"
    ]
