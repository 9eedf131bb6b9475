from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence

from envbus.bus.errors import ConfigError
from envbus.runner.adapters.pettingzoo import RemoteParallelEnv, parallel_env
from tests.actors.agent_envs import CountingParallelEnv, DictEnv

with warnings.catch_warnings():  # PettingZoo's tests import what PettingZoo deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import parallel_api_test, parallel_seed_test

GENERATED = [
    f"pettingzoo.test.example_envs.generated_agents_parallel_{name}v0:parallel_env"
    for name in ("", "cust_agentid_")
]
Make = Callable[..., RemoteParallelEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    envs: list[RemoteParallelEnv] = []

    def _make(*args: Any, **kwargs: Any) -> RemoteParallelEnv:
        envs.append(parallel_env(*args, **kwargs))
        return envs[-1]

    yield _make
    for env in envs:
        env.close()


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:.*(possible_agents|Agent was given|No agents):UserWarning")
@pytest.mark.parametrize("source", GENERATED)
def test_passes_pettingzoo_s_api_test_with_agents_born_and_dying(
    make: Make, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make(source, max_cycles=80)
    assert not hasattr(env, "possible_agents")
    parallel_api_test(env, num_cycles=80)
    assert "Passed Parallel API test" in capsys.readouterr().out


@pytest.mark.parametrize("source", GENERATED)
def test_passes_pettingzoo_s_seed_test(make: Make, source: str) -> None:
    parallel_seed_test(functools.partial(make, source), num_cycles=15)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Agent was given:UserWarning")
@pytest.mark.parametrize(
    "source",
    [
        "pettingzoo.butterfly.pistonball_v6:parallel_env",
        "mpe2.simple_spread_v3:env",  # AEC, converted
        "pettingzoo.sisl.multiwalker_v9:parallel_env",
        "mpe2.simple_spread_v3:parallel_env",
        "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env",
    ],
)
def test_passes_pettingzoo_s_api_test_on_real_envs(make: Make, source: str) -> None:
    parallel_api_test(make(source), num_cycles=30)


def test_spaces_are_the_same_objects_each_time(make: Make) -> None:
    env = make(functools.partial(CountingParallelEnv, {"x": 2, ("y", 1): 3}))
    assert env.possible_agents == ["x", ("y", 1)]
    action, observation = env.action_space("x"), env.observation_space(("y", 1))
    action.seed(5)
    env.reset()
    env.step({"x": 1, ("y", 1): 0})
    assert env.action_space("x") is action
    assert env.observation_space(("y", 1)) is observation
    with pytest.raises(KeyError):
        make(GENERATED[0]).action_space("nobody_1")


def test_with_closes_an_env() -> None:
    with parallel_env(functools.partial(CountingParallelEnv, {"x": 2})) as env:
        env.reset()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_spaces_of_agents_that_nobody_named_are_the_same_objects(make: Make) -> None:
    env = make(GENERATED[0])
    for _ in range(2):
        env.reset(seed=3)
        agent = env.agents[0]
        space = env.action_space(agent)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        assert env.action_space(agent) is space
    first = space
    env.reset(seed=3)
    assert env.action_space(agent) is first  # equal, and so the same
    env.reset(seed=4)
    assert env.action_space(agent) is not first  # this env makes other spaces each time


def test_the_agents_are_the_env_s_and_the_dead_stay_dead(make: Make) -> None:
    env = make(functools.partial(CountingParallelEnv, {"x": 1, "y": 2}))
    observations, infos = env.reset(seed=9)
    assert env.agents == ["x", "y"]
    assert infos == {"x": {"seed": 9}, "y": {"seed": 9}}
    assert observations["y"].tolist() == [1, 0]
    observations, rewards, terminations, truncations, _ = env.step({"x": 2, "y": 1})
    assert env.agents == ["y"]
    assert set(env.agents) <= set(env.possible_agents)
    assert rewards == {"x": 2.0, "y": 1.0}
    assert terminations == {"x": True, "y": False}
    assert truncations == {"x": False, "y": False}
    *_, terminations, _, _ = env.step({"y": 1})
    assert terminations == {"y": True}
    assert env.agents == []


def test_in_rllib_s_style_the_flag_of_all_ends_the_episode_of_each_agent(make: Make) -> None:
    both = {"a": 1.0, "b": 1.0}
    goes_on: dict[str, bool] = {"__all__": False}
    script = [
        ({"a": 1, "b": 1}, both, goes_on, goes_on, {}),
        ({"a": 2, "b": 2}, both, {"b": True, "__all__": False}, goes_on, {}),
        ({"a": 3}, {"a": 1.0}, goes_on, {"__all__": True}, {}),
    ]
    env = make(functools.partial(DictEnv, script))
    for _ in range(2):
        env.reset()
        assert env.agents == ["a", "b"]
        flags = env.step({"a": 0, "b": 0})[2:4]
        assert flags == ({"a": False, "b": False}, {"a": False, "b": False})
        flags = env.step({"a": 0, "b": 0})[2:4]
        assert flags == ({"a": False, "b": True}, {"a": False, "b": False})
        assert env.agents == ["a"]
        assert env.step({"a": 0})[2:4] == ({"a": False}, {"a": True})
        assert env.agents == []


def test_a_remote_env_steps_as_a_local_one(make: Make) -> None:
    from mpe2 import simple_spread_v3

    local = simple_spread_v3.parallel_env(max_cycles=10)
    remote = make("mpe2.simple_spread_v3:parallel_env", max_cycles=10)
    assert data_equivalence(local.reset(seed=7), remote.reset(seed=7))
    assert remote.agents == local.agents
    for _ in range(10):
        actions = {agent: np.int64(3) for agent in local.agents}
        stepped = tuple(map(dict, local.step(actions)))  # rewards are a defaultdict
        assert data_equivalence(stepped, remote.step(actions))
        assert remote.agents == local.agents
    assert np.array_equal(remote.state(), local.state())
    local.close()


def test_an_env_with_one_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="use make_vec"):
        parallel_env("CartPole-v1")


def test_what_the_env_raises_comes_out_and_it_can_be_reset(make: Make) -> None:
    wrong = functools.partial(DictEnv, [({"a": 1}, {}, {}, {}, {})])
    env = make(wrong)
    env.reset()
    with pytest.raises(ValueError, match="without '__all__'"):
        env.step({"a": 1})
    assert env.reset()[0] == {"a": 2, "b": 2}
