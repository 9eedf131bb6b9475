from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.env_runner import EnvRunner
from envbus.runner.policies import PolicyOutput
from envbus.runner.sampling import RunnerConfig
from tests.runner.simulators import (
    ACTIONS,
    COUNTS,
    PATIENCE,
    for_ever,
    obs,
    play_episode,
    simulators,
)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def make(policies: Any = zeros, **config: Any) -> EnvRunner:
    return EnvRunner(ExternalEnvBridge(COUNTS, ACTIONS), policies, RunnerConfig(**config))


def address(runner: EnvRunner) -> str:
    bridge = runner.envs
    assert isinstance(bridge, ExternalEnvBridge)
    return bridge.address


@pytest.mark.parametrize(("mode", "rows"), [("truncate", 40), ("complete", 50)])
def test_x_03_fragments_are_exact_and_whole_episodes_are_packed(mode: str, rows: int) -> None:
    runner = make(rollout_fragment_length=40, batch_mode=f"{mode}_episodes")
    with simulators(address(runner), for_ever(play_episode)), runner:
        batches = [runner.sample(timeout=PATIENCE).single() for _ in range(3)]
        assert [len(batch) for batch in batches] == [rows] * 3
        t = np.concatenate([batch["t"] for batch in batches])
        assert t.tolist() == [i % 25 for i in range(3 * rows)]
        assert [int(batch["unroll_id"][0]) for batch in batches] == [0, 1, 2]
