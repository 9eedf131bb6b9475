"""An actor that has died is a lost peer, whoever notices first: its pipe, its local link, or its
exit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import StartError
from envbus.runner import ActorPool, BusVectorEnv, RestartPolicy
from envbus.runner.engine.env_results import Batch
from envbus.runner.errors import ActorLostError
from envbus.runner.workers import waiting_note
from tests.integration.faulty import RESTART
from tests.integration.group_children import PATIENCE, is_alive, wait_until

pytestmark = pytest.mark.timeout(120)

ENV = partial(CountingEnv, 10**6)
LOCAL_LINKS = pytest.mark.parametrize("local_links", [True, False], ids=["local_links", "sockets"])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "its end")


@pytest.fixture
def vector(request: pytest.FixtureRequest) -> Iterator[BusVectorEnv]:
    envs = BusVectorEnv([ENV] * 2, num_actors=2, local_links=request.param, **RESTART)
    yield envs
    envs.close(terminate=True)


@LOCAL_LINKS
def test_an_actor_that_dies_after_its_hello_while_the_driver_is_away(local_links: bool) -> None:
    with ActorPool([ENV] * 2, num_actors=2, local_links=local_links, **RESTART) as pool:
        pool.reset(seed=1)
        pool.recv(2)
        for _ in range(4):
            kill(pool.actor_pids()[0])
            step_until(pool, lambda batch: any(fault.env_id == 0 for fault in batch.faults))
            assert select.select([pool.fileno()], [], [], PATIENCE)[0], "its hello, or its end"
            kill(pool.actor_pids()[0])
            step_until(pool, lambda batch: 0 in batch.env_ids)


def step_until(pool: ActorPool, done: Callable[[Batch], bool]) -> None:
    """Step env 1, whose actor lives, until a batch is as it should be."""
    while True:
        with contextlib.suppress(AlreadyPendingCallError):  # it has not answered yet
            pool.send([1], [1])
        if done(pool.recv(timeout=PATIENCE)):
            return


#: What needs the pipe of an actor.
NEEDS = {
    "reset": lambda envs: envs.reset(options={"an": ENV}),
    "exec_func": lambda envs: envs.exec_func(lambda _: 1),
    "set_attr": lambda envs: envs.set_attr("thing", ENV),
    "call": lambda envs: envs.call("add", 1),
}


@pytest.mark.parametrize("vector", [True, False], ids=["local_links", "sockets"], indirect=True)
@pytest.mark.parametrize("verb", NEEDS)
def test_what_needs_the_pipe_of_an_actor_that_has_just_died(
    vector: BusVectorEnv, verb: str
) -> None:
    for seed in range(3):
        vector.reset(seed=seed)
        kill(vector.actor_pids()[seed % 2])
        if verb == "reset":
            _, infos = NEEDS[verb](vector)
        else:
            with pytest.raises(ActorLostError):
                NEEDS[verb](vector)
            infos = vector.step([1, 1])[4]
        assert infos["_fault"].tolist() == [seed % 2 == 0, seed % 2 == 1]


@LOCAL_LINKS
def test_what_needs_the_pipe_of_a_pools_actor_that_has_just_died(local_links: bool) -> None:
    with ActorPool(
        [ENV] * 2, num_actors=2, autoreset_mode="Disabled", local_links=local_links, **RESTART
    ) as pool:
        pool.poll(min_envs=2)
        for _ in range(2):
            kill(pool.actor_pids()[0])
            pool.try_reset(0, options={"an": ENV})
            assert [fault.env_id for fault in pool.poll(PATIENCE).faults] == [0]
            assert 0 in pool.poll(PATIENCE).observations
            kill(pool.actor_pids()[0])
            with pytest.raises(ActorLostError):
                pool.get_sub_environments()[0].exec_func(lambda _: 1)
            assert [fault.env_id for fault in pool.poll(PATIENCE).faults] == [0]
            assert 0 in pool.poll(PATIENCE).observations


class Killer:
    """Kills one of some processes, now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.killed = 0

    def may_kill(self, pids: list[int]) -> None:
        chance = self._random.random()
        if chance < 0.4:
            self.killed += 1
            with contextlib.suppress(ProcessLookupError):  # it is dead already
                os.kill(self._random.choice(pids), signal.SIGKILL)
        if chance < 0.2:  # the driver is away: what it is told comes at once
            until = time.monotonic() + self._random.uniform(0.0, 0.1)
            while time.monotonic() < until:
                os.sched_yield()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("vector", [True, False], ids=["local_links", "sockets"], indirect=True)
