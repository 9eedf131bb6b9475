from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envbus.actors import testing
from envbus.actors.testing import (
    CountingEnv,
    CustomSpaceEnv,
    ExitingEnv,
    FailingEnv,
    HangingEnv,
    InfoEnv,
    SlowEnv,
    SpaceEnv,
    all_spaces,
)


@pytest.mark.parametrize(
    "make",
    [
        CountingEnv,
        InfoEnv,
        CustomSpaceEnv,
        partial(FailingEnv, after=9),
        partial(HangingEnv, after=9),
        partial(ExitingEnv, after=9),
        partial(SlowEnv, 0.0),
    ],
)
def test_a_whole_episode_and_a_second_one(make: partial[gymnasium.Env]) -> None:
    env = make()
    for _ in range(2):
        observation, _ = env.reset(seed=1)
        assert observation in env.observation_space
        for _ in range(3):
            observation, *_ = env.step(env.action_space.sample())
            assert observation in env.observation_space
    env.close()


def test_the_counting_env_counts() -> None:
    env = CountingEnv(2)
    env.reset(seed=9)
    assert env.step(np.int64(5))[0].tolist() == [1.0, 1.0, 5.0, 9.0]
    _, reward, terminated, truncated, _ = env.step(np.int64(6))
    assert (reward, terminated, truncated) == (12.0, True, False)
    env.reset()
    env.step(np.int64(1))
    assert env.step(np.int64(1))[2:4] == (False, True)


@pytest.mark.parametrize("where", ["init", "reset", "step", "close"])
def test_a_failing_env_fails_where_it_should(where: str) -> None:
    with pytest.raises(RuntimeError, match="failing on purpose"):
        use(FailingEnv(where))
    use(FailingEnv(where, after=1))


def use(env: CountingEnv) -> None:
    env.reset()
    env.step(np.int64(0))
    env.close()


def test_the_same_seed_gives_the_same_samples() -> None:
    for name, space in all_spaces().items():
        one, other = (SpaceEnv(space, gymnasium.spaces.Discrete(2)) for _ in range(2))
        assert str(one.reset(seed=3)) == str(other.reset(seed=3)), name
        assert str(one.step(0)) == str(other.step(0)), name


@pytest.mark.parametrize("name", ["discrete", "box_uint8", "dict_nested"])
def test_the_space_env_passes_gymnasiums_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = SpaceEnv(all_spaces()[name], gymnasium.spaces.Discrete(2))
    # It warns about spaces that are unusual for learning.
    monkeypatch.setattr(gymnasium.logger, "min_level", gymnasium.logger.ERROR)
    check_env(env, skip_render_check=True)


def test_all_names_exist() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)
