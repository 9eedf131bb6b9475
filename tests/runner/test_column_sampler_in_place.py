"""Envs in the runner's process are stepped by calls; nothing else may change by that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv, FailingEnv
from envbus.bus.restart import RestartPolicy
from envbus.runner.env_results import Rows
from envbus.runner.env_runner import EnvRunner
from envbus.runner.policies import Policy, PolicyOutput
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig, Sample
from tests.runner.pool_envs import PATIENCE
from tests.runner.sampling_scenes import assert_same

Make = Callable[..., "CountedPool"]
MODES = pytest.mark.parametrize("mode", ["NextStep", "Disabled"])


class Adding(Policy):
    """Acts by the sign of what it has seen in the episode so far."""

    def initial_state(self) -> Any:
        return {"sum": np.zeros((), np.float64)}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        del explore
        total = states["sum"] + observations.reshape(len(observations), -1).sum(axis=1)
        actions = (total > 0).astype(np.int64)
        return PolicyOutput(actions, {"sum": total}, {"total": total})


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=13)


class CountedPool(ActorPool):
    """A pool that notes what `step_in_place` returns, and counts calls of `recv`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.stepped: list[Rows | None] = []
        self.asked = 0

    def step_in_place(self, actions: Any) -> Rows | None:
        self.stepped.append(super().step_in_place(actions))
        return self.stepped[-1]

    def recv(self, *args: Any, **settings: Any) -> Any:
        self.asked += 1
        return super().recv(*args, **settings)


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(envs: Any, num_actors: int = 0, **settings: Any) -> CountedPool:
        pools.append(CountedPool(envs, num_actors=num_actors, **settings))
        return pools[-1]

    return _make


def assert_equal(one: Sample, other: Sample) -> None:
    columns = [
        {name: batch.columns for name, batch in sample.policy_batches.items()}
        for sample in (one, other)
    ]
    assert_same(*columns)
    assert one.episodes == other.episodes
    assert (one.late, one.env_steps) == (other.late, other.env_steps)


@MODES
@pytest.mark.parametrize("num_envs", [1, 3])
def test_samples_are_those_of_envs_in_an_actor(make: Make, mode: str, num_envs: int) -> None:
    taken, calls = [], []
    for num_actors in (0, 1):
        pool = make([cart_pole] * num_envs, num_actors, autoreset_mode=mode)
        if not num_actors:
            calls = pool.stepped
        config = RunnerConfig(seed=1, rollout_fragment_length=20, min_envs=num_envs)
        runner = EnvRunner(pool, Adding(), config)
        samples = [runner.sample(), runner.sample(num_env_steps=31), runner.sample()]
        samples += [runner.sample(num_env_steps=n) for n in (1, 0)]
        samples += [runner.sample(num_episodes=4), runner.sample(), runner.sample()]
        taken.append((samples, runner.metrics.read()))
    for one, other in zip(taken[0][0], taken[1][0], strict=True):
        assert_equal(one, other)
    assert taken[0][1] == taken[1][1]
    assert calls
    assert None not in calls


@MODES
def test_a_runner_with_one_env_asks_its_pool_only_where_episodes_begin(
    make: Make, mode: str
) -> None:
    pool = make([functools.partial(CountingEnv, 10)], autoreset_mode=mode)
    runner = EnvRunner(pool, Adding(), RunnerConfig(rollout_fragment_length=25))
    runner.sample()
    assert (len(pool.stepped), pool.asked) == (25, 3)
    assert runner.get_metrics()["mean_env_wait_ms"] > 0
    assert runner.timers.iterations == 28


def test_an_env_that_fails_costs_its_own_episode_only(make: Make) -> None:
    taken = []
    for num_actors in (0, 1):
        pool = make(
            [functools.partial(FailingEnv, after=7, length=50), functools.partial(CountingEnv, 50)],
            num_actors,
            restart_failed_sub_environments=True,
            restart_policy=RestartPolicy(backoff=0.01),
        )
        runner = EnvRunner(
            pool, Adding(), RunnerConfig(rollout_fragment_length=12, faulty_episodes="truncate")
        )
        sample = runner.sample(timeout=PATIENCE)
        batch = sample.single()
        assert [fault.env_id for fault in sample.faults] == [0]
        assert batch["truncateds"].nonzero()[0].tolist() == [6]
        assert batch["t"].tolist()[:12] == [*range(7), *range(5)]
        taken.append(batch["incarnation"].tolist())
    assert taken[0] == taken[1]


def test_a_time_out_cuts_a_fragment_and_loses_nothing(make: Make) -> None:
    waits = iter([False] * 9 + [True])

    class Late(CountingEnv):
        def step(self, action: np.int64) -> Any:
            if next(waits, False):
                expired.append(True)
            return super().step(action)

    expired: list[bool] = []
    pool = make([functools.partial(Late, 100)])
    runner = EnvRunner(pool, Adding(), RunnerConfig(rollout_fragment_length=30))
    sampler: Any = runner._sampler
    sampler._is_over_time = lambda: bool(expired)
    first = runner.sample(timeout=PATIENCE)
    assert first.late == (0,)
    assert first.single()["t"].tolist() == [*range(10)]
    expired.clear()
    second = runner.sample(timeout=PATIENCE)
    assert second.late == ()
    assert second.single()["t"].tolist() == [*range(10, 40)]


def test_after_an_exception_of_the_policy_episodes_begin_anew(make: Make) -> None:
    class Failing(Adding):
        calls = 0

        def compute_actions(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 8:
                raise RuntimeError("the eighth")
            return super().compute_actions(*args, **kwargs)

    pool = make([functools.partial(CountingEnv, 50)] * 2)
    runner = EnvRunner(pool, Failing(), RunnerConfig(rollout_fragment_length=9))
    with pytest.raises(RuntimeError, match="eighth"):
        runner.sample()
    assert runner.sample().single()["t"].tolist()[:9] == [*range(9)]
