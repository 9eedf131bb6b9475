"""Answers that come after their time-out: dropped, and what comes next is right.

Each observation of a `LateEnv` says whose it is, which of its steps and after which action. All
that is sent to an env is applied in order, so the answer to the n-th step must say n.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from envbus.runner import DUMMY_AGENT
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts
from tests.envs import HangingEnv
from tests.integration.faulty import LateEnv
from tests.runner.pool_envs import PATIENCE, receive_all
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(180)

TRANSPORTS = pytest.mark.parametrize(
    "transport",
    [{}, {"shared_memory": False}, {"local_links": False}],
    ids=["shared", "frames", "sockets"],
)
TIMEOUT = multiprocessing.TimeoutError


@contextlib.contextmanager
def vector(num_envs: int, **options: Any) -> Iterator[BusVectorEnv]:
    envs = BusVectorEnv([partial(LateEnv, 3, 0.004)] * num_envs, **options)
    try:
        yield envs
    finally:
        envs.close(terminate=True)


def expected(env_ids: Any, steps: Any, actions: Any) -> Any:
    return np.stack([np.ones(len(env_ids)), steps, actions, env_ids], axis=1)


# --- vector envs ------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("transport", "names"),
    [
        ({}, "gymnasium"),
        ({}, "openrl"),
        ({"shared_memory": False}, "gymnasium"),
        ({"local_links": False}, "gymnasium"),
    ],
)
def test_a_vector_env_never_shifts_its_steps(transport: dict[str, Any], names: str) -> None:
    with vector(4, num_actors=2, **transport) as envs:
        send, fetch = envs.step_async, envs.step_wait
        if names == "openrl":
            send, fetch = envs.step_send, envs.step_fetch
        envs.reset(seed=0)
        late = 0
        for step in range(1, 501):
            actions = np.arange(4) + step % 90
            send(actions)
            try:
                observations, rewards, *_ = fetch(timeout=0.001 if step % 8 else PATIENCE)
            except TIMEOUT:
                late += 1
                continue
            wanted = expected(np.arange(4), np.full(4, step), actions)
            np.testing.assert_array_equal(observations, wanted)
            assert rewards.tolist() == [10.0 + step] * 4
        assert late > 20
        assert envs.statistics().late_replies > 0


@pytest.mark.slow
@TRANSPORTS
def test_steps_calls_and_resets_that_are_late_are_not_taken_for_each_other(
    transport: dict[str, Any],
) -> None:
    with vector(3, num_actors=3, **transport) as envs:
        envs.reset(seed=0)
        episode, step, late = 1, 0, 0
        for turn in range(1, 300):
            patience = 0.001 if turn % 5 else PATIENCE
            try:
                if turn % 7 == 0:
                    envs.reset_async(seed=0)
                    episode, step = episode + 1, 0
                    observations, infos = envs.reset_wait(timeout=patience)
                    assert infos["episode"].tolist() == [episode] * 3
                    assert observations[:, :2].tolist() == [[episode, 0]] * 3
                elif turn % 3 == 0:
                    envs.call_async("late_count")
                    assert envs.call_wait(timeout=patience) == tuple((i, step) for i in range(3))
                else:
                    envs.step_async(np.full(3, turn % 90))
                    step += 1
                    observations, *_ = envs.step_wait(timeout=patience)
                    wanted = [[episode, step, turn % 90, i] for i in range(3)]
                    assert observations.tolist() == wanted
            except TIMEOUT:
                late += 1
        assert late > 20


def test_a_step_past_its_own_deadline_is_never_taken_for_the_next() -> None:
    with vector(2, num_actors=2, timeouts=Timeouts(step=0.002)) as envs:
        envs.reset(seed=0)
        late = 0
        for step in range(1, 300):
            try:
                observations, *_ = envs.step(np.full(2, step % 90))
            except TIMEOUT:
                late += 1
                envs.get_attr("length")  # returns when both have caught up
            else:
                assert observations[:, 1:3].tolist() == [[step, step % 90]] * 2
        assert late > 20


# --- pools ------------------------------------------------------------------------------------


@pytest.mark.slow
@TRANSPORTS
def test_a_pool_gives_each_result_once_and_in_order_however_short_its_waits(
    transport: dict[str, Any],
) -> None:
    with ActorPool([partial(LateEnv, 2, 0.003)] * 6, num_actors=3, **transport) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(6))
        sent, given = np.zeros(6, np.int64), np.zeros(6, np.int64)
        ready, late = np.arange(6), 0
        while sent.min() < (300 if late > 20 else 3000):  # fewer are late on a busy machine
            sent[ready] += 1
            if len(ready):
                pool.send(sent[ready] % 90, ready)
            batch = pool.recv(timeout=0.001)
            late += bool(batch.late)
            ready = batch.env_ids
            given[ready] += 1
            assert not set(batch.late) & set(ready.tolist())
            wanted = expected(ready, sent[ready], sent[ready] % 90)
            np.testing.assert_array_equal(batch.observations.reshape(-1, 4), wanted)
            assert (given == sent - np.isin(np.arange(6), _pending(sent, given))).all()
        assert late > 20


@pytest.mark.slow
@TRANSPORTS
def test_poll_gives_each_result_once_and_in_order_however_short_its_waits(
    transport: dict[str, Any],
) -> None:
    with ActorPool(
        [partial(LateEnv, 2, 0.003)] * 6, num_actors=3, autoreset_mode="Disabled", **transport
    ) as pool:
        for env_id in range(6):
            pool.try_reset(env_id, seed=env_id)
        sent, given, empty = np.full(6, -1), np.full(6, -1), 0
        while sent.min() < (300 if empty > 20 else 3000):
            result = pool.poll(timeout=0.001)
            empty += not result.observations
            for env_id, agents in result.observations.items():
                given[env_id] += 1
                step = max(sent[env_id], 0)  # the first one is the reset's
                assert agents[DUMMY_AGENT].tolist() == [1, step, step % 90, env_id]
                sent[env_id] = step + 1
                pool.send_actions({env_id: {DUMMY_AGENT: np.int64(sent[env_id] % 90)}})
            assert (sent == given + 1)[given >= 0].all()
        assert empty > 20


def _pending(sent: Any, given: Any) -> Any:
    return np.flatnonzero(sent > given)


@pytest.mark.slow_but_first
@TRANSPORTS
def test_a_pool_drops_results_that_come_after_their_deadline(transport: dict[str, Any]) -> None:
    with ActorPool(
        [partial(LateEnv, 3, 0.006)] * 4, num_actors=4, timeouts=Timeouts(step=0.003), **transport
    ) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(4))
        sent = np.zeros(4, np.int64)
        idle, late = set(range(4)), 0
        while sent.min() < 150 or late <= 20:  # on a busy machine fewer of the first are late
            ids = np.array(sorted(idle), np.int64)
            idle.clear()
            sent[ids] += 1
            if len(ids):
                pool.send(sent[ids] % 90, ids)
            try:
                batch = pool.recv(timeout=PATIENCE)
            except TIMEOUT as error:
                late += 1
                named = str(error).split("did not answer")[0]
                idle |= {i for i in range(4) if f" {i}" in named}
                continue
            ids = batch.env_ids
            idle |= set(ids.tolist())
            np.testing.assert_array_equal(
                batch.observations, expected(ids, sent[ids], sent[ids] % 90)
            )
        assert pool.statistics().late_replies > 0


def test_resets_drop_what_is_late_and_only_that() -> None:
    with ActorPool([partial(LateEnv, 2, 0.004)] * 4, num_actors=2) as pool:
        for episode in range(1, 100):
            pool.reset(seed=0)
            rows = receive_all(pool, range(4))
            for env_id, row in rows.items():
                assert row["observation"].tolist() == [episode, 0, 0, env_id]
            pool.send(np.ones(4))
            pool.recv(min_envs=4, timeout=0.001)


# --- waiting ----------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("local_links", [True, False])
def test_waiting_costs_no_cpu_time_and_ends_with_its_deadline(local_links: bool) -> None:
    makers = [partial(HangingEnv, after=0)] * 2
    brief = Timeouts(close=0.2)
    with ActorPool(makers, num_actors=2, local_links=local_links, timeouts=brief) as pool:
        pool.reset()
        receive_all(pool, range(2))
        pool.send(np.ones(2))
        spent = time.thread_time()
        batch = pool.recv(timeout=0.5)
        assert batch.late == [0, 1]
        assert time.thread_time() - spent < 0.2
        for _ in range(20):
            assert pool.recv(timeout=0.01).late == [0, 1]
            assert pool.recv(timeout=0.0).late == [0, 1]
    envs = BusVectorEnv(makers, num_actors=2, local_links=local_links)
    try:
        envs.reset()
        envs.step_async(np.ones(2))
        spent = time.thread_time()
        with pytest.raises(TIMEOUT, match=r"Not answered: actor-0 .*, actor-1 "):
            envs.step_wait(timeout=0.5)
        assert time.thread_time() - spent < 0.2
    finally:
        envs.close(terminate=True)


def test_if_some_envs_hang_recv_returns_what_there_is_and_names_the_late() -> None:
    makers = [partial(HangingEnv, after=0), LateEnv, LateEnv]
    with ActorPool(makers, num_actors=3, timeouts=Timeouts(close=0.2)) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(3))
        pool.send(np.ones(3))
        batch = pool.recv(min_envs=3, timeout=1.5)
        assert sorted(batch.env_ids.tolist()) == [1, 2]
        assert batch.late == [0]


# --- a driver that is away --------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("restart", "local_links"), [(True, True), (False, False)])
def test_nothing_is_late_because_the_driver_was_away(local_links: bool, restart: bool) -> None:
    timeouts = Timeouts(reset=0.2, step=0.2, call=0.2)
    options: dict[str, Any] = {
        "num_actors": 2,
        "timeouts": timeouts,
        "local_links": local_links,
        "restart": restart,
    }
    with vector(4, **options) as envs:
        envs.reset_async(seed=0)
        away()
        envs.reset_wait()
        for step in (1, 2):
            envs.step_async(np.ones(4))
            away()
            observations, _, _, truncations, infos = envs.step_wait()
            assert observations[:, 1].tolist() == [step] * 4
            assert not truncations.any()
            assert "fault" not in infos
        envs.call_async("late_count")
        away()
        assert len(envs.call_wait()) == 4
        told = envs.statistics()
        assert (told.restarts, told.late_replies) == (0, 0)
    with ActorPool([LateEnv] * 4, **options) as pool:
        pool.reset(seed=0)
        for _ in range(2):
            away()
            rows = receive_all(pool, range(4))
            assert {row["incarnation"] for row in rows.values()} == {0}
            pool.send(np.ones(4))
        away()
        assert pool.recv(min_envs=4, timeout=PATIENCE).faults == []
        told = pool.statistics()
        assert (told.restarts, told.late_replies) == (0, 0)


def away() -> None:
    pass_time(0.8)
