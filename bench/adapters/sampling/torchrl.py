"""TorchRL's collectors.

Options: `collector`: "sync" (envs one after the other in this process), "parallel" (one process
per env), "vector" (Gymnasium's SyncVectorEnv below TorchRL's wrapper), or "multi": two collector
processes with half of the envs each, likewise.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.networks import num_inputs, torch_net
from envbus.bench.adapters.sampling.collecting import Collecting, fragment_of
from envbus.bench.adapters.workloads import make_env

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("torchrl", "tensordict", "torch", "gymnasium", "numpy")


def wrapped(workload: str, index: int) -> Any:
    """Return one env in TorchRL's form."""
    torch.set_num_threads(1)
    return GymWrapper(make_env(workload, index), categorical_action_encoding=True)


def one_by_one(workload: str, indices: list[int]) -> Any:
    """Return envs that are stepped in one process."""
    return SerialEnv(len(indices), [functools.partial(wrapped, workload, i) for i in indices])


def in_gymnasium(workload: str, indices: list[int]) -> Any:
    """Return envs in Gymnasium's SyncVectorEnv below TorchRL's wrapper."""
    torch.set_num_threads(1)
    envs = gym.vector.SyncVectorEnv(
        [functools.partial(make_env, workload, index) for index in indices],
        copy=False,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    return GymWrapper(envs, categorical_action_encoding=True)


def policy_for(workload: str) -> Any:
    """Return the common network as TorchRL takes it."""
    env = make_env(workload)
    net = torch_net(num_inputs(env.observation_space), int(env.action_space.n))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


class TorchrlCollecting(Collecting):
    """Takes batches off a collector."""

    def __init__(self, opening: Opening) -> None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        workload, num_envs = opening.workload, opening.num_envs
        frames = fragment_of(workload) * num_envs
        kind = opening.options["collector"]
        common: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
        if kind == "multi":
            halves = [list(range(num_envs))[part::2] for part in (0, 1)]
            makers = [functools.partial(in_gymnasium, workload, half) for half in halves]
            self._collector: Any = MultiSyncCollector(
                makers, policy_for(workload), cat_results="stack", **common
            )
        else:
            self._collector = Collector(self._env(kind, opening), policy_for(workload), **common)
        self._batches = iter(self._collector)
        self.collect()

    def _env(self, kind: str, opening: Opening) -> Any:
        workload, num_envs = opening.workload, opening.num_envs
        if kind == "vector":
            return in_gymnasium(workload, list(range(num_envs)))
        if kind == "parallel":
            makers = [functools.partial(wrapped, workload, i) for i in range(num_envs)]
            return ParallelEnv(num_envs, makers, mp_start_method="fork")
        return one_by_one(workload, list(range(num_envs)))

    def collect(self) -> int:
        return int(next(self._batches).numel())

    def close(self) -> None:
        self._collector.shutdown()


def open_stepper(opening: Opening) -> Collecting:
    return TorchrlCollecting(opening)
