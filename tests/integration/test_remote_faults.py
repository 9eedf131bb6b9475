"""Faults of envs whose actor runs elsewhere."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from envbus.runner.config import Timeouts
from envbus.runner.pool import ActorPool
from envbus.runner.seeding import restart_seed
from envbus.runner.vector_env import BusVectorEnv
from tests.integration.faulty import EXIT, RAISE, RESTART
from tests.integration.test_remote_actors import PATIENCE, free_port, with_remote_actor
from tests.runner.pool_envs import receive_all, receive_until_back

pytestmark = pytest.mark.timeout(120)

FAULTY = "tests.integration.faulty:FaultyEnv"


def test_a_remote_env_that_raises_is_made_anew_alone() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint, "--allow", "tests") as process:
        envs = BusVectorEnv(
            [FAULTY] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            autoreset_mode="SameStep",
            **RESTART,
        )
        envs.reset(seed=0)
        for life in (1, 2):
            observations, _, _, truncations, infos = envs.step(np.array([1, 1, RAISE, 1]))
            assert truncations.tolist() == [False, False, True, False]
            assert "raised on purpose" in infos["fault"]["error"][2]
            assert observations[:, 1].tolist() == [life, life, 0, life]
            assert observations[2, 3] == restart_seed(2, 2, life)
        envs.close()
        assert process.wait(PATIENCE) == 0


def test_a_frozen_actor_that_goes_on_after_it_was_replaced_changes_nothing_and_leaves() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        with_remote_actor(endpoint, "--allow", "tests") as first,
        with_remote_actor(endpoint, "--allow", "tests") as second,
    ):
        envs = BusVectorEnv(
            [FAULTY] * 2,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            timeouts=Timeouts(step=1.0),
            **RESTART,
        )
        envs.reset(seed=0)
        pid = int(envs.step(np.ones(2))[4]["pid"][1])
        frozen, other = (first, second) if pid == first.pid else (second, first)
        os.kill(frozen.pid, signal.SIGSTOP)
        _, _, _, truncations, infos = envs.step(np.ones(2))
        assert truncations.tolist() == [False, True]
        assert infos["fault"]["cause"][1] == "timeout"
        *_, infos = envs.step(np.ones(2))
        assert infos["pid"][1] == other.pid
        os.kill(frozen.pid, signal.SIGCONT)
        for step in range(1, 200):
            observations, _, _, truncations, infos = envs.step(np.full(2, step % 10))
            assert observations[1].tolist() == [1, step, step % 10, restart_seed(1, 1, 1)]
            assert not truncations.any()
        assert infos["pid"][1] == other.pid
        assert frozen.wait(PATIENCE) is not None
        envs.close()


def test_a_pool_whose_remote_actor_dies_waits_for_the_next_to_join() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint, "--allow", "tests"):
        pool = ActorPool([FAULTY] * 2, num_actors=2, remote_actors=1, bind=endpoint, **RESTART)
        pool.reset(seed=0)
        receive_all(pool, range(2))
        pool.send(np.array([1, EXIT]))
        batch = pool.recv(min_envs=2, timeout=PATIENCE)
        faults = batch.faults or pool.recv(timeout=PATIENCE).faults
        assert [fault.env_id for fault in faults] == [1]
        with with_remote_actor(endpoint, "--allow", "tests"):
            batch = receive_until_back(pool, 1)
            assert batch.observations[-1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
            pool.close()
