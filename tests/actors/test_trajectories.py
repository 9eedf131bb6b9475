"""Actors against Gymnasium's own `SyncVectorEnv`: same seeds and actions, same everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.spaces.spaces import Space, is_fixed_size
from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.runner.testing import assert_same
from tests.actors.driver import Anything, Driver
from tests.envs import CustomSpaceEnv, InPlaceEnv, SpaceEnv, all_spaces

SPACES = all_spaces()
MODES = [mode.value for mode in AutoresetMode]
BOTH_WAYS = pytest.mark.parametrize("shared_memory", [True, False], ids=["arena", "frames"])


def equal_trajectories(
    sources: list[Callable[[], Any]],
    mode: str,
    *,
    actors: int = 1,
    shared_memory: bool = True,
    steps: int = 30,
    options: dict[str, Any] | None = None,
) -> None:
    sync = SyncVectorEnv(sources, autoreset_mode=AutoresetMode(mode))
    driver = Driver(sources, mode, actors=actors, shared_memory=shared_memory)
    try:
        sync.action_space.seed(11)
        assert driver.action_space == sync.action_space
        assert driver.observation_space == sync.observation_space
        expected: Anything = sync.reset(seed=5, options=options)
        assert_same(driver.reset(seed=5, options=options), expected, "reset")
        over = np.zeros(len(sources), np.bool_)
        for step in range(steps):
            if mode == "Disabled" and over.any():
                mask = {"reset_mask": over}
                expected = sync.reset(seed=None, options=dict(mask))
                assert_same(driver.reset(seed=None, options=dict(mask)), expected, f"mask {step}")
            actions = sync.action_space.sample()
            expected = sync.step(actions)
            assert_same(driver.step(actions), expected, f"step {step}")
            over = expected[2] | expected[3]
        expected = sync.reset(seed=[3] + [None] * (len(sources) - 1))
        again = driver.reset(seed=[3] + [None] * (len(sources) - 1))
        assert_same(again, expected, "second reset")
    finally:
        driver.close()
        sync.close()
    assert driver.errors == []


@BOTH_WAYS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", [CountingEnv, InfoEnv])
def test_envs_with_infos(env: type[CountingEnv], mode: str, shared_memory: bool) -> None:
    sources = [partial(env, length) for length in (1, 2, 3, 5)]
    equal_trajectories(sources, mode, actors=2, shared_memory=shared_memory)


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_an_env_that_changes_its_arrays_in_place(mode: str, shared_memory: bool) -> None:
    equal_trajectories([partial(InPlaceEnv, 3)] * 3, mode, shared_memory=shared_memory)


@BOTH_WAYS
def test_the_final_observation_survives_changes_in_place(shared_memory: bool) -> None:
    driver = Driver([partial(InPlaceEnv, 2)], "SameStep", shared_memory=shared_memory)
    driver.reset(seed=5)
    driver.step(np.array([7]))
    observations, *_, infos = driver.step(np.array([8]))
    assert observations.tolist() == [[2.0, 0.0, 0.0, 5.0]]
    assert infos["final_obs"][0].tolist() == [1.0, 2.0, 8.0, 5.0]
    assert infos["final_info"]["counts"].tolist() == [[1, 2]]
    assert infos["final_info"]["path"][0] == [1, 2]
    assert infos["counts"].tolist() == [[2, 0]]
    driver.close()


@BOTH_WAYS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1", "Acrobot-v1"]
)
def test_real_envs(env_id: str, mode: str, shared_memory: bool) -> None:
    sources = [partial(gymnasium.make, env_id)] * 3
    equal_trajectories(sources, mode, actors=2, shared_memory=shared_memory, steps=60)


def same_mode_sources(observation_space: Space, action_space: Space) -> list[Callable[[], Any]]:
    return [partial(SpaceEnv, observation_space, action_space, length) for length in (2, 3)]


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_as_observation_space(name: str, mode: str, shared_memory: bool) -> None:
    sources = same_mode_sources(SPACES[name], spaces.Discrete(3))
    equal_trajectories(sources, mode, shared_memory=shared_memory, steps=8)


@BOTH_WAYS
@pytest.mark.parametrize("name", SPACES)
def test_every_space_as_action_space(name: str, shared_memory: bool) -> None:
    """Each env gets its action exactly as Gymnasium hands it, and may write to it."""
    sources = same_mode_sources(spaces.Discrete(3), SPACES[name])
    sync = SyncVectorEnv(sources)
    driver = Driver(sources, shared_memory=shared_memory)
    sync.action_space.seed(1)
    for vector_env in (sync, driver):
        vector_env.reset(seed=1)
    for _ in range(5):
        actions = sync.action_space.sample()
        sync.step(actions)
        driver.step(actions)
    for slot, env in enumerate(sync.envs):
        seen = driver.actors[0]._slots.groups[0]._envs[slot].actions  # type: ignore[attr-defined]
        assert_same(seen, env.actions, f"env {slot}")
        check_writable(seen)
    driver.close()


def check_writable(value: Anything) -> None:
    if isinstance(value, np.ndarray):
        assert value.flags.writeable
    elif isinstance(value, dict):
        check_writable(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            check_writable(item)


def test_the_spaces_cover_both_ways_of_exchange() -> None:
    assert {is_fixed_size(space) for space in SPACES.values()} == {True, False}


@BOTH_WAYS
def test_custom_spaces(shared_memory: bool) -> None:
    driver = Driver([CustomSpaceEnv, CustomSpaceEnv], shared_memory=shared_memory)
    assert driver.reset()[0] == ("reset", "reset")
    assert driver.step(("a", "b"))[0] == ("step a", "step b")
    driver.close()


@pytest.mark.parametrize("actors", [1, 2, 5])
def test_the_number_of_actors_changes_nothing(actors: int) -> None:
    sources = [partial(InfoEnv, length) for length in (1, 2, 3, 4, 5)]
    equal_trajectories(sources, "SameStep", actors=actors)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("actors", [1, 2])
@BOTH_WAYS
def test_a_vector_env_in_one_actor(mode: str, actors: int, shared_memory: bool) -> None:
    """A hosted vector env gives what it would give by itself."""
    lengths = (1, 2, 3, 4)
    sync = SyncVectorEnv(
        [partial(InfoEnv, length) for length in lengths], autoreset_mode=AutoresetMode(mode)
    )
    parts = np.array_split(np.array(lengths), actors)
    sources = [
        partial(
            SyncVectorEnv,
            [partial(InfoEnv, int(length)) for length in part],
            autoreset_mode=AutoresetMode(mode),
        )
        for part in parts
    ]
    driver = Driver(sources, mode, actors=actors, shared_memory=shared_memory)
    assert driver.num_envs == 4
    assert_same(driver.reset(seed=5), sync.reset(seed=5))
    for step in range(10):
        actions = np.arange(4) + step
        assert_same(driver.step(actions), sync.step(actions), f"step {step}")
    driver.close()


def test_options_reach_each_env() -> None:
    sources = [partial(_LevelEnv, 3)] * 2
    equal_trajectories(sources, "NextStep", options={"level": 3})
    driver = Driver(sources, "NextStep")
    _, infos = driver.reset(options={"level": 3})
    assert infos["level"].tolist() == [3, 3]
    driver.close()


class _LevelEnv(CountingEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "level": (options or {}).get("level", 0)}
