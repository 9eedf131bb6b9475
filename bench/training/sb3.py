"""PPO of Stable-Baselines3, with its defaults but for the length of fragments."""

from __future__ import annotations

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from envbus.bench.training.cases import OURS
from envbus.bench.training.program import Trained, Training, run, timed
from envbus.runner.adapters import sb3

__all__ = ["train"]

#: Rows of one update.
_ROWS = 4096


def train(training: Training) -> Trained:
    """Train, and return how long that took."""
    torch.set_num_threads(1)
    env, num_envs, seed = training.env, training.num_envs, training.seed
    if training.way == OURS:
        envs = sb3.make_vec_env(env, num_envs, seed=seed)
    else:
        kind = DummyVecEnv if training.way == "one process" else SubprocVecEnv
        envs = make_vec_env(env, num_envs, seed=seed, vec_env_cls=kind)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=_ROWS // num_envs,
        batch_size=256,
        seed=seed,
        device="cpu",
    )
    seconds = timed(lambda: model.learn(training.steps))
    returns = [episode["r"] for episode in model.ep_info_buffer]
    envs.close()
    return Trained(seconds, float(np.mean(returns)))


if __name__ == "__main__":
    run(train)
