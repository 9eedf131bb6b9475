"""PPO of RLlib with one env runner in the learner's process."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from envbus.bench.training.cases import OURS
from envbus.bench.training.program import Trained, Training, run, timed
from envbus.runner.adapters.rllib import BusSingleAgentEnvRunner

__all__ = ["train"]

#: Rows of one update.
_ROWS = 4000


def train(training: Training) -> Trained:
    """Train, and return how long that took."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = (
        PPOConfig()
        .environment(training.env)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=training.num_envs,
            gym_env_vectorize_mode="async" if training.way == "subprocesses" else "sync",
            rollout_fragment_length="auto",
        )
        .training(train_batch_size_per_learner=_ROWS, minibatch_size=256, num_epochs=6, lr=5e-4)
        .debugging(seed=training.seed, log_level="ERROR")
    )
    if training.way == OURS:
        config.env_runners(env_runner_cls=BusSingleAgentEnvRunner)
    algorithm = config.build_algo()
    results: list[Any] = []
    seconds = timed(
        lambda: results.extend(algorithm.train() for _ in range(training.steps // _ROWS))
    )
    found = results[-1]["env_runners"]["episode_return_mean"]
    algorithm.stop()
    ray.shutdown()
    return Trained(seconds, float(found))


if __name__ == "__main__":
    run(train)
