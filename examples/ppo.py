"""PPO in one file, through `EnvRunner`: solves CartPole-v1 on two cores in minutes.

    pip install torch
    python examples/ppo.py --seed 1

After J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017
(https://arxiv.org/abs/1707.06347), with the details of CleanRL's `ppo.py`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from envbus.runner import ActorPool, EnvRunner, RunnerConfig, add_gae, bootstrap_rows
from envbus.runner.adapters.torch_policy import TorchPolicy


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        hidden = lambda: [layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh()]  # noqa: E731
        self.actor = nn.Sequential(*hidden(), layer(64, actions, 0.01))
        self.critic = nn.Sequential(*hidden(), layer(64, 1, 1.0))

    def act(self, observations, states, explore):
        chosen = Categorical(logits=self.actor(observations))
        actions = chosen.sample() if explore else chosen.probs.argmax(-1)
        values = self.critic(observations)[:, 0]
        return actions, states, {"action_logp": chosen.log_prob(actions), "vf_preds": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=128, help="per env and update")
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--solved-at", type=float, default=475.0, help="mean of 100 episodes")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    gamma, gae_lambda, clip, epochs, minibatches = 0.99, 0.95, 0.2, 4, 4
    learning_rate, entropy_coef, value_coef, max_norm = 1e-3, 0.01, 0.5, 0.5

    pool = ActorPool([args.env] * args.num_envs)
    agent = Agent(pool.single_observation_space.shape[0], int(pool.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
    config = RunnerConfig(
        rollout_fragment_length=args.num_steps, min_envs=args.num_envs, seed=args.seed
    )
    returns: deque[float] = deque(maxlen=100)
    steps, begin = 0, time.perf_counter()
    with EnvRunner(pool, TorchPolicy(agent), config) as runner:
        while steps < args.total_steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1.0 - steps / args.total_steps)

            sample = runner.sample()
            returns.extend(episode.episode_return for episode in sample.episodes)
            steps += sample.env_steps
            print(
                f"{steps:>8} steps  {time.perf_counter() - begin:6.1f} s  "
                f"return {np.mean(returns) if returns else float('nan'):6.1f}",
                flush=True,
            )
            if len(returns) == 100 and np.mean(returns) >= args.solved_at:
                break

            # Truncated episodes go on behind their last observation: its value counts.
            batch = sample.single()
            (cut,) = bootstrap_rows(
                batch["terminateds"], batch["truncateds"], starts=batch.trajectory_starts()
            )
            with torch.inference_mode():
                values = agent.critic(torch.as_tensor(batch["next_obs"][cut]))[:, 0].numpy()
            batch = add_gae(batch, values, gamma=gamma, gae_lambda=gae_lambda)
            names = ("obs", "actions", "action_logp", "advantages", "value_targets")
            data = [torch.as_tensor(np.array(batch[name])) for name in names]
            for _ in range(epochs):
                for rows in torch.randperm(len(batch)).chunk(minibatches):
                    obs, actions, old_logp, advantages, targets = (part[rows] for part in data)
                    chosen = Categorical(logits=agent.actor(obs))
                    ratio = (chosen.log_prob(actions) - old_logp).exp()
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                    gain = torch.min(
                        advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)
                    ).mean()
                    value_loss = 0.5 * (agent.critic(obs)[:, 0] - targets).square().mean()
                    loss = -gain + value_coef * value_loss - entropy_coef * chosen.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
                    optimizer.step()

        evaluation = runner.sample(num_episodes=100, explore=False).episodes
    mean = np.mean([episode.episode_return for episode in evaluation])
    print(f"best actions: mean return {mean:.1f} of {len(evaluation)} episodes after {steps} steps")


if __name__ == "__main__":
    main()
