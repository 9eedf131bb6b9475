"""Runners in processes of their own whose policies are in policy workers."""

from __future__ import annotations

import functools
import os
import signal

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.inference.policy_workers import PolicyWorkers
from tests.integration.group_children import PATIENCE, wait_until
from tests.runner.group.test_env_runner_group import Steps

pytestmark = pytest.mark.timeout(180)


@pytest.mark.slow
def test_the_runners_of_a_group_ask_policy_workers_also_in_a_next_life() -> None:
    envs = [functools.partial(CountingEnv, 5)] * 4
    with (
        PolicyWorkers(Steps()) as workers,
        EnvRunnerGroup(2, envs, workers.handle()) as group,
    ):
        batch = group.sample(20, timeout=PATIENCE).single()
        assert set(batch["actions"].tolist()) == {0}
        version = workers.set_weights({"number": np.array([4])})
        group.sample(20, timeout=PATIENCE)
        batch = group.sample(20, timeout=PATIENCE).single()
        assert batch["actions"].tolist() == [4] * 20
        assert batch["policy_version"].tolist() == [version] * 20
        with pytest.raises(ConfigError, match=r"PolicyWorkers\.set_weights"):
            group.set_weights({"default_policy": {"number": np.array([5])}})
        assert group.get_weights()["default_policy"]["number"].tolist() == [4]
        state = group.get_state()
        assert (state["weights"], state["policy_versions"]) == ({}, {})
        group.set_state(state)
        foreign = {"weights": group.get_weights(), "policy_versions": group.policy_versions}
        with pytest.raises(ConfigError, match=r"PolicyWorkers\.set_weights"):
            group.set_state({**state, **foreign})
        os.kill(group.runner_pids()[0], signal.SIGKILL)
        wait_until(lambda: group.probe(timeout=PATIENCE)[0].incarnation == 1, "another life")
        wait_until(lambda: group.probe(timeout=PATIENCE)[0].state == "ready", "it to be ready")
        sample = group.sample(20, timeout=PATIENCE)
        assert sample.runners == (0, 1)
        assert sample.single()["actions"].tolist() == [4] * 20


def test_policies_that_runners_take_from_policy_workers_are_no_part_of_a_state() -> None:
    envs = [functools.partial(CountingEnv, 5)] * 2
    with PolicyWorkers(Steps()) as workers:
        handle = workers.handle()
        with EnvRunnerGroup(1, envs, make_policies=lambda pool, index: handle.policy()) as group:
            state = group.get_state()
            assert state["weights"] == {}
            with pytest.raises(ConfigError, match=r"PolicyWorkers\.set_weights"):
                group.set_weights(group.get_weights())
            group.set_state(state)
            assert group.sample(4, timeout=PATIENCE).env_steps == 4
