"""RLlib's SingleAgentEnvRunner, and its MultiAgentEnvRunner for envs with several agents.

Options: `envs`: "sync" (one process) or "async" (one process per env), as Gymnasium's vector envs.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.networks import num_inputs, torch_net
from envbus.bench.adapters.sampling.collecting import Collecting, fragment_of
from envbus.bench.adapters.workloads import TeamEnv, is_multi_agent, make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("ray", "torch", "gymnasium", "numpy")
_NAME = "envbus-bench"


class Module(TorchRLModule):
    """The common network, and nothing for values, which are not asked for while sampling."""

    def setup(self) -> None:
        self.net = torch_net(num_inputs(self.observation_space), int(self.action_space.n))

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS])}


class RllibTeamEnv(TeamEnv, MultiAgentEnv):
    """What its runner takes."""

    def __init__(self) -> None:
        MultiAgentEnv.__init__(self)
        TeamEnv.__init__(self)


class RllibCollecting(Collecting):
    """Fragments as the algorithm asks for them."""

    def __init__(self, opening: Opening) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        workload, several = opening.workload, is_multi_agent(opening.workload)
        # An env is not told its index; in a process of its own, that of the process serves.
        register_env(
            _NAME, lambda _: RllibTeamEnv() if several else make_env(workload, os.getpid())
        )
        config = (
            PPOConfig()
            .environment(_NAME)
            .framework("torch")
            .debugging(seed=0)
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=opening.num_envs,
                rollout_fragment_length=fragment_of(workload),
                gym_env_vectorize_mode=opening.options["envs"],
                batch_mode="truncate_episodes",
            )
            .rl_module(rl_module_spec=RLModuleSpec(module_class=Module))
        )
        if several:
            config.multi_agent(policies={"p0"}, policy_mapping_fn=lambda *_, **__: "p0")
            config.rl_module(
                rl_module_spec=MultiRLModuleSpec(
                    rl_module_specs={"p0": RLModuleSpec(module_class=Module)}
                )
            )
        make = MultiAgentEnvRunner if several else SingleAgentEnvRunner
        self._runner: Any = make(config=config)
        self._steps = fragment_of(workload) * opening.num_envs
        self.collect()

    def collect(self) -> int:
        episodes = self._runner.sample(num_timesteps=self._steps, random_actions=False)
        return sum(len(episode) for episode in episodes)

    def close(self) -> None:
        self._runner.stop()


def open_stepper(opening: Opening) -> Collecting:
    return RllibCollecting(opening)


gym.logger.min_level = gym.logger.ERROR
