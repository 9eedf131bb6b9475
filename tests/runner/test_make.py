from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeAwareObservation, TimeLimit

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import BusVectorEnv, make_vec


@pytest.mark.parametrize("num_envs", [1, 3, 10])
def test_an_id_makes_equal_envs_and_gives_their_spec(num_envs: int) -> None:
    """V-16."""
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


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, "2", True, None])
def test_a_number_of_envs_is_a_positive_integer(num_envs: Any) -> None:
    """V-14."""
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
