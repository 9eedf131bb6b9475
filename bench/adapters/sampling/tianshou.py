"""Tianshou's Collector.

Options: `envs`: "dummy" (one process), "shmem" (one process per env, observations in shared
memory), or "async": the AsyncCollector, which goes on as soon as one env is ready.
"""

from __future__ import annotations

from typing import Any

import torch
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import AsyncCollector, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, ShmemVectorEnv
from tianshou.utils.net.discrete import AbstractDiscreteActor

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.networks import num_inputs, torch_net
from envbus.bench.adapters.sampling.collecting import Collecting, fragment_of
from envbus.bench.adapters.workloads import env_fns, make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("tianshou", "torch", "gymnasium", "numpy")


class TianshouActor(AbstractDiscreteActor):
    """The common network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs)
        self.net = torch_net(inputs, outputs)

    def get_preprocess_net(self) -> Any:
        return torch.nn.Identity()

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:  # noqa: ARG002
        return self.net(torch.as_tensor(obs)), state


class TianshouCollecting(Collecting):
    """Collects into an empty buffer, as on-policy training does, but for the asynchronous one."""

    def __init__(self, opening: Opening) -> None:
        fns = env_fns(opening.workload, opening.num_envs)
        kind = opening.options["envs"]
        if kind == "dummy":
            envs: Any = DummyVectorEnv(fns)
        else:
            envs = ShmemVectorEnv(fns, wait_num=1 if kind == "async" else None)
        env = make_env(opening.workload)
        inputs, outputs = num_inputs(env.observation_space), int(env.action_space.n)
        policy = ProbabilisticActorPolicy(
            actor=TianshouActor(inputs, outputs),
            dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
            action_space=env.action_space,
            action_scaling=False,
            action_bound_method=None,
        )
        self._steps = fragment_of(opening.workload) * opening.num_envs
        #: It keeps steps under way from one fragment to the next, for which their rows must stay.
        self._goes_on = kind == "async"
        buffer = VectorReplayBuffer(self._steps * (4 if self._goes_on else 1), opening.num_envs)
        make = AsyncCollector if kind == "async" else Collector
        self._collector = make(policy, envs, buffer)
        self._collector.reset()
        self.collect()

    def collect(self) -> int:
        if not self._goes_on:
            self._collector.reset_buffer(keep_statistics=True)
        return int(self._collector.collect(n_step=self._steps).n_collected_steps)

    def close(self) -> None:
        self._collector.close()


def open_stepper(opening: Opening) -> Collecting:
    return TianshouCollecting(opening)
