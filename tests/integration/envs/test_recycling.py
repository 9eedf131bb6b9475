"""Actors that are exchanged for fresh ones while they work, and those that use too much memory."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.bus.memory.usage import tree_memory
from envbus.runner import ActorLostError, ActorPool, FaultCause, Hooks, RecycleAfter, Timeouts
from envbus.runner.engine.seeding import restart_seed
from tests.integration.group_children import is_alive
from tests.integration.recycling_envs import (
    MB,
    GreedyEnv,
    LeakingEnv,
    Ledger,
    LedgerEnv,
    read_ledger,
)
from tests.runner.pool_envs import PATIENCE, receive_all, receive_until_back, split
from tests.waiting import pass_time, wait_until

pytestmark = pytest.mark.timeout(180)

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
NEVER = 10**9


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbus.runner.workers.lifecycle._MEMORY_INTERVAL", 0.05)
    monkeypatch.setattr("envbus.runner.workers.lifecycle._MAX_MEMORY_SHARE", 1.0)


class Driver:
    """Steps all envs of a pool and checks that each row follows from the one before."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool
        self.steps = [0] * pool.num_envs
        #: Rows that were the first of an episode.
        self.firsts = [0] * pool.num_envs
        self._last: dict[int, dict[str, Any]] = {}

    def run(self, recycled: int) -> None:
        """Go on until so many actors were recycled."""
        pool = self.pool
        while pool.statistics().recycled < recycled:
            batch = pool.recv(timeout=PATIENCE)
            assert not batch.faults
            assert not batch.late
            self._send(split(batch))

    def finish(self) -> None:
        """Take what is under way, so that the ledgers can be compared."""
        while self.pool._states.awaited() or self.pool._states.num_ready:
            self._take(split(self.pool.recv(timeout=PATIENCE)))

    def _send(self, rows: dict[int, dict[str, Any]]) -> None:
        self._take(rows)
        pool = self.pool
        ended = [i for i, row in rows.items() if row["terminated"] or row["truncated"]]
        if pool.autoreset_mode is AutoresetMode.DISABLED and ended:
            pool.reset(env_ids=ended)
            rows = {i: row for i, row in rows.items() if i not in ended}
        if rows:
            pool.send(np.ones(len(rows), np.int64), list(rows))

    def _take(self, rows: dict[int, dict[str, Any]]) -> None:
        same_step = self.pool.autoreset_mode is AutoresetMode.SAME_STEP
        for env_id, row in rows.items():
            last = self._last.get(env_id)
            self._last[env_id] = row
            episode, step = row["observation"][:2]
            ended = row["terminated"] or row["truncated"]
            if step == 0 and not (same_step and ended):
                self.firsts[env_id] += 1
                assert not ended
                assert last is None or last["terminated"] or last["truncated"]
                continue
            self.steps[env_id] += 1
            assert last is not None
            assert row["incarnation"] == last["incarnation"]
            if step:  # else the observation is the next episode's
                assert [episode, step - 1] == last["observation"][:2].tolist()


def check_ledgers(driver: Driver, paths: list[Path]) -> list[Ledger]:
    ledgers = [read_ledger(path) for path in paths]
    assert [ledger.steps for ledger in ledgers] == driver.steps
    return ledgers


@pytest.mark.slow_but_first
@MODES
def test_no_step_is_lost_or_doubled_and_one_actor_at_a_time_is_away(
    tmp_path: Path, mode: AutoresetMode
) -> None:
    paths = [tmp_path / f"env-{env_id}" for env_id in range(3)]
    restarted: list[tuple[int, int]] = []
    with ActorPool(
        [partial(LedgerEnv, path, 4 + i) for i, path in enumerate(paths)],
        num_actors=3,
        autoreset_mode=mode,
        recycle_after=RecycleAfter(steps=20),
        hooks=Hooks(on_restart=lambda env_id, life: restarted.append((env_id, life))),
    ) as pool:
        pids = pool.actor_pids()
        driver = Driver(pool)
        pool.reset(seed=0)
        driver.run(recycled=12)
        driver.finish()
        statistics = pool.statistics()
        assert not set(pids) & set(pool.actor_pids())
        assert not any(is_alive(pid) for pid in pids)
    assert (statistics.restarts, statistics.faults) == (0, {})
    ledgers = check_ledgers(driver, paths)
    assert sum(ledger.made for ledger in ledgers) == 3 + statistics.recycled
    gaps = sorted(gap for ledger in ledgers for gap in ledger.gaps)
    assert len(gaps) == statistics.recycled  # all were closed, none was killed
    for (_, made), (closed, _) in itertools.pairwise(gaps):
        assert made < closed
    lives: defaultdict[int, list[int]] = defaultdict(list)
    for env_id, life in restarted:
        lives[env_id].append(life)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in lives.values())
    assert len(restarted) == statistics.recycled


