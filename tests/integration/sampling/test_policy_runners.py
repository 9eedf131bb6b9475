"""Runners that take their actions from policy workers: here, and in processes of their own."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.inference.policy_connections import PolicyConnections
from envbus.runner.inference.policy_protocol import ChooseActions
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.inference.remote_policy import RemotePolicy
from envbus.runner.policies.connectors import Flatten
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.envs import SpaceEnv
from tests.integration.group_children import Driver
from tests.integration.policies_under_test import Probe, make_probe
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here"),
    pytest.mark.timeout(120),
]

PIXELS = spaces.Box(0.0, np.arange(84 * 84 * 4, dtype=np.float32).reshape(4, 84, 84))
COUNTING = [functools.partial(CountingEnv, 7)] * 4


class Greedy(MlpPolicy):
    """The best action, so that equal observations have equal actions."""

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        del explore
        return super().compute_actions(observations, states, explore=False)


class Remembers(Policy):
    """Its state is the sum of the observations of the episode so far."""

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        del explore
        total = states + observations.reshape(len(observations), -1)[:, :1]
        return PolicyOutput(np.zeros(len(observations), np.int64), total)

    def initial_state(self) -> Any:
        return np.zeros(1)


class Versioned(Policy):
    """Says which weights it has in a column of its own; those of worker `deaf` stay old."""

    def __init__(self, index: int, deaf: int) -> None:
        self._takes = index != deaf

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        del explore
        count = len(observations)
        said = np.full(count, self.policy_version)
        return PolicyOutput(np.zeros(count, np.int64), states, {"said": said})

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        if not self._takes:
            raise ValueError("no weights for me")
        super().set_weights(weights, version)


def runner_of(policy: Any, envs: Any = COUNTING, **settings: Any) -> EnvRunner:
    pool_settings = {
        name: settings.pop(name) for name in ("shared_memory", "autoreset_mode") if name in settings
    }
    return EnvRunner(ActorPool(envs, **pool_settings), policy, RunnerConfig(seed=0, **settings))


def columns_of(runner: EnvRunner, steps: int) -> dict[str, Any]:
    try:
        return dict(runner.sample(num_env_steps=steps, timeout=60.0).single().columns)
    finally:
        runner.stop()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared_memory": False},
        {"pipelined": True},
        {"autoreset_mode": "Disabled", "vectorized": False},
    ],
    ids=["shared rows", "messages", "pipelined", "by env and agent"],
)
def test_a_runner_samples_the_same_as_with_the_policy_in_its_process(
    settings: dict[str, Any],
) -> None:
    envs = ["CartPole-v1"] * 4
    with ActorPool(envs[:1]) as pool:
        of_env = pool.single_observation_space, pool.single_action_space

    def make() -> Greedy:
        return Greedy(*of_env, seed=3)

    with PolicyWorkers(make, 2, share_from=0) as workers:
        remote = columns_of(runner_of(workers.policy(), envs, **settings), 80)
    local = columns_of(runner_of(make(), envs, **settings), 80)
    assert remote.keys() == local.keys()
    for name, column in local.items():
        if name not in ("action_logp", "vf_preds"):  # sums of other batches may round otherwise
            assert np.array_equal(remote[name], column), name
        else:
            assert np.allclose(remote[name], column, atol=1e-5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("settings", "of_workers", "shared"),
    [
        ({}, {"share_from": 0}, True),
        ({"shared_memory": False}, {"share_from": 0}, False),
        (
            {"observation_connector": Flatten(CountingEnv(7).observation_space)},
            {"share_from": 0},
            False,
        ),
        ({}, {}, False),
    ],
    ids=[
        "shared memory",
        "no shared memory",
        "observations that a connector changes",
        "small ones",
    ],
)
def test_observations_go_from_actor_to_worker_through_shared_memory(
    settings: dict[str, Any],
    of_workers: dict[str, Any],
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ChooseActions] = []
    ask = PolicyConnections.ask

    def spy(self: PolicyConnections, to: str, request: Any, timeout: float) -> Any:
        if isinstance(request, ChooseActions):
            asked.append(request)
        return ask(self, to, request, timeout)

    monkeypatch.setattr(PolicyConnections, "ask", spy)
    with PolicyWorkers(Remembers, **of_workers) as workers:
        columns = columns_of(runner_of(workers.policy(), **settings), 64)
    assert asked
    for request in asked:
        assert bool(request.shared) == shared
        assert (request.observations.value is None) == shared
    # What the worker has seen is what the batch says.
    seen = columns["obs"].reshape(64, -1)[:, :1]
    assert np.array_equal(columns["state_out"], columns["state_in"] + seen)


def test_observations_of_a_large_space_are_shared_too() -> None:
    """The bounds of 4 x 84 x 84 numbers do not fit into one message at a worker's handover
    socket.
    """
    with PolicyWorkers(lambda: lambda seen: seen.reshape(len(seen), -1)[:, 0] > 0) as workers:
        policy = workers.policy()
        runner = runner_of(policy, [functools.partial(SpaceEnv, PIXELS, spaces.Discrete(2))] * 2)
        assert policy._shared
        columns = runner.sample(num_env_steps=8).single().columns
        first = columns["obs"].reshape(8, -1)[:, 0]
        assert np.array_equal(columns["actions"], first > 0)
        runner.stop()


FULL = """
import tempfile
from envbus.runner import ActorPool, EnvRunner, PolicyWorkers
from envbus.runner.policies import RandomPolicy
from gymnasium import spaces

