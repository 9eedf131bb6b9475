"""Algorithms of Stable-Baselines3 train while actors are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

sb3: Any = pytest.importorskip("stable_baselines3")
torch: Any = pytest.importorskip("torch")
callbacks: Any = pytest.importorskip("stable_baselines3.common.callbacks")
evaluation: Any = pytest.importorskip("stable_baselines3.common.evaluation")
make_vec_env: Any = pytest.importorskip("envbus.runner.adapters.sb3").make_vec_env


class Killing(callbacks.BaseCallback):
    """Kills one actor after the other, each some steps after the last.

    Attributes:
        cut: Infos of rows that faults cut off.
        whole: How many other episodes have ended.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every
        self.cut: list[dict[str, Any]] = []
        self.whole = 0

    def _on_step(self) -> bool:
        infos, dones = self.locals["infos"], self.locals["dones"]
        for info in (infos[i] for i in np.flatnonzero(dones)):
            if "fault" in info:
                self.cut.append(info)
            else:
                self.whole += 1
                assert "episode" in info
        if self.n_calls % self._every == 0:
            pids = self.training_env.vector_env.actor_pids()
            os.kill(pids[self.n_calls // self._every % len(pids)], signal.SIGKILL)
        return True


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let PyTorch have one thread: networks are small, and sums come in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ppo_learns_cartpole() -> None:
    envs = make_vec_env("CartPole-v1", 8, seed=1, num_actors=2, restart=True)
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        learning_rate=1e-3,
        n_steps=64,
        batch_size=128,
        n_epochs=6,
        seed=1,
        device="cpu",
    )
    killing = Killing(every=200)
    model.learn(20480, callback=killing)
    assert envs.vector_env.statistics().restarts == 12
    assert len(killing.cut) == 12 * 4
    for info in killing.cut:
        assert info["TimeLimit.truncated"] is True
        assert info["fault"]["cause"] == "crash"
        assert info["terminal_observation"].shape == (4,)
        assert "episode" not in info
    assert killing.whole > 50
    mean, _ = evaluation.evaluate_policy(model, envs, n_eval_episodes=16)
    envs.close()
    assert mean >= 100.0  # at random: 22, with a standard deviation of 12 in single episodes


def test_sac_goes_on_and_stores_what_was_cut_off_as_truncated() -> None:
    envs = make_vec_env("Pendulum-v1", 4, seed=1, num_actors=2, restart=True)
    model = sb3.SAC(
        "MlpPolicy",
        envs,
        buffer_size=4000,
        learning_starts=200,
        policy_kwargs={"net_arch": [32, 32]},
        seed=1,
        device="cpu",
    )
    killing = Killing(every=60)
    model.learn(2000, callback=killing)
    assert envs.vector_env.statistics().restarts == 8
    envs.close()
    buffer = model.replay_buffer
    size = buffer.size()
    ended = buffer.dones[:size].astype(bool)
    # Pendulum never terminates: each end is one of a time limit or of a fault.
    assert (buffer.timeouts[:size].astype(bool) == ended).all()
    assert np.count_nonzero(ended) == len(killing.cut) + killing.whole
    assert len(killing.cut) == 8 * 2
    for arrays in (buffer.observations, buffer.next_observations, buffer.rewards):
        assert np.isfinite(arrays[:size]).all()
    weights = model.get_parameters()["policy"].values()
    assert all(torch.isfinite(weight).all() for weight in weights)
