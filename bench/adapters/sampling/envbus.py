"""envbus's EnvRunner.

Options: `policy`: "numpy", "torch", or "burn", which costs as much per row as a step of `burn`
does; `num_actors` as in `envbus_vector.py`; `config`: more settings of `RunnerConfig`;
`vectorized=False` among them asks for the general path; `runners`: so many, or "num_envs", in an
`EnvRunnerGroup`, each with its envs in its own process; `asynchronous`: their fragments are taken
as they come, by `sample_async` and `collect`; `fragment`: its length, if it is not the usual one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Discrete

from envbus.bench.adapters.base import Measurement, Opening, Timed, measurement_of
from envbus.bench.adapters.envbus_vector import DISTRIBUTIONS as _DISTRIBUTIONS
from envbus.bench.adapters.envbus_vector import actors_of
from envbus.bench.adapters.networks import NumpyNet, num_inputs, torch_net
from envbus.bench.adapters.sampling.collecting import Collecting, Span, fragment_of, parts_within
from envbus.bench.adapters.workloads import BURN_SECONDS, env_fns, is_multi_agent
from envbus.runner import ActorPool, EnvRunner, EnvRunnerGroup, GroupConfig, RunnerConfig
from envbus.runner.adapters.torch_policy import TorchPolicy
from envbus.runner.policies import Policy, PolicyOutput

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
    return TorchPolicy(torch_net(inputs, outputs), Discrete(outputs), seed=0)


_POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "numpy": NumpyPolicy,
    "torch": torch_policy,
    "burn": BurningPolicy,
}


class EnvbusCollecting(Collecting):
    """Fragments of `sample()`."""

    def __init__(self, runner: EnvRunner | EnvRunnerGroup) -> None:
        self._runner = runner
        runner.sample()

    def collect(self) -> int:
        return self._runner.sample().env_steps

    def close(self) -> None:
        self._runner.stop()


class AsynchronousCollecting(Timed):
    """Fragments as they come; who has delivered one is asked for the next. A latency is of one."""

    def __init__(self, group: EnvRunnerGroup, fragment: int) -> None:
        self._group = group
        self._env_steps = fragment * group.num_envs // group.num_runners
        #: When each runner was asked that is at work, by its index.
        self._asked: dict[int, int] = {}
        group.sample()

    def run(self, ring: Sequence[npt.NDArray[Any]], seconds: float) -> Measurement:
        """Collect for `seconds` of wall time, from when each runner has delivered something."""
        del ring  # the policy chooses the actions
        fragments: list[Span] = []
        while len(fragments) < self._group.num_runners:
            self._ask()
            fragments += self._collect()
        clock = time.perf_counter_ns
        start = now = clock()
        end = start + int(seconds * 1e9)
        while now < end:
            self._ask()
            fragments += self._collect()
            now = clock()
        # What is under way counts, too, and ends under the same load.
        while min(self._asked.values(), default=now) < now:
            self._ask()
            fragments += self._collect()
        while self._asked:  # the rest must not disturb who comes next
            self._collect()
        env_steps = round(self._env_steps * parts_within(fragments, start, now))
        latencies = [ended - begun for begun, ended in fragments if start <= ended <= now]
        return measurement_of(env_steps, latencies, (now - start) / 1e9)

    def close(self) -> None:
        self._group.stop()

    def _ask(self) -> None:
        asked_at = time.perf_counter_ns()
        self._asked |= dict.fromkeys(self._group.sample_async(), asked_at)

    def _collect(self) -> list[Span]:
        runners = self._group.collect().runners
        now = time.perf_counter_ns()
        return [(self._asked.pop(runner), now) for runner in runners]


def open_stepper(opening: Opening) -> Timed:
    options = opening.options
    config = RunnerConfig(
        rollout_fragment_length=options.get("fragment", fragment_of(opening.workload)),
        seed=0,
        **options.get("config", {}),
    )
    envs = env_fns(opening.workload, opening.num_envs)
    settings: dict[str, Any] = {
        "autoreset_mode": "Disabled" if is_multi_agent(opening.workload) else "NextStep"
    }
    runners = options.get("runners")
    if not runners:
        pool = ActorPool(envs, num_actors=actors_of(opening), **settings)
        return EnvbusCollecting(EnvRunner(pool, _policy_for(pool, options["policy"]), config))
    group = EnvRunnerGroup(
        opening.num_envs if runners == "num_envs" else runners,
        envs,
        config=config,
        make_policies=functools.partial(_policy_of_runner, options["policy"]),
        settings=GroupConfig(
            pool_settings={"num_actors": 0, **settings},
            preload=("torch",) if options["policy"] == "torch" else (),
        ),
    )
    if options.get("asynchronous"):
        return AsynchronousCollecting(group, config.rollout_fragment_length)
    return EnvbusCollecting(group)


def _policy_for(pool: ActorPool, name: str) -> Policy:
    """Return the policy of that name for one agent's spaces."""
    agent_id = min(pool.get_agent_ids(), key=str)
    actions: Any = pool.get_action_space(agent_id)
    return _POLICIES[name](num_inputs(pool.get_observation_space(agent_id)), int(actions.n))


def _policy_of_runner(name: str, pool: ActorPool, worker_index: int) -> Policy:
    del worker_index
    return _policy_for(pool, name)
