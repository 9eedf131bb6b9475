from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.restart import RestartPolicy
from envbus.runner.env_runner import EnvRunner
from envbus.runner.faults import Fault
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from tests.runner.pool_envs import PATIENCE
from tests.runner.test_column_policy import Elsewhere, Here


@pytest.fixture
def pool() -> Iterator[ActorPool]:
    """Two envs in each of two actors: 0 and 2 are one group, 1 and 3 the other."""
    pool = ActorPool(
        [functools.partial(CountingEnv, 10)] * 4,
        num_actors=2,
        restart_failed_sub_environments=True,
        restart_policy=RestartPolicy(max_restarts=9, backoff=0.01),
    )
    assert pool.env_groups(2) == [[0, 2], [1, 3]]
    yield pool
    pool.close(terminate=True)


def assert_whole_but_for_faults(batches: list[Any], hit: set[int]) -> None:
    for env_id in range(4):
        rows = [batch.columns for batch in batches]
        own = [columns["env_id"] == env_id for columns in rows]
        t = np.concatenate([c["t"][mine] for c, mine in zip(rows, own, strict=True)])
        seen = np.concatenate([c["obs"][mine] for c, mine in zip(rows, own, strict=True)])
        following = np.concatenate([c["next_obs"][mine] for c, mine in zip(rows, own, strict=True)])
        goes_on = t[1:] > 0
        np.testing.assert_array_equal(seen[1:][goes_on], following[:-1][goes_on])
        if env_id not in hit:
            assert (t == np.arange(len(t)) % 10).all()


@pytest.mark.parametrize("policy", [Here, Elsewhere])
def test_a_fault_in_one_group_leaves_the_others_whole(pool: ActorPool, policy: Any) -> None:
    runner = EnvRunner(pool, policy(), RunnerConfig(pipelined=True, rollout_fragment_length=9))
    batches = [runner.sample(timeout=PATIENCE).single()]
    os.kill(pool.actor_pids()[1], signal.SIGKILL)
    faults: list[Fault] = []
    for _ in range(4):
        sample = runner.sample(timeout=PATIENCE)
        assert not sample.late
        faults += sample.faults
        batches.append(sample.single())
    assert {fault.env_id for fault in faults} == {2, 3}
    assert [len(batch) for batch in batches] == [36] * 5
    assert_whole_but_for_faults(batches, {2, 3})


def test_an_env_that_fails_while_its_action_is_chosen_gets_no_row_for_it(pool: ActorPool) -> None:
    policy = Elsewhere()
    runner = EnvRunner(pool, policy, RunnerConfig(pipelined=True, rollout_fragment_length=9))
    batches = [runner.sample(timeout=PATIENCE).single()]
    calls: list[int] = []

    def kill_once() -> None:
        calls.append(0)
        if len(calls) == 4:
            os.kill(pool.actor_pids()[1], signal.SIGKILL)

    policy.before_collect = kill_once
    samples = [runner.sample(timeout=PATIENCE) for _ in range(4)]
    batches += [sample.single() for sample in samples]
    assert {fault.env_id for sample in samples for fault in sample.faults} == {2, 3}
    assert [len(batch) for batch in batches] == [36] * 5
    assert_whole_but_for_faults(batches, {2, 3})
    # What the policy saw is what the row says.
    for batch in batches:
        np.testing.assert_array_equal(batch["seen"], batch["obs"][:, 0])