@pytest.mark.slow_but_first
@MODES
def test_the_envs_of_one_actor_wait_for_each_other(tmp_path: Path, mode: AutoresetMode) -> None:
    paths = [tmp_path / f"env-{env_id}" for env_id in range(4)]
    with ActorPool(
        [partial(LedgerEnv, path, 3 + 2 * i) for i, path in enumerate(paths)],
        num_actors=2,
        autoreset_mode=mode,
        recycle_after=RecycleAfter(episodes=6),
        restart=True,
    ) as pool:
        driver = Driver(pool)
        pool.reset(seed=0)
        driver.run(recycled=6)
        driver.finish()
        statistics = pool.statistics()
    assert (statistics.restarts, statistics.faults) == (0, {})
    ledgers = check_ledgers(driver, paths)
    assert sum(ledger.made for ledger in ledgers) == 4 + 2 * statistics.recycled


def test_the_envs_of_a_vector_env_are_held_when_they_end_together() -> None:
    together = partial(SyncVectorEnv, [partial(CountingEnv, 3)] * 2)
    apart = partial(SyncVectorEnv, [partial(CountingEnv, 3), partial(CountingEnv, 4)])
    with ActorPool([together, apart], num_actors=2, recycle_after=RecycleAfter(steps=10)) as pool:
        pool.reset(seed=0)
        driver = Driver(pool)
        driver.run(recycled=4)
        assert pool.statistics().restarts == 0


def test_an_episode_that_never_ends_holds_the_others_for_a_while_only(tmp_path: Path) -> None:
    paths = [tmp_path / f"env-{env_id}" for env_id in range(2)]
    with ActorPool(
        [partial(LedgerEnv, path, length) for path, length in zip(paths, [3, NEVER], strict=True)],
        num_actors=1,
        recycle_after=RecycleAfter(steps=1, max_hold=0.05),
    ) as pool:
        driver = Driver(pool)
        pool.reset(seed=0)
        while driver.firsts[0] < 10:
            driver._send(split(pool.recv(timeout=PATIENCE)))
        driver.finish()
        assert pool.statistics().recycled == 0
        assert driver.firsts[1] == 1
    check_ledgers(driver, paths)


def test_who_waits_for_a_held_env_alone_gets_it(tmp_path: Path) -> None:
    with ActorPool(
        [partial(CountingEnv, 3), partial(CountingEnv, NEVER)],
        num_actors=1,
        recycle_after=RecycleAfter(steps=1, max_hold=1000.0),
    ) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(2))
        for episode in (1, 2, 3):
            for step in (1, 2, 3):
                pool.send(np.zeros(1, np.int64), [0])
                row = receive_all(pool, [0])[0]
                assert row["observation"].tolist()[:2] == [episode, step]
            pool.send(np.zeros(1, np.int64), [0])  # accepted also while it is held
            row = receive_all(pool, [0])[0]
            assert row["observation"].tolist()[:2] == [episode + 1, 0]
        assert pool.statistics().recycled == 0


def test_a_held_env_that_goes_on_under_same_step_is_in_another_life() -> None:
    """Its last row has shown the first observation of an episode that is not played."""
    with ActorPool(
        [partial(CountingEnv, 3), partial(CountingEnv, NEVER)],
        num_actors=1,
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(steps=1, max_hold=1000.0),
    ) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(2))
        for place, life in (([1, 1], 0), ([1, 2], 0), ([2, 0], 0), ([3, 0], 1)):
            pool.send(np.zeros(1, np.int64), [0])
            row = receive_all(pool, [0])[0]
            assert row["observation"].tolist()[:2] == place
            assert row["incarnation"] == life
            assert row["terminated"] == (place == [2, 0])
        assert pool.statistics().recycled == 0


def test_a_crash_of_a_fresh_process_cuts_off_no_episode_that_is_not_played() -> None:
    """Its last row has shown the first observation of one, and the fresh one's was not received."""
    with ActorPool(
        [partial(CountingEnv, 3), partial(CountingEnv, NEVER)],
        num_actors=2,
        autoreset_mode=AutoresetMode.SAME_STEP,
        restart=True,
        recycle_after=RecycleAfter(episodes=2),
    ) as pool:
        pool.reset(seed=0)
        receive_all(pool, range(2))
        pid = pool.actor_pids()[0]
        for _ in range(3):
            pool.send(np.zeros(1, np.int64), [0])
            receive_all(pool, [0])
        env, other = pool.get_sub_environments()

        def is_back() -> bool:
            other.get_attr("count")  # takes what has arrived
            try:
                return env.get_attr("episode") == 1
            except ActorLostError:  # of what is started again
                return False

        wait_until(is_back, "the fresh process has reset its env")
        assert pool.statistics().recycled == 1
        assert pool.actor_pids()[0] != pid
        os.kill(pool.actor_pids()[0], signal.SIGKILL)
        with pytest.raises(ActorLostError):
            env.get_attr("count")
        pool.send(np.zeros(1, np.int64), [0])  # for the episode that is not played
        batch = receive_until_back(pool, 0)
        assert pool.statistics().faults == {"crash": 1}
        assert split(batch)[0]["observation"].tolist()[:2] == [1, 0]
        assert split(batch)[0]["incarnation"] == 2
        assert not batch.truncations.any()
        assert "final_obs" not in batch.infos


