from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.restart import RestartPolicy
from envbus.runner.env_runner import EnvRunner
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from tests.runner.pool_envs import PATIENCE
from tests.waiting import pass_time


class Slow(CountingEnv):
    def step(self, action: Any) -> Any:
        pass_time(0.005)
        return super().step(action)


@pytest.fixture
def pool() -> Iterator[ActorPool]:
    """Env 0 is slow; 1 and 2 run ahead of it."""
    pool = ActorPool(
        [functools.partial(Slow, 10), *[functools.partial(CountingEnv, 10)] * 2],
        num_actors=3,
        restart_failed_sub_environments=True,
        restart_policy=RestartPolicy(max_restarts=9, backoff=0.01),
    )
    yield pool
    pool.close(terminate=True)


@pytest.mark.parametrize("faulty", ["drop", "truncate"])
def test_a_killed_env_that_ran_ahead_has_only_the_rows_it_may_have(
    pool: ActorPool, faulty: Literal["drop", "truncate"]
) -> None:
    runner = EnvRunner(
        pool,
        lambda seen: np.zeros(len(seen), np.int64),
        RunnerConfig(rollout_fragment_length=7, run_ahead=15, faulty_episodes=faulty),
    )
    samples = [runner.sample(timeout=PATIENCE) for _ in range(2)]
    os.kill(pool.actor_pids()[1], signal.SIGKILL)
    samples += [runner.sample(timeout=PATIENCE) for _ in range(8)]
    assert {fault.env_id for sample in samples for fault in sample.faults} == {1}
    assert [len(sample) for sample in samples] == [21] * 10
    batches = [sample.single().columns for sample in samples]
    columns = {name: np.concatenate([b[name] for b in batches]) for name in ("t", "env_id")}
    for env_id in (0, 2):
        t = columns["t"][columns["env_id"] == env_id]
        assert t.tolist() == [step % 10 for step in range(70)]
    joined = {
        name: np.concatenate([b[name][b["env_id"] == 1] for b in batches]) for name in batches[0]
    }
    goes_on = joined["t"][1:] > 0
    np.testing.assert_array_equal(joined["obs"][1:][goes_on], joined["next_obs"][:-1][goes_on])
    np.testing.assert_array_equal(joined["eps_id"][1:] == joined["eps_id"][:-1], goes_on)
    (faulty_one,) = (e for sample in samples for e in sample.episodes if e.faulty)
    rows = joined["eps_id"] == faulty_one.eps_id
    if faulty == "truncate":
        assert rows.sum() == faulty_one.length
    whole = [e for sample in samples for e in sample.episodes if e.env_id == 1 and not e.faulty]
    assert {(joined["eps_id"] == e.eps_id).sum() for e in whole} == {10}
    kept = runner.get_metrics()["num_dropped_rows"]
    assert kept == (faulty_one.length - rows.sum() if faulty == "drop" else 0)
