"""PPO for several agents, through `EnvRunner`: PettingZoo's simple_spread in some minutes.

    pip install torch mpe2
    python examples/multi_agent_ppo.py --seed 1
    python examples/multi_agent_ppo.py --env mpe2.simple_speaker_listener_v4:parallel_env

Agents with equal spaces share one policy, and are trained by what all of them have seen: in
simple_spread there is one policy for three agents, in simple_speaker_listener there are two
policies. `--separate`: one per agent. Each agent's reward is what it is given, and the curve is the
sum over the agents of an episode. Agent and update are those of `ppo.py`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from curves import Curve
from ppo import Agent, add_ppo_options, make_policy, update

from envbus.runner import ActorPool, EnvRunner, RunnerConfig
from envbus.runner.policies import ClipActions, Normalize

SPREAD = "mpe2.simple_spread_v3:parallel_env"


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO for several agents through envbus.")
    parser.add_argument("--env", default=SPREAD, help="import path of a PettingZoo env")
    parser.add_argument("--separate", action="store_true", help="a policy per agent")
    add_ppo_options(parser)
    parser.set_defaults(num_steps=50, gamma=0.95, minibatch=512, total_steps=400_000)
    if parser.parse_args().env == SPREAD:
        parser.set_defaults(target=-50.0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    pool = ActorPool([args.env] * args.num_envs, autoreset_mode="Disabled")
    spaces = {
        agent_id: (pool.get_observation_space(agent_id), pool.get_action_space(agent_id))
        for agent_id in sorted(pool.get_agent_ids())
    }
    # A policy is called after the first agent that it is for.
    policy_of = {
        agent_id: agent_id if args.separate else min(a for a in spaces if spaces[a] == own)
        for agent_id, own in spaces.items()
    }
    policy_ids = sorted(set(policy_of.values()))
    normalize = {policy_id: Normalize(spaces[policy_id][0]) for policy_id in policy_ids}
    agents = {
        policy_id: Agent(normalize[policy_id].space, spaces[policy_id][1])
        for policy_id in policy_ids
    }
    optimizers = {
        policy_id: torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        for policy_id, agent in agents.items()
    }
    config = RunnerConfig(
        rollout_fragment_length=args.num_steps,
        min_envs=args.num_envs,
        policy_mapping_fn=lambda agent_id, _: policy_of[agent_id],
        observation_connector=normalize,
        action_connector={name: ClipActions(spaces[name][1]) for name in policy_ids},
        seed=args.seed,
    )
    policies = {policy_id: make_policy(agent) for policy_id, agent in agents.items()}
    curve, steps = Curve(args), 0
    with EnvRunner(pool, policies, config) as runner:

        def evaluate(*, explore: bool) -> float:
            episodes = runner.sample(num_episodes=100, explore=explore).episodes
            return float(np.mean([episode.episode_return for episode in episodes]))

        untrained = evaluate(explore=True)  # nearly uniform
        while steps < args.total_steps:
            sample = runner.sample()
            steps += sample.env_steps
            curve.add(steps, (episode.episode_return for episode in sample.episodes))
            if curve.solved:
                break
            for policy_id, agent in agents.items():
                for group in optimizers[policy_id].param_groups:
                    group["lr"] = args.learning_rate * (1.0 - steps / args.total_steps)
                update(agent, optimizers[policy_id], sample[policy_id], args)

        for one in normalize.values():
            one.update = False
        best = evaluate(explore=False)
    curve.end(best_actions=best, untrained=untrained, policies=len(policies))


if __name__ == "__main__":
    main()