def test_a_new_life_is_seeded_as_after_a_fault(tmp_path: Path) -> None:
    with ActorPool(
        [partial(CountingEnv, 3)] * 2, num_actors=2, recycle_after=RecycleAfter(episodes=1)
    ) as pool:
        pool.reset(seed=[10, 20])
        driver = Driver(pool)
        while pool.statistics().recycled < 4:
            batch = pool.recv(timeout=PATIENCE)
            for env_id, row in split(batch).items():
                life = int(row["incarnation"])
                if life and row["observation"][:2].tolist() == [1, 0]:
                    assert row["observation"][3] == restart_seed([10, 20][env_id], env_id, life)
            driver._send(split(batch))


def test_a_crash_while_envs_are_held_is_a_fault_and_recycling_goes_on(tmp_path: Path) -> None:
    with ActorPool(
        [partial(CountingEnv, 3), partial(CrashingEnv, 12)],
        num_actors=1,
        recycle_after=RecycleAfter(steps=1, max_hold=1000.0),
        restart=True,
    ) as pool:
        pool.reset(seed=0)
        faults: list[Any] = []
        while len(faults) < 2:
            batch = pool.recv(timeout=PATIENCE)
            faults += batch.faults
            if len(batch.env_ids):
                pool.send(np.zeros(len(batch.env_ids), np.int64), batch.env_ids)
        assert sorted(fault.env_id for fault in faults) == [0, 1]
        assert {fault.cause for fault in faults} == {FaultCause.CRASH}
        assert receive_until_back(pool, 0).incarnations[0] == 1


class CrashingEnv(CountingEnv):
    """Ends its process at one step, of the first episode that gets there."""

    def __init__(self, at: int) -> None:
        super().__init__(NEVER)
        self._at = at

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[0][1] == self._at:
            os._exit(7)
        return result


@pytest.mark.slow
def test_an_env_that_does_not_close_is_killed_and_recycled_all_the_same(tmp_path: Path) -> None:
    with ActorPool(
        [NeverClosingEnv], recycle_after=RecycleAfter(steps=1), timeouts=Timeouts(close=0.2)
    ) as pool:
        pool.reset(seed=0)
        Driver(pool).run(recycled=2)
        pool.close(terminate=True)


class NeverClosingEnv(CountingEnv):
    def close(self) -> None:
        threading.Event().wait(1000.0)


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("quick_looks")
def test_recycling_keeps_the_memory_of_an_env_that_leaks_bounded() -> None:
    limit = 250
    most = 0.0
    with ActorPool([LeakingEnv], recycle_after=RecycleAfter(rss_mb=limit)) as pool:
        (pid,) = pool.actor_pids()
        assert tree_memory([pid])[pid] < 150 * MB
        driver = Driver(pool)
        pool.reset(seed=0)
        while pool.statistics().recycled < 5:
            for _ in range(10):
                driver._send(split(pool.recv(timeout=PATIENCE)))
            pass_time(0.02)  # it grows no faster than memory is looked at, on a busy machine too
            most = max(most, *(size / MB for size in tree_memory(pool.actor_pids()).values()))
        assert pool.statistics().faults == {}
    assert driver.steps[0] / 4 > 5 * 100  # MiB in all
    assert most < limit + 150


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("action", [13, 14], ids=["itself", "its child"])
def test_an_actor_over_its_limit_is_killed_and_its_envs_come_back(action: int) -> None:
    with ActorPool([GreedyEnv] * 2, num_actors=2, memory_limit_mb=280, restart=True) as pool:
        pids = pool.actor_pids()
        pool.reset(seed=0)
        receive_all(pool, range(2))
        pool.send(np.array([action, 1]))
        faults = []
        while not faults:
            batch = pool.recv(timeout=PATIENCE)
            faults += batch.faults
        (fault,) = faults
        assert (fault.env_id, fault.cause) == (0, FaultCause.MEMORY)
        assert str(pids[0]) in fault.message
        assert "memory_limit_mb is 280" in fault.message
        if 0 not in batch.env_ids:
            assert receive_until_back(pool, 0).incarnations[0] == 1
        assert pool.statistics().faults == {"memory": 1}
        assert pool.actor_pids()[1] == pids[1]


@pytest.mark.usefixtures("quick_looks")
def test_without_restart_the_loss_says_what_the_limit_was() -> None:
    with ActorPool([GreedyEnv], memory_limit_mb=280) as pool:
        pool.reset(seed=0)
        receive_all(pool, [0])
        pool.send(np.array([13]))
        with pytest.raises(ActorLostError, match=r"was killed: it used \d+ MiB.* memory_limit_mb"):
            pool.recv(timeout=PATIENCE)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_an_unusable_limit_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="memory_limit_mb"):
        ActorPool([CountingEnv], memory_limit_mb=limit)


def test_recycling_at_more_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be less than memory_limit_mb"):
        ActorPool([CountingEnv], memory_limit_mb=100, recycle_after=RecycleAfter(rss_mb=100))
