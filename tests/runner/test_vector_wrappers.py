"""Gymnasium's vector wrappers around `BusVectorEnv`: what they give around `SyncVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector

from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.runner import BusVectorEnv
from envbus.runner.testing import assert_same

Wrap = Callable[[Any], Any]

CARTPOLE = [partial(gymnasium.make, "CartPole-v1", max_episode_steps=9)] * 3
PENDULUM = [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5)] * 3


def rollout(envs: VectorEnv[Any, Any, Any], steps: int = 40) -> list[Any]:
    envs.action_space.seed(3)
    results: list[Any] = [envs.reset(seed=7)]
    results += [envs.step(envs.action_space.sample()) for _ in range(steps)]
    return results


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # by RescaleAction
@pytest.mark.parametrize(
    ("factories", "wrap"),
    [
        (CARTPOLE, vector.NormalizeObservation),
        (CARTPOLE, vector.NormalizeReward),
        (CARTPOLE, lambda envs: vector.TransformReward(envs, lambda reward: reward * 2)),
        (PENDULUM, lambda envs: vector.ClipReward(envs, -1.0, 0.0)),
        (PENDULUM, lambda envs: vector.ClipAction(envs)),
        (PENDULUM, lambda envs: vector.RescaleAction(envs, -1.0, 1.0)),
        (PENDULUM, lambda envs: vector.RescaleObservation(envs, -1.0, 1.0)),
        (CARTPOLE, lambda envs: vector.TransformObservation(envs, lambda obs: obs[:, :2])),
        (CARTPOLE, lambda envs: vector.FlattenObservation(envs)),
        (CARTPOLE, lambda envs: vector.DtypeObservation(envs, np.float64)),
        (CARTPOLE, lambda envs: vector.DictInfoToList(vector.RecordEpisodeStatistics(envs))),
        (CARTPOLE, lambda envs: vector.NormalizeReward(vector.NormalizeObservation(envs))),
    ],
    ids=[
        "NormalizeObservation",
        "NormalizeReward",
        "TransformReward",
        "ClipReward",
        "ClipAction",
        "RescaleAction",
        "RescaleObservation",
        "TransformObservation",
        "FlattenObservation",
        "DtypeObservation",
        "DictInfoToList",
        "two",
    ],
)
def test_a_wrapper_gives_what_it_gives_around_a_sync_vector_env(
    factories: list[Any], wrap: Wrap
) -> None:
    sync, bus = wrap(SyncVectorEnv(factories)), wrap(BusVectorEnv(factories, num_actors=2))
    assert_same(_without_times(rollout(bus)), _without_times(rollout(sync)))
    assert bus.observation_space == sync.observation_space
    assert bus.np_random_seed == sync.np_random_seed
    bus.close()
    assert bus.unwrapped.closed
    sync.close()


def _without_times(results: list[Any]) -> list[Any]:
    """Leave the seconds that an episode took out of its statistics."""
    for result in results:
        for info in result[-1] if isinstance(result[-1], list) else [result[-1]]:
            info.get("episode", {}).pop("t", None)
            info.get("episode", {}).pop("_t", None)
    return results


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2], ids=lambda mode: mode.value)
def test_episodes_are_recorded_with_their_returns_and_lengths(mode: AutoresetMode) -> None:
    factories = [partial(CountingEnv, length) for length in (2, 3)]
    envs = vector.RecordEpisodeStatistics(
        BusVectorEnv(factories, autoreset_mode=mode), stats_key="stats"
    )
    envs.reset()
    envs.step([0, 0])
    infos = envs.step([0, 0])[4]
    assert infos["_stats"].tolist() == [True, False]
    assert (infos["stats"]["r"][0], infos["stats"]["l"][0]) == (11 + 12, 2)
    envs.close()


def test_infos_come_as_a_list_of_dicts_too() -> None:
    factories = [partial(InfoEnv, length) for length in (1, 5)]
    envs = vector.DictInfoToList(BusVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))
    _, infos = envs.reset()
    assert infos == [{"episode": 1}, {"episode": 1}]
    infos = envs.step([0, 0])[4]
    assert infos[0]["final_obs"].tolist()[:2] == [1, 1]
    assert infos[0]["final_info"]["text"] == "step 1"
    assert infos[1]["text"] == "step 1"
    assert "final_obs" not in infos[1]
    envs.close()


def test_the_space_of_a_wrapped_vector_env_may_be_set() -> None:
    envs = gymnasium.vector.VectorWrapper(BusVectorEnv([CountingEnv] * 2))
    envs.observation_space = spaces.Box(0, 1, (2, 4))
    assert envs.unwrapped.observation_space != envs.observation_space
    assert envs.render_mode is None
    assert envs.spec is None
    assert "BusVectorEnv(num_envs=2)" in repr(envs)
    envs.close(terminate=True)


def test_wrappers_of_single_envs_run_in_the_actors() -> None:
    def factory() -> gymnasium.Env[Any, Any]:
        env = gymnasium.make("CartPole-v1")
        return gymnasium.wrappers.RecordEpisodeStatistics(
            gymnasium.wrappers.TimeAwareObservation(env)
        )

    sync, bus = SyncVectorEnv([factory] * 2), BusVectorEnv([factory] * 2)
    assert_same(_without_times(rollout(bus)), _without_times(rollout(sync)))
    bus.close()
    sync.close()
