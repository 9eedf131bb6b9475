"""`RunnerConfig.run_ahead`, with real envs; `test_columns_fragments.py` has the rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.env_runner import EnvRunner
from envbus.runner.policies import Policy, PolicyOutput
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from tests.runner.pool_envs import PATIENCE, GatedEnv, KeyEnv
from tests.waiting import pass_time

Make = Callable[..., EnvRunner]
MODES = pytest.mark.parametrize("mode", ["NextStep", "Disabled"])


class Counted(Policy):
    """Acts by the sign of what it sees; counts the rows, and calls a function after some."""

    def __init__(self) -> None:
        self.rows = 0
        self.then: dict[int, Callable[[], object]] = {}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        for _ in observations:
            self.rows += 1
            self.then.get(self.rows, lambda: None)()
        return PolicyOutput((observations.sum(axis=1) > 0).astype(np.int64), states)


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        pass_time(0.003)
        return super().step(action)


def cart_pole(*, slow: bool) -> Any:
    env = gymnasium.make("CartPole-v1", max_episode_steps=13)
    return Slow(env) if slow else env


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(envs: Any, policy: Any, mode: str = "NextStep", **config: Any) -> EnvRunner:
        pool = ActorPool(envs, num_actors=len(envs), autoreset_mode=mode)
        pools.append(pool)
        return EnvRunner(pool, policy, RunnerConfig(seed=1, **config))

    return _make


@MODES
def test_m_r_20_samples_are_the_same_whether_envs_run_ahead_or_not(make: Make, mode: str) -> None:
    envs = [functools.partial(cart_pole, slow=index == 0) for index in range(3)]
    taken = []
    for run_ahead in (0, 30):
        policy = Counted()
        runner = make(envs, policy, mode, rollout_fragment_length=20, run_ahead=run_ahead)
        samples = [runner.sample(), runner.sample(num_env_steps=31)]
        samples += [runner.sample(num_env_steps=n) for n in (2, 0)]
        samples += [runner.sample() for _ in range(3)]
        taken.append(samples)
        delivered = sum(sample.env_steps for sample in samples)
        assert (policy.rows > delivered + 3) is (run_ahead > 0)
    for one, other in zip(*taken, strict=True):
        assert one.policy_batches.keys() == other.policy_batches.keys()
        for name, column in one.single().columns.items() if len(one) else ():
            np.testing.assert_array_equal(column, other.single()[name])
        by_id = [sorted(sample.episodes, key=lambda e: e.eps_id) for sample in (one, other)]
        assert by_id[0] == by_id[1]


@MODES
def test_envs_run_ahead_as_far_as_asked_and_the_version_of_each_row_is_kept(
    make: Make, mode: str, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    policy = Counted()
    envs = [functools.partial(GatedEnv, gate, 9), functools.partial(CountingEnv, 4)]
    runner = make(envs, policy, mode, rollout_fragment_length=4, run_ahead=3)
    policy.then[1 + 7] = gate.touch  # the gated one's first row, and all that the other may have
    first = runner.sample(timeout=PATIENCE)
    assert first.single()["env_id"].tolist() == [0] * 4 + [1] * 4
    asked = policy.rows
    assert asked == 4 + 7
    runner.set_weights(runner.get_weights(), version=5)
    batches = [first.single(), *(runner.sample(timeout=PATIENCE).single() for _ in range(2))]
    assert batches[1]["policy_version"].tolist() == [5] * 4 + [0] * 3 + [5]
    for env_id, length in ((0, 9), (1, 4)):
        t = np.concatenate([batch["t"][batch["env_id"] == env_id] for batch in batches])
        assert t.tolist() == [step % length for step in range(12)]
    results = runner.get_metrics()
    assert results["num_env_steps_sampled"] == 24


def test_a_time_out_names_the_late_and_what_is_ahead_waits(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    envs = [functools.partial(GatedEnv, gate, 9), functools.partial(CountingEnv, 4)]
    runner = make(envs, Counted(), rollout_fragment_length=2, run_ahead=5)
    first, second = (runner.sample(timeout=0.3) for _ in range(2))
    assert first.late == second.late == (0,)
    assert first.single()["t"].tolist() == [0, 1]
    assert second.single()["t"].tolist() == [2, 3]
    gate.touch()
    batch = runner.sample(timeout=PATIENCE).single()
    assert batch["t"].tolist() == [0, 1, 0, 1]


def test_a_forced_reset_and_an_exception_discard_what_is_ahead(make: Make) -> None:
    policy = Counted()
    envs = [functools.partial(cart_pole, slow=index == 0) for index in range(2)]
    runner = make(envs, policy, rollout_fragment_length=5, run_ahead=5)
    seen = set(runner.sample().single()["eps_id"].tolist())
    batch = runner.sample(force_reset=True).single()
    assert batch["t"].tolist()[:5] == batch["t"].tolist()[5:] == [*range(5)]
    assert not seen & set(batch["eps_id"].tolist())

    def fail() -> None:
        raise RuntimeError("no")

    policy.then[policy.rows + 1] = fail
    with pytest.raises(RuntimeError, match="no"):
        runner.sample(num_env_steps=40)
    again = runner.sample().single()
    assert again["t"].tolist() == [*range(5)] * 2


def test_what_cannot_run_ahead_is_refused(make: Make) -> None:
    envs = [functools.partial(CountingEnv, 4)] * 2
    for settings, reason in (
        ({"pipelined": True}, "run_ahead=3 with pipelined=True"),
        ({"enough_envs": 0.5}, r"run_ahead=3 with enough_envs=0\.5"),
        ({"batch_mode": "complete_episodes"}, "run_ahead=3 with batch_mode"),
    ):
        with pytest.raises(ConfigError, match=reason):
            RunnerConfig(run_ahead=3, **settings)
    with pytest.raises(ConfigError, match="run_ahead must be at least 0"):
        RunnerConfig(run_ahead=-1)
    with pytest.raises(ConfigError, match="with run_ahead=3: infos are kept"):
        make(envs, Counted(), "Disabled", run_ahead=3, infos=True)
    with pytest.raises(ConfigError, match="run_ahead=3 needs columns"):
        make(envs, Counted(), "Disabled", run_ahead=3, vectorized=False)
    with pytest.raises(ConfigError, match="num_episodes=2: with run_ahead=3"):
        make(envs, Counted(), run_ahead=3).sample(num_episodes=2)


@MODES
def test_infos_that_nobody_asked_for_are_not_merged(make: Make, mode: str) -> None:
    envs = [functools.partial(KeyEnv, value) for value in (5, {"in": 1})]
    runner = make(envs, Counted(), mode, rollout_fragment_length=4, min_envs=2)
    assert runner.is_vectorized
    for _ in range(2):
        assert runner.sample().env_steps == 8