def test_a_vector_env_goes_on_under_a_storm_of_kills(vector: BusVectorEnv) -> None:
    killer = Killer(1)
    last, _ = vector.reset(seed=1)
    faults = 0
    for number in range(60):
        killer.may_kill(living(vector))
        verb = number % 10
        if verb == 3:
            last, infos = vector.reset(options={"an": ENV})
            faults += np.count_nonzero(infos.get("_fault", 0))
            continue
        if verb == 6:
            try:
                vector.exec_func(lambda _: 1)
            except ActorLostError:
                killer.may_kill(living(vector))
        seen, _, _, truncations, infos = vector.step([1, 1])
        told = infos.get("_fault", np.zeros(2, bool))
        faults += np.count_nonzero(told)
        assert not (truncations & ~told).any()
        assert (seen[told & ~truncations, 1] == 0).all(), "not the step of a reset"
        for env_id in np.flatnonzero(~told):
            assert seen[env_id, 1] in (last[env_id, 1] + 1, 0)
        last = seen
    assert 0 < faults <= killer.killed


@pytest.mark.slow
@LOCAL_LINKS
def test_a_pool_goes_on_under_a_storm_of_kills(local_links: bool) -> None:
    killer = Killer(2)
    with ActorPool([ENV] * 2, num_actors=2, local_links=local_links, **RESTART) as pool:
        pool.reset(seed=1)
        faults = received = 0
        while received < 80:
            killer.may_kill(living(pool))
            batch = pool.recv(timeout=PATIENCE)
            assert not batch.late
            faults += len(batch.faults)
            received += len(batch.env_ids)
            pool.send(np.ones(len(batch.env_ids), np.int64), batch.env_ids)
            if received % 7 == 0:
                try:
                    pool.get_sub_environments()[0].exec_func(lambda _: 1)
                except ActorLostError:
                    killer.may_kill(living(pool))
    assert 0 < faults <= killer.killed


def living(envs: Any) -> list[int]:
    return [pid for pid in envs.actor_pids() if is_alive(pid)] or envs.actor_pids()


class DyingProcessGroup:
    """Kills a process just before the n-th thing is sent to it by its pipe."""

    def __init__(self, process_group: Any, nth: int) -> None:
        self._process_group = process_group
        self.left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process_group, name)

    def start(self, *args: Any, **settings: Any) -> Any:
        child = self._process_group.start(*args, **settings)
        send = child.pipe._send

        def dying_send(*passed: Any, **more: Any) -> None:
            self.left -= 1
            if not self.left:
                kill(child.pid)
            send(*passed, **more)

        child.pipe._send = dying_send
        return child


@pytest.mark.slow_but_first
@LOCAL_LINKS
def test_an_actor_that_ends_at_anything_that_is_sent_to_it_while_it_comes_up(
    local_links: bool,
) -> None:
    with ActorPool([ENV] * 2, num_actors=2, local_links=local_links, **RESTART) as pool:
        pool.reset()
        pool.recv(min_envs=2)
        connections: Any = pool._fleet._connections
        process_group, restarts = connections.process_group, 0
        for nth in itertools.count(1):
            connections.process_group = dying = DyingProcessGroup(process_group, nth)
            kill(pool.actor_pids()[0])
            step_until(pool, lambda batch: any(fault.env_id == 0 for fault in batch.faults))
            step_until(pool, lambda batch: 0 in batch.env_ids)
            if dying.left > 0:  # nothing more was sent
                break
            restarts += 2
            assert pool.statistics().restarts == restarts
        connections.process_group = process_group
        assert nth > 3  # what it is to do, its envs, and their memory


class PoorProcessGroup:
    """Has no process to give, for so many times."""

    def __init__(self, process_group: Any, times: int) -> None:
        self._process_group = process_group
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process_group, name)

    def start(self, *args: Any, **settings: Any) -> Any:
        if self.left:
            self.left -= 1
            raise StartError("there is no process")
        return self._process_group.start(*args, **settings)


def test_a_pool_waits_for_as_long_as_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always = RestartPolicy.always(backoff=0.3, max_backoff=0.3)
    with ActorPool([ENV] * 2, num_actors=1, restart=always) as pool:
        pool.reset(seed=1)
        pool.recv(2)  # on a busy machine this takes longer than the 0.1 s
        monkeypatch.setattr(waiting_note, "_SECONDS", 0.1)
        pool._fleet._note = waiting_note.WaitingNote(2)
        connections: Any = pool._fleet._connections
        connections.process_group = poor = PoorProcessGroup(connections.process_group, 4)
        kill(pool.actor_pids()[0])
        pool.send(np.ones(2, np.int64), np.arange(2))
        faults, received = 0, 0
        while received < 2:
            batch = pool.recv(timeout=0.05)
            faults, received = faults + len(batch.faults), received + len(batch.env_ids)
        assert (faults, poor.left) == (2, 0)
        connections.process_group = poor._process_group
    assert "with `num_actors" not in caplog.text
