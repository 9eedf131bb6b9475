"""PPO of Tianshou, on its own Collector."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from envbus.bench.training.cases import OURS
from envbus.bench.training.program import Trained, Training, run, timed
from envbus.runner.adapters.tianshou import ActorVectorEnv

__all__ = ["train"]

#: Rows of one update, and episodes that tell how good the policy has become.
_ROWS = 2048
_EPISODES = 32


def train(training: Training) -> Trained:
    """Train, and return how long that took."""
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    kinds = {OURS: ActorVectorEnv, "one process": DummyVectorEnv}
    kind = kinds.get(training.way, SubprocVectorEnv)
    make = functools.partial(gymnasium.make, training.env)
    envs = kind([make] * training.num_envs)
    envs.seed(training.seed)
    env = make()
    observations: Any = env.observation_space
    space: Any = env.action_space
    inputs = observations.shape[0]

    def body() -> Net:
        return Net(state_shape=inputs, hidden_sizes=[64, 64], activation=torch.nn.Tanh)

    actor = DiscreteActor(preprocess_net=body(), action_shape=space.n, softmax_output=False)
    algorithm = PPO(
        policy=DiscreteActorPolicy(
            actor=actor,
            action_space=space,
            dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        ),
        critic=DiscreteCritic(preprocess_net=body()),
        optim=AdamOptimizerFactory(lr=1e-3),
    )
    buffer = VectorReplayBuffer(2 * _ROWS, training.num_envs)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()
    parameters = OnPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=training.steps,
        collection_step_num_env_steps=_ROWS,
        batch_size=256,
        update_step_num_repetitions=6,
        show_progress=False,
        verbose=False,
    )
    seconds = timed(lambda: algorithm.run_training(parameters))
    collector.reset()
    found = collector.collect(n_episode=_EPISODES)
    envs.close()
    return Trained(seconds, float(found.returns.mean()))


if __name__ == "__main__":
    run(train)
