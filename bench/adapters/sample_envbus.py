"""envbus's EnvRunner.

Options: `policy`: "numpy", "torch", or "burn", which costs as much per row as a step of `burn`
does; `num_actors` as in `envbus_vector.py`; `config`: more
settings of `RunnerConfig`; `vectorized=False` among them asks for the general path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.collecting import Collecting, fragment_of
from envbus.bench.adapters.envbus_vector import DISTRIBUTIONS as _DISTRIBUTIONS
from envbus.bench.adapters.envbus_vector import actors_of
from envbus.bench.networks import NumpyNet, num_inputs, torch_net
from envbus.bench.workloads import BURN_SECONDS, env_fns, is_multi_agent
from envbus.runner import ActorPool, EnvRunner, Policy, PolicyOutput, RunnerConfig
from envbus.runner.adapters.torch_policy import TorchPolicy

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = (*_DISTRIBUTIONS, "torch")


class NumpyPolicy(Policy):
    """The common network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._net = NumpyNet(inputs, outputs)

    def compute_actions(
        self,
        observations: Any,
        states: Any,
        *,
        explore: bool = True,  # noqa: ARG002 - always sampled
    ) -> PolicyOutput:
        actions, logp = self._net.act(observations)
        return PolicyOutput(actions, states, {"action_logp": logp})


class BurningPolicy(Policy):
    """Burns `BURN_SECONDS` of CPU time per row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        del inputs, outputs

    def compute_actions(
        self,
        observations: Any,
        states: Any,
        *,
        explore: bool = True,  # noqa: ARG002 - there is no choice
    ) -> PolicyOutput:
        end = time.thread_time() + BURN_SECONDS * len(observations)
        while time.thread_time() < end:
            pass
        return PolicyOutput(np.zeros(len(observations), np.int64), states)


def torch_policy(inputs: int, outputs: int) -> Policy:
    """Return the common network in PyTorch."""
    import torch  # only where it is asked for

    net = torch_net(inputs, outputs)

    class Acting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def act(self, observations: Any, states: Any, explore: bool) -> Any:  # noqa: ARG002
            logps = self.net(observations).log_softmax(1)
            # The largest of probabilities over exponential noise is a sample.
            actions = (logps.exp() / torch.empty_like(logps).exponential_()).argmax(1, keepdim=True)
            return actions[:, 0], states, {"action_logp": logps.gather(1, actions)[:, 0]}

    return TorchPolicy(Acting())


class RunnerCollecting(Collecting):
    """Fragments of `sample()`."""

    def __init__(self, runner: EnvRunner) -> None:
        self._runner = runner
        runner.sample()

    def collect(self) -> int:
        return self._runner.sample().env_steps

    def close(self) -> None:
        self._runner.stop()


def open_stepper(opening: Opening) -> Collecting:
    several = is_multi_agent(opening.workload)
    pool = ActorPool(
        env_fns(opening.workload, opening.num_envs),
        num_actors=actors_of(opening),
        autoreset_mode="Disabled" if several else "NextStep",
    )
    agent_id = min(map(str, pool.get_agent_ids())) if several else None
    spaces: tuple[Any, Any] = (
        (pool.single_observation_space, pool.single_action_space)
        if agent_id is None
        else (pool.get_observation_space(agent_id), pool.get_action_space(agent_id))
    )
    inputs, outputs = num_inputs(spaces[0]), int(spaces[1].n)
    makers: dict[str, Callable[[int, int], Policy]] = {
        "numpy": NumpyPolicy,
        "torch": torch_policy,
        "burn": BurningPolicy,
    }
    make = makers[opening.options["policy"]]
    config = RunnerConfig(
        rollout_fragment_length=fragment_of(opening.workload),
        seed=0,
        **opening.options.get("config", {}),
    )
    return RunnerCollecting(EnvRunner(pool, make(inputs, outputs), config))