if __name__ == "__main__":
    with PolicyWorkers(RandomPolicy(spaces.Discrete(2))) as workers, ActorPool(
        ["CartPole-v1"] * 2, num_actors=1
    ) as pool:
        tempfile.tempdir = "no such folder"  # nothing can be made there any more
        with EnvRunner(pool, workers.policy()) as runner:
            print(runner.sample(num_env_steps=8, timeout=60.0).env_steps)
"""


@pytest.mark.slow
def test_rows_are_shared_though_no_temporary_file_can_be_made(tmp_path: Path) -> None:
    with Driver(FULL, tmp_path) as driver:
        assert driver.finish()[:2] == (0, "8\n")


def test_two_pools_that_are_open_are_not_taken_for_one() -> None:
    with PolicyWorkers(Remembers, share_from=0) as workers:
        policy = workers.policy()
        first, second = runner_of(policy), runner_of(policy, [functools.partial(CountingEnv, 3)])
        for runner in (first, second, first):
            columns = runner.sample(num_env_steps=16).single().columns
            seen = columns["obs"].reshape(16, -1)[:, :1]
            assert np.array_equal(columns["state_out"], columns["state_in"] + seen)
        first.stop()
        second.stop()
        third = runner_of(policy)  # alone again
        assert policy._shared
        third.stop()


def test_the_state_of_an_episode_is_kept_by_its_runner_over_a_worker_s_end() -> None:
    often = RestartPolicy(max_restarts=20, backoff=0.01, max_backoff=0.05)
    with PolicyWorkers(Remembers, 2, restart=often) as workers:
        runner = runner_of(workers.policy())
        killed: set[int] = set()
        for _ in range(3):
            columns = runner.sample(num_env_steps=40).single().columns
            wait_until(lambda: set(workers.pids()) - killed, "a worker that lives")
            pid = min(set(workers.pids()) - killed)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            states = columns["state_in"].reshape(4, 10)
            outs = columns["state_out"].reshape(4, 10)
            begins = columns["t"].reshape(4, 10) == 0
            assert (states[begins] == 0).all()
            inside = ~begins[:, 1:]
            assert np.array_equal(states[:, 1:][inside], outs[:, :-1][inside])
        runner.stop()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("vectorized", [True, False], ids=["columns", "by env and agent"])
def test_each_row_says_which_weights_chose_its_action(vectorized: bool) -> None:
    settings: dict[str, Any] = {} if vectorized else {"autoreset_mode": "Disabled"}
    with PolicyWorkers(lambda index: Versioned(index, deaf=-1), 2) as workers:
        runner = runner_of(workers.policy(), vectorized=vectorized, **settings)
        for version in (1, 2, 3):
            workers.set_weights({})
            columns = runner.sample(num_env_steps=32).single().columns
            assert np.array_equal(columns["policy_version"], columns["said"])
            assert set(columns["said"].tolist()) <= {version - 1, version}
            assert version in columns["said"]
        runner.stop()


def test_each_row_says_so_too_when_replicas_differ() -> None:
    with PolicyWorkers(lambda index: Versioned(index, deaf=1), 2) as workers:
        workers.set_weights({}, 5)
        # Two groups of envs: two requests at a time.
        columns = columns_of(runner_of(workers.policy(), pipelined=True), 64)
        assert np.array_equal(columns["policy_version"], columns["said"])
        assert set(columns["said"].tolist()) == {0, 5}


@pytest.mark.slow
def test_runners_in_processes_of_their_own_share_the_workers() -> None:
    with (
        PolicyWorkers({"default_policy": lambda index: Versioned(index, -1)}, 2) as workers,
        EnvRunnerGroup(2, COUNTING, workers.policy(), RunnerConfig(seed=0)) as group,
    ):
        first = group.sample(num_env_steps=64, timeout=60.0).single().columns
        assert len(first["obs"]) == 64
        workers.set_weights({}, 9)
        os.kill(workers.pids()[0], signal.SIGKILL)
        group.sample(num_env_steps=64, timeout=60.0)
        later = group.sample(num_env_steps=64, timeout=60.0).single().columns
        assert set(later["policy_version"].tolist()) == {9}
        assert np.array_equal(later["policy_version"], later["said"])
        assert workers.statistics().policies["default_policy"].rows > 0


def test_a_runner_leaves_weights_alone_that_another_process_sets() -> None:
    with (
        PolicyWorkers(make_probe) as workers,
        ActorPool(COUNTING, autoreset_mode="Disabled") as pool,
    ):
        policies = {"local": Probe(), "remote": workers.handle().policy()}
        config = RunnerConfig(policy_mapping_fn=lambda agent_id, episode: "local")
        runner = EnvRunner(pool, policies, config)
        state = runner.get_state()
        assert list(state["policies"]) == ["local"]
        runner.set_state(state)
        weights = {name: {"offset": 1.0} for name in policies}
        with pytest.raises(ConfigError, match=r"'remote' .*PolicyWorkers\.set_weights"):
            runner.set_weights(weights)
        both = {name: (one, 5) for name, one in weights.items()}
        with pytest.raises(ConfigError, match=r"'remote' .*PolicyWorkers\.set_weights"):
            runner.set_state({**state, "policies": both})
        assert runner.policies["local"].get_weights() == {"offset": 0.0}


def test_a_runner_has_a_remote_policy_beside_a_local_one() -> None:
    with PolicyWorkers(lambda: lambda seen: np.ones(len(seen), np.int64)) as workers:
        policies = {"far": workers.policy(), "near": lambda seen: np.zeros(len(seen), np.int64)}
        assert isinstance(policies["far"], RemotePolicy)
        runner = EnvRunner(
            ActorPool(COUNTING, autoreset_mode="Disabled"),
            policies,
            RunnerConfig(
                seed=0,
                policy_mapping_fn=lambda agent_id, episode: ("far", "near")[episode.env_id % 2],
            ),
        )
        sample = runner.sample(num_env_steps=40)
        assert set(sample["far"].columns["actions"].tolist()) == {1}
        assert set(sample["near"].columns["actions"].tolist()) == {0}
        runner.stop()
