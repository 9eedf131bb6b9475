"""SAC in one file, in CleanRL's manner: a plain loop over a vector env, and a replay buffer.

    pip install torch
    python examples/cleanrl_sac.py
    python examples/cleanrl_sac.py --autoreset SAME_STEP --kill-every 3
    python examples/cleanrl_sac.py --vector gymnasium

With `--vector gymnasium` the very same loop runs over a vector env of Gymnasium: `make_envs` is all
that differs. After T. Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018
(https://arxiv.org/abs/1812.05905).
"""

from __future__ import annotations

import argparse
import copy
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

from envbus.runner import BusVectorEnv, RestartPolicy


@dataclasses.dataclass
class Args:
    env_id: str = "Pendulum-v1"
    vector: str = "envbus"  # or "gymnasium"
    autoreset: str = "NEXT_STEP"  # or "SAME_STEP"
    kill_every: float = 0.0  # seconds: kill -9 of an actor at random; 0: never
    seed: int = 1
    total_steps: int = 20_000
    num_envs: int = 4
    buffer_size: int = 100_000
    learning_starts: int = 1_000
    updates: int = 2  # per step of all envs
    batch_size: int = 256
    hidden: int = 128
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description="SAC in CleanRL's manner.")
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


def network(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, outputs))


class Actor(nn.Module):
    def __init__(self, envs: gymnasium.vector.VectorEnv, hidden: int) -> None:
        super().__init__()
        space = envs.single_action_space
        self.net = network(envs.single_observation_space.shape[0], 2 * space.shape[0], hidden)
        self.register_buffer("scale", torch.as_tensor((space.high - space.low) / 2))
        self.register_buffer("bias", torch.as_tensor((space.high + space.low) / 2))

    def forward(self, obs):
        mean, log_std = self.net(obs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        squashed = raw.tanh()
        log_prob = normal.log_prob(raw) - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, log_prob.sum(-1)


class Critic(nn.Module):
    def __init__(self, envs: gymnasium.vector.VectorEnv, hidden: int) -> None:
        super().__init__()
        inputs = envs.single_observation_space.shape[0] + envs.single_action_space.shape[0]
        self.nets = nn.ModuleList(network(inputs, 1, hidden) for _ in range(2))

    def forward(self, obs, actions):
        return torch.stack([net(torch.cat([obs, actions], -1))[:, 0] for net in self.nets])


class Buffer:
    """The last transitions, each with the observation that its own episode has gone on with."""

    def __init__(self, size: int, envs: gymnasium.vector.VectorEnv) -> None:
        obs_shape = envs.single_observation_space.shape
        self.obs, self.next_obs = (np.zeros((size, *obs_shape), np.float32) for _ in range(2))
        self.actions = np.zeros((size, *envs.single_action_space.shape), np.float32)
        self.rewards, self.terminated = (np.zeros(size, np.float32) for _ in range(2))
        self.columns = (self.obs, self.actions, self.rewards, self.next_obs, self.terminated)
        self.size, self.total = size, 0

    def add(self, *columns: np.ndarray) -> None:
        rows = (self.total + np.arange(len(columns[0]))) % self.size
        for column, new in zip(self.columns, columns, strict=True):
            column[rows] = new
        self.total += len(rows)

    def sample(self, number: int, rng: np.random.Generator) -> list[torch.Tensor]:
        rows = rng.integers(min(self.total, self.size), size=number)
        return [torch.from_numpy(column[rows]) for column in self.columns]


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
    envs.action_space.seed(args.seed)
    same_step = args.autoreset == "SAME_STEP"
    actor, critic = Actor(envs, args.hidden), Critic(envs, args.hidden)
    target = copy.deepcopy(critic)
    log_alpha = torch.zeros(1, requires_grad=True)
    target_entropy = -float(np.prod(envs.single_action_space.shape))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=args.learning_rate)
    buffer = Buffer(args.buffer_size, envs)

    returns = deque(maxlen=20)
    episode_return = np.zeros(args.num_envs)
    faults, killed, began, critic_loss = 0, 0, time.monotonic(), torch.zeros(())
    obs, _ = envs.reset(seed=args.seed)
    done = np.zeros(args.num_envs, bool)

    for step in range(args.total_steps // args.num_envs):
        if step * args.num_envs < args.learning_starts:
            actions = envs.action_space.sample()
        else:
            with torch.no_grad():
                actions = actor(torch.as_tensor(obs, dtype=torch.float32))[0].numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        # NEXT_STEP: the step after an end ignores its action, and brings a first observation: it is
        # no transition. Nor is what a fault adds before that observation.
        counts = ~done | same_step
        done = terminations | truncations
        last_obs = next_obs
        if same_step and done.any():
            # The row holds the first observation of the next episode; the last one is apart.
            last_obs = next_obs.copy()
            for i in np.flatnonzero(done):
                last_obs[i] = infos["final_obs"][i]
        faulty = cut_off(infos, args.num_envs)
        # What a fault has cut off has no next observation and no reward.
        stored = counts & ~faulty
        # Only termination ends the sum of rewards; a truncated episode has a value behind it.
        transitions = (obs, actions, rewards, last_obs, terminations)
        buffer.add(*(column[stored] for column in transitions))
        obs = next_obs

        episode_return += rewards
        faults += int(faulty.sum())
        returns.extend(episode_return[done & stored].tolist())
        episode_return[done] = 0.0
        if args.kill_every and time.monotonic() - began > (killed + 1) * args.kill_every:
            pids = envs.actor_pids()
            if pids:
                os.kill(int(rng.choice(pids)), signal.SIGKILL)
            killed += 1

        if step * args.num_envs < args.learning_starts:
            continue
        for _ in range(args.updates):
            b_obs, b_actions, b_rewards, b_next, b_terminated = buffer.sample(args.batch_size, rng)
            alpha = log_alpha.exp().detach()
            with torch.no_grad():
                next_actions, next_logprobs = actor(b_next)
                next_value = target(b_next, next_actions).min(0).values - alpha * next_logprobs
                wanted = b_rewards + args.gamma * (1 - b_terminated) * next_value
            critic_loss = (critic(b_obs, b_actions) - wanted).square().mean(1).sum()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            chosen, logprobs = actor(b_obs)
            actor_loss = (alpha * logprobs - critic(b_obs, chosen).min(0).values).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            alpha_loss = -(log_alpha.exp() * (logprobs.detach() + target_entropy)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, args.tau)
        if step % 250 == 0:
            mean = float(np.mean(returns)) if returns else float("nan")
            seconds = time.monotonic() - began
            print(f"{step * args.num_envs:>8} steps  {seconds:6.1f} s  return {mean:8.1f}")

    restarts = envs.statistics().restarts if args.vector == "envbus" else 0
    envs.close()
    found = {
        "return": float(np.mean(returns)) if returns else None,
        "critic_loss": float(critic_loss.detach()),
        "transitions": buffer.total,
        "restarts": restarts,
        "faulty_episodes": faults,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
