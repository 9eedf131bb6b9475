from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.runner.policies.connectors import (
    ClipActions,
    ClipRewards,
    Connector,
    ConnectorError,
    FrameStack,
    Normalize,
    Pipeline,
)
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.connector_times import ConnectorTimes, mean_over_runners
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.sampling_scenes import zeros


class Counter(Connector):
    """Counts rows."""

    space = CountingEnv.observation_space

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, batch: Any, keys: Any) -> Any:
        self.rows += len(keys)
        return batch

    def get_metrics(self) -> dict[str, float]:
        return {"rows": float(self.rows)}


def test_each_connector_is_timed_and_keeps_its_name() -> None:
    inner = Pipeline([Counter(), Counter()])
    config = RunnerConfig(
        observation_connector=Pipeline([Counter(), inner]),
        action_connector={"a": Counter(), "b": Counter()},
    )
    times = ConnectorTimes()
    timed = times.timing(config)
    observe, act = timed.connector("observation", "a"), timed.connector("action", "b")
    assert observe is not None
    assert act is not None
    assert timed.connector("reward", "a") is None
    rows = np.zeros((2, 4))
    for _ in range(3):
        assert observe(rows, [(0, 0), (1, 0)]) is rows
    act(rows, [(0, 0)])
    read = times.read(config.connectors())
    names = ["observation/0:Counter", "observation/1:Pipeline/0:Counter"]
    names += ["observation/1:Pipeline/1:Counter", "action/a", "action/b"]
    assert list(read["mean_connector_ms"]) == names
    spent = read["mean_connector_ms"]
    assert [name for name in names if spent[name] > 0] == [n for n in names if n != "action/a"]
    rows_of = {name: metrics["rows"] for name, metrics in read["connector_metrics"].items()}
    assert rows_of == dict(zip(names, [6.0, 6.0, 6.0, 0.0, 1.0], strict=True))


def test_settings_without_connectors_stay_as_they_are() -> None:
    config = RunnerConfig()
    assert ConnectorTimes().timing(config) is config
    assert ConnectorTimes().read({}) == {"mean_connector_ms": {}, "connector_metrics": {}}


class Failing(Counter):
    def __call__(self, batch: Any, keys: Any) -> Any:
        raise ArithmeticError("too much")


def test_what_fails_is_named_as_without_a_clock() -> None:
    config = RunnerConfig(observation_connector=Pipeline([Counter(), Pipeline([Failing()])]))
    timed = ConnectorTimes().timing(config).connector("observation", "p")
    assert timed is not None
    with pytest.raises(ConnectorError, match=r"1:Pipeline failed: ConnectorError: .* 0:Failing"):
        timed(np.zeros((1, 4)), [(0, 0)])


def test_several_runners_have_one_mean() -> None:
    read = [
        {"mean_connector_ms": {"reward": 1.0}, "connector_metrics": {}},
        {"mean_connector_ms": {"reward": 3.0}, "connector_metrics": {"reward": {"rows": 4.0}}},
    ]
    assert mean_over_runners(read) == {
        "mean_connector_ms": {"reward": 2.0},
        "connector_metrics": {"reward": {"rows": 4.0}},
    }
    assert mean_over_runners([]) == {}


@pytest.mark.parametrize(("vectorized", "actors"), [(True, 2), (False, 2), (True, 0)])
def test_a_runner_tells_what_its_connectors_cost_and_have_measured(
    pools: list[ActorPool], vectorized: bool, actors: int
) -> None:
    envs = [functools.partial(CountingEnv, 5)] * 2
    pools.append(ActorPool(envs, num_actors=actors, autoreset_mode="Disabled"))
    stack = FrameStack(CountingEnv.observation_space, 2)
    config = RunnerConfig(
        observation_connector=Pipeline([Counter(), stack, Normalize(stack.space)]),
        action_connector=ClipActions(CountingEnv.action_space),
        reward_connector=ClipRewards(),
        vectorized=vectorized,
    )
    runner = EnvRunner(pools[-1], zeros, config)
    runner.sample(num_env_steps=10)
    metrics = runner.get_metrics()
    names = ["0:Counter", "1:FrameStack", "2:Normalize"]
    spent = metrics["mean_connector_ms"]
    assert list(spent) == [*(f"observation/{name}" for name in names), "action", "reward"]
    assert all(ms > 0 for ms in spent.values())
    # Each step's observation, and those that the two episodes began with, at least.
    assert metrics["connector_metrics"].keys() == {"observation/0:Counter"}
    assert metrics["connector_metrics"]["observation/0:Counter"]["rows"] >= 12
