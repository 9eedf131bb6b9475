"""PPO in one file, in CleanRL's manner: a plain loop over a vector env.

    pip install torch
    python examples/cleanrl_ppo.py
    python examples/cleanrl_ppo.py --autoreset SAME_STEP --kill-every 3
    python examples/cleanrl_ppo.py --vector gymnasium

With `--vector gymnasium` the very same loop runs over a vector env of Gymnasium: `make_envs` is all
that differs. `examples/ppo.py` is the same algorithm through `EnvRunner`, which does the
bookkeeping of `main` for you.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from envbus.runner import BusVectorEnv, RestartPolicy


@dataclasses.dataclass
class Args:
    env_id: str = "CartPole-v1"
    vector: str = "envbus"  # or "gymnasium"
    autoreset: str = "NEXT_STEP"  # or "SAME_STEP"
    kill_every: float = 0.0  # seconds: kill -9 of an actor at random; 0: never
    seed: int = 1
    total_steps: int = 100_000
    num_envs: int = 8
    num_steps: int = 128  # per env and update
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    minibatches: int = 4
    epochs: int = 6
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 0.5


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description="PPO in CleanRL's manner.")
    for field in dataclasses.fields(Args):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    return Args(**vars(parser.parse_args()))


def make_envs(args: Args) -> gymnasium.vector.VectorEnv:
    mode = AutoresetMode[args.autoreset]
    if args.vector == "gymnasium":
        makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
        return AsyncVectorEnv(makers, autoreset_mode=mode)
    restart = RestartPolicy.always(backoff=0.0)
    return BusVectorEnv([args.env_id] * args.num_envs, autoreset_mode=mode, restart=restart)


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, envs: gymnasium.vector.VectorEnv) -> None:
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        space = envs.single_action_space
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))

        def body() -> list[nn.Module]:
            return [layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh()]

        self.critic = nn.Sequential(*body(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(*body(), layer(64, outputs, 0.01))
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def get_value(self, obs):
        return self.critic(obs)[..., 0]

    def get_distribution(self, obs):
        found = self.actor(obs)
        if self.discrete:
            return Categorical(logits=found)
        return Independent(Normal(found, self.log_std.exp()), 1)


def cut_off(infos: dict, num_envs: int) -> np.ndarray:
    """Whose step a fault has ended: their returns are not those of whole episodes."""
    infos = infos.get("final_info", infos)
    return infos.get("_fault", np.zeros(num_envs, bool))


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    envs = make_envs(args)
    same_step = args.autoreset == "SAME_STEP"
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    logprobs, rewards, values, final_values = (torch.zeros(shape) for _ in range(4))
    terminated, done, counts = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))

    returns = deque(maxlen=100)
    episode_return = np.zeros(args.num_envs)
    faults, killed, began = 0, 0, time.monotonic()
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.as_tensor(next_obs, dtype=torch.float32)
    next_done = np.zeros(args.num_envs, bool)
    steps_per_update = args.num_steps * args.num_envs

    for update in range(args.total_steps // steps_per_update):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - update * steps_per_update / args.total_steps)
        for t in range(args.num_steps):
            obs[t] = next_obs
            # NEXT_STEP: the step after an end ignores its action, and brings a first observation.
            # Nothing can be learnt from it, nor from what a fault adds before that observation.
            counts[t] = torch.as_tensor(~next_done | same_step)
            with torch.no_grad():
                distribution = agent.get_distribution(next_obs)
                action = distribution.sample()
                logprobs[t] = distribution.log_prob(action)
                values[t] = agent.get_value(next_obs)
            actions[t] = action
            sent = action.numpy()
            if not agent.discrete:
                space = envs.single_action_space
                sent = sent.clip(space.low, space.high)
            found, reward, terminations, truncations, infos = envs.step(sent)
            next_done = terminations | truncations
            rewards[t] = torch.as_tensor(reward)
            terminated[t], done[t] = torch.as_tensor(terminations), torch.as_tensor(next_done)
            if same_step and next_done.any():
                # The row holds the first observation of the next episode; the last one is apart.
                last = np.stack([infos["final_obs"][i] for i in np.flatnonzero(next_done)])
                with torch.no_grad():
                    last_values = agent.get_value(torch.as_tensor(last, dtype=torch.float32))
                final_values[t, torch.as_tensor(next_done)] = last_values
            next_obs = torch.as_tensor(found, dtype=torch.float32)

            episode_return += reward
            faulty = cut_off(infos, args.num_envs)
            faults += int(faulty.sum())
            ended = next_done & ~faulty & counts[t].numpy()
            returns.extend(episode_return[ended].tolist())
            episode_return[next_done] = 0.0
            if args.kill_every and time.monotonic() - began > (killed + 1) * args.kill_every:
                pids = envs.actor_pids()
                if pids:
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)
                killed += 1

        # A truncated episode goes on behind its last observation: its value counts.
        with torch.no_grad():
            advantages = torch.zeros(shape)
            advantage = torch.zeros(args.num_envs)
            following = agent.get_value(next_obs)
            for t in reversed(range(args.num_steps)):
                after = torch.where(done[t], final_values[t], following) if same_step else following
                delta = rewards[t] + args.gamma * after * ~terminated[t] - values[t]
                advantage = delta + args.gamma * args.gae_lambda * ~done[t] * advantage
                advantages[t], following = advantage, values[t]
            targets = advantages + values

        rows = counts.flatten().nonzero()[:, 0]
        flat = [part.flatten(0, 1)[rows] for part in (obs, actions, logprobs, advantages, targets)]
        for _ in range(args.epochs):
            for part in torch.randperm(len(rows)).chunk(args.minibatches):
                b_obs, b_actions, b_logprobs, b_advantages, b_targets = (x[part] for x in flat)
                distribution = agent.get_distribution(b_obs)
                ratio = (distribution.log_prob(b_actions) - b_logprobs).exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
                gain = torch.min(b_advantages * ratio, b_advantages * clipped).mean()
                value_loss = 0.5 * (agent.get_value(b_obs) - b_targets).square().mean()
                entropy = distribution.entropy().mean()
                loss = args.value * value_loss - gain - args.entropy * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        mean = float(np.mean(returns)) if returns else 0.0
        seconds = time.monotonic() - began
        print(f"{(update + 1) * steps_per_update:>8} steps  {seconds:6.1f} s  return {mean:7.1f}")

    restarts = envs.statistics().restarts if args.vector == "envbus" else 0
    envs.close()
    print(json.dumps({"return": mean, "restarts": restarts, "faulty_episodes": faults}))


if __name__ == "__main__":
    main()
