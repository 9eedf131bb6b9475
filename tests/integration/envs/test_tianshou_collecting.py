"""Collectors of Tianshou go on while actors are killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("tianshou")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ActorVectorEnv: Any = pytest.importorskip("envbus.runner.adapters.tianshou").ActorVectorEnv
data: Any = pytest.importorskip("tianshou.data")
algorithms: Any = pytest.importorskip("tianshou.algorithm.algorithm_base")

NUM_ENVS = 4


class RandomPolicy(algorithms.Policy):
    """Has a state and an entry of its own, without which an `AsyncCollector` fails by itself."""

    def __init__(self) -> None:
        super().__init__(action_space=gymnasium.spaces.Discrete(2))

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        number = len(batch.obs)
        actions = np.arange(number) % 2
        nothing = data.Batch(h=np.zeros(number))
        return data.Batch(act=actions, state=nothing, policy=data.Batch(x=np.zeros(number)))


@pytest.mark.filterwarnings("ignore:Using async setting")
@pytest.mark.parametrize("wait_num", [None, 2])
def test_a_collector_goes_on_while_actors_are_killed(wait_num: int | None) -> None:
    make = partial(gymnasium.make, "CartPole-v1")
    envs = ActorVectorEnv([make] * NUM_ENVS, wait_num, restart=True)
    collect = data.Collector if wait_num is None else data.AsyncCollector
    buffer = data.VectorReplayBuffer(4000, NUM_ENVS)
    collector = collect(RandomPolicy(), envs, buffer)
    collector.reset()
    for number in range(6):
        assert collector.collect(n_step=200).n_collected_steps >= 200
        pids = envs.pool.actor_pids()
        os.kill(pids[number % len(pids)], signal.SIGKILL)
    collector.collect(n_step=200)
    assert envs.pool.statistics().restarts >= 5
    rows, _ = buffer.sample(0)
    cut = rows.info.fault
    assert cut.dtype == np.bool_
    assert np.count_nonzero(cut) >= 5
    # CartPole is not truncated by itself in so few steps.
    np.testing.assert_array_equal(rows.truncated, cut)
    assert not rows.terminated[cut].any()
    assert not rows.rew[cut].any()
    np.testing.assert_array_equal(rows.obs_next[cut], rows.obs[cut])
    assert np.isfinite(rows.obs_next).all()
    envs.close()


@pytest.mark.timeout(600)
def test_ppo_learns_cart_pole() -> None:
    training: Any = pytest.importorskip("envbus.bench.training.tianshou")
    found = training.train(training.Training("CartPole-v1", 8, 30_000, training.OURS, seed=1))
    assert found.episode_return >= 100.0  # at random: 22
