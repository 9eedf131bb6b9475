from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv, ExitingEnv, InfoEnv, NullEnv
from tests.envs import CustomSpaceEnv, FailingEnv, HangingEnv


@pytest.mark.parametrize(
    "make",
    [
        CountingEnv,
        CustomSpaceEnv,
        InfoEnv,
        NullEnv,
        partial(ExitingEnv, after=9),
        partial(FailingEnv, after=9),
        partial(HangingEnv, after=9),
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
