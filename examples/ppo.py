"""PPO in one file, through `EnvRunner`: CartPole-v1 and Pendulum-v1 on two cores in a minute.

    pip install torch
    python examples/ppo.py --seed 1
    python examples/ppo.py --env Pendulum-v1 --plot pendulum.svg
    python examples/ppo.py --kill-every 3
    python examples/ppo.py --policy-workers 2

Other envs with observations of one Box and with Discrete or Box actions work, too; what they need
to be learnt well is up to you. After J. Schulman et al., "Proximal Policy Optimization
Algorithms", 2017 (https://arxiv.org/abs/1707.06347), with the details of CleanRL's `ppo.py` and
`ppo_continuous_action.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal

import gymnasium
import numpy as np
import torch
from curves import Curve, add_curve_options
from gymnasium.spaces import Discrete
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from envbus.runner import ActorPool, EnvRunner, PolicyWorkers, RestartPolicy, RunnerConfig
from envbus.runner.adapters.torch_policy import TorchPolicy
from envbus.runner.batches import SampleBatch, add_gae
from envbus.runner.policies import ClipActions, Normalize

BOX = {"num_envs": 16, "num_steps": 128, "minibatch": 128, "entropy": 0.0}
#: What differs from the options' defaults.
PRESETS = {
    "CartPole-v1": {"target": 475.0, "total_steps": 400_000},
    "Pendulum-v1": {"target": -200.0, "total_steps": 600_000, "gamma": 0.9, **BOX},
    "InvertedPendulum-v5": {"target": 950.0, "total_steps": 600_000, **BOX},
}


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic, 64 tanh units in two layers each. Box actions are Gaussian."""

    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        super().__init__()
        (inputs,) = observation_space.shape
        self.discrete = isinstance(action_space, Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        hidden = lambda: [layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh()]  # noqa: E731
        self.actor = nn.Sequential(*hidden(), layer(64, outputs, 0.01))
        self.log_std = nn.Parameter(torch.zeros(0 if self.discrete else outputs))
        self.critic = nn.Sequential(*hidden(), layer(64, 1, 1.0))

    def choices(self, observations: torch.Tensor) -> Distribution:
        logits_or_means = self.actor(observations)
        if self.discrete:
            return Categorical(logits=logits_or_means)
        return Independent(Normal(logits_or_means, self.log_std.exp()), 1)

    def value(self, observations: torch.Tensor) -> torch.Tensor:
        return self.critic(observations)[:, 0]

    def act(self, observations, states, explore):
        chosen = self.choices(observations)
        actions = chosen.sample() if explore else chosen.mode
        extras = {"action_logp": chosen.log_prob(actions), "vf_preds": self.value(observations)}
        return actions, states, extras


def make_policy(agent: Agent) -> TorchPolicy:
    torch.set_num_threads(1)  # networks are small, and cores are for the envs
    return TorchPolicy(agent)


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, batch: SampleBatch, args: argparse.Namespace
) -> None:
    """Improve the agent by what it did. `args` are those of `add_ppo_options`."""

    def value_fn(observations: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return agent.value(torch.as_tensor(observations)).numpy()

    # Truncated episodes go on behind their last observation: its value counts.
    batch = add_gae(batch, value_fn, gamma=args.gamma, gae_lambda=args.gae_lambda)
    learnt_from = batch["loss_mask"]
    if "off_policy" in batch.columns:  # what a player has done is no action of this policy
        learnt_from = learnt_from & ~batch["off_policy"]
    batch = batch[learnt_from]
    names = ("obs", "actions", "action_logp", "advantages", "value_targets")
    data = [torch.as_tensor(np.array(batch[name])) for name in names]
    for _ in range(args.epochs):
        for rows in torch.randperm(len(batch)).split(args.minibatch):
            obs, actions, old_logp, advantages, targets = (part[rows] for part in data)
            chosen = agent.choices(obs)
            ratio = (chosen.log_prob(actions) - old_logp).exp()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.min(advantages * ratio, advantages * clipped).mean()
            value_loss = 0.5 * (agent.value(obs) - targets).square().mean()
            loss = 0.5 * value_loss - gain - args.entropy * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            # Apart, as large errors of the critic would otherwise stop the actor.
            nn.utils.clip_grad_norm_(agent.critic.parameters(), 0.5)
            nn.utils.clip_grad_norm_([*agent.actor.parameters(), agent.log_std], 0.5)
            optimizer.step()


def kill_one_every(seconds: float, pool: ActorPool, seed: int) -> None:
    """Have the system interrupt this process regularly, which then kills one of its actors."""
    rng = np.random.default_rng(seed)

    def kill(*_: object) -> None:
        if pids := pool.actor_pids():
            # The pool hears of it when it is used next, and the same one may be chosen until then.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rng.choice(pids)), signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def add_ppo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=32, help="per env and update")
    parser.add_argument("--total-steps", type=int, default=1_000_000, help="at the most")
    parser.add_argument("--target", type=float, help="mean of 100 episodes at which it stops")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="goes down to 0")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.01, help="weight of the bonus")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatch", type=int, default=256)
    add_curve_options(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO through envbus.")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--kill-every", type=float, help="seconds: kill -9 of an actor at random")
    parser.add_argument("--policy-workers", type=int, default=0, help="processes that choose")
    add_ppo_options(parser)
    parser.set_defaults(**PRESETS.get(parser.parse_args().env, {}))
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    pool = ActorPool(
        [args.env] * args.num_envs,
        restart=RestartPolicy.always(backoff=0.0),
    )
    normalize = Normalize(pool.single_observation_space)
    agent = Agent(normalize.space, pool.single_action_space)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    config = RunnerConfig(
        rollout_fragment_length=args.num_steps,
        min_envs=args.num_envs,
        observation_connector=normalize,
        action_connector=ClipActions(pool.single_action_space),
        seed=args.seed,
    )
    curve, steps, faulty = Curve(args), 0, 0
    policy = local = make_policy(agent)
    workers = contextlib.nullcontext()
    if args.policy_workers:
        make = functools.partial(make_policy, agent)
        workers = PolicyWorkers(make, args.policy_workers, preload=["torch"])
        policy = workers.policy()
    with workers, EnvRunner(pool, policy, config) as runner:
        if args.kill_every:
            kill_one_every(args.kill_every, pool, args.seed)
        while steps < args.total_steps:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1.0 - steps / args.total_steps)
            sample = runner.sample()
            steps += sample.env_steps
            faulty += sum(episode.faulty for episode in sample.episodes)
            curve.add(steps, (one.episode_return for one in sample.episodes if not one.faulty))
            if curve.solved:
                break
            if not sample.agent_steps:  # all actors were killed meanwhile
                continue
            update(agent, optimizer, sample.single(), args)
            policy.set_weights(local.get_weights())

        signal.setitimer(signal.ITIMER_REAL, 0.0)
        normalize.update = False
        episodes = runner.sample(num_episodes=100, explore=False).episodes
        best = float(np.mean([one.episode_return for one in episodes if not one.faulty]))
        restarts = pool.statistics().restarts
    curve.end(best_actions=best, restarts=restarts, faulty_episodes=faulty)


if __name__ == "__main__":
    main()
