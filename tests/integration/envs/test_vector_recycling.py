"""`BusVectorEnv` whose actors are exchanged for fresh ones, or use too much memory."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envbus.actors.testing import CountingEnv
from envbus.bus.memory.usage import tree_memory
from envbus.runner import ActorLostError, BusVectorEnv, Hooks, RecycleAfter, make_vec
from envbus.runner.engine.seeding import restart_seed
from tests.integration.group_children import PATIENCE, is_alive, wait_until
from tests.integration.recycling_envs import MB, GreedyEnv, LeakingEnv, LedgerEnv, read_ledger
from tests.integration.row_model import RAISE, LifeEnv, reward_of
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbus.runner.workers.lifecycle._MEMORY_INTERVAL", 0.05)
    monkeypatch.setattr("envbus.runner.workers.lifecycle._MAX_MEMORY_SHARE", 1.0)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("restart", [True, False], ids=["restart", "raise"])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
def test_under_next_step_no_step_is_lost_or_doubled(
    tmp_path: Path, shared_memory: bool, restart: bool
) -> None:
    paths = [tmp_path / f"env-{env_id}" for env_id in range(3)]
    lives: Counter[int] = Counter()
    envs = BusVectorEnv(
        [partial(LedgerEnv, path, 4 + i) for i, path in enumerate(paths)],
        num_actors=3,
        shared_memory=shared_memory,
        recycle_after=RecycleAfter(steps=20),
        restart=restart,
        hooks=Hooks(on_restart=lambda env_id, life: lives.update([env_id])),
    )
    pids = envs.actor_pids()
    last, _ = envs.reset(seed=0)
    ended = np.zeros(3, bool)
    steps = [0] * 3
    seeds = list(range(3))
    while envs.statistics().recycled < 9:
        observations, rewards, terminated, truncated, infos = envs.step(np.ones(3, np.int64))
        assert "fault" not in infos
        for i in range(3):
            episode, step, _, seed = observations[i]
            if ended[i]:
                assert step == rewards[i] == 0
                assert not terminated[i]
                assert not truncated[i]
                if episode == 1:
                    seeds[i] = restart_seed(i, i, lives[i]) or 0
                    assert seed == seeds[i]
                else:
                    assert episode == last[i][0] + 1
            else:
                steps[i] += 1
                assert [episode, step - 1] == last[i][:2].tolist()
        last, ended = observations, terminated | truncated
    statistics = envs.statistics()
    assert (statistics.restarts, statistics.faults) == (0, {})
    assert not any(is_alive(pid) for pid in pids)
    envs.close()
    ledgers = [read_ledger(path) for path in paths]
    assert [ledger.steps for ledger in ledgers] == steps
    assert sum(lives.values()) == 9
    gaps = sorted(gap for ledger in ledgers for gap in ledger.gaps)
    assert len(gaps) == 9
    for (_, made), (closed, _) in itertools.pairwise(gaps):
        assert made < closed


@pytest.mark.slow_but_first
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
def test_under_same_step_no_step_is_lost_or_doubled(tmp_path: Path, shared_memory: bool) -> None:
    paths = [tmp_path / f"env-{env_id}" for env_id in range(4)]
    lives: Counter[int] = Counter()
    lengths = [4, 4, 5, 6]  # the first two are in one actor
    envs = BusVectorEnv(
        [partial(LedgerEnv, path, length) for path, length in zip(paths, lengths, strict=True)],
        num_actors=2,
        shared_memory=shared_memory,
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(steps=40),
        hooks=Hooks(on_restart=lambda env_id, life: lives.update([env_id])),
    )
    last, _ = envs.reset(seed=0)
    steps = 0
    while envs.statistics().recycled < 6:
        before = lives.copy()
        observations, rewards, terminated, truncated, infos = envs.step(np.ones(4, np.int64))
        steps += 1
        assert "fault" not in infos
        for i in range(4):
            episode, step, _, seed = observations[i]
            if not (terminated[i] or truncated[i]):
                assert [episode, step - 1] == last[i][:2].tolist()
                assert rewards[i] == 10 * episode + step
                continue
            final = infos["final_obs"][i]
            assert final[:2].tolist() == [last[i][0], lengths[i]] == [last[i][0], last[i][1] + 1]
            assert rewards[i] == 10 * final[0] + final[1]
            assert infos["episode"][i] == episode
            if lives[i] > before[i]:
                assert (episode, step) == (1, 0)
                assert seed == restart_seed(i, i, lives[i])
            else:
                assert (episode, step) == (last[i][0] + 1, 0)
        last = observations
    envs.close()
    assert [read_ledger(path).steps for path in paths] == [steps] * 4
    assert sum(read_ledger(path).made for path in paths) == 4 + 2 * 6
    assert (lives[0], lives[2]) == (lives[1], lives[3])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_envs_of_one_actor_that_never_end_together_are_cut_after_a_while(mode: str) -> None:
    lengths = [3, 5, 10**6]
    envs = BusVectorEnv(
        [partial(LifeEnv, length) for length in lengths],
        num_actors=1,
        autoreset_mode=mode,
        recycle_after=RecycleAfter(steps=60, max_hold=1e-6),
    )
    try:
        last, _ = envs.reset()
        over = np.zeros(3, np.bool_)
        cuts = 0
        while envs.statistics().recycled < 3:
            observations, rewards, terminated, truncated, infos = envs.step(np.zeros(3))
            assert "fault" not in infos
            cut = infos.get("recycled", np.zeros(3, np.bool_))
            assert truncated.tolist() == cut.tolist()
            assert not (cut & over).any()
            cuts += int(cut.any())
            for i, seen in enumerate(observations):
                if over[i]:
                    assert (seen[2], rewards[i], terminated[i]) == (0.0, 0.0, False)
                    continue
                if mode == "SameStep" and (terminated[i] or truncated[i]):
                    assert seen[2] == 0.0
                    seen = infos["final_obs"][i]
                assert seen[:3].tolist() == [*last[i][:2], last[i][2] + 1]
                assert rewards[i] == reward_of(seen)
            if mode == "NextStep":
                over = terminated | truncated
            last = observations
    finally:
        envs.close()
    assert cuts == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("restart", [False, True])
def test_a_fresh_process_that_dies_takes_no_result_away(tmp_path: Path, restart: bool) -> None:
    envs = BusVectorEnv(
        [partial(DyingOnceEnv, tmp_path / "died", 3)],
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(episodes=1),
        restart=restart,
    )
    try:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.ones(1, np.int64))
        if restart:
            *_, infos = rows = envs.step(np.ones(1, np.int64))
            assert infos["fault"]["cause"].tolist() == ["crash"]
        else:
            with pytest.raises(ActorLostError):
                envs.step(np.ones(1, np.int64))
            *_, infos = rows = envs.step_wait()
        _, rewards, terminated, truncated, _ = rows
        assert (rewards[0], terminated[0], truncated[0]) == (13.0, True, False)
        assert infos["final_obs"][0][:2].tolist() == [1, 3]
        if restart:
            observations, *_ = envs.step(np.ones(1, np.int64))
            assert observations[0, :2].tolist() == [1, 1]
    finally:
        envs.close(terminate=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("cause", ["crash", "error"])
def test_a_cut_episode_is_told_as_one_though_the_next_one_fails(tmp_path: Path, cause: str) -> None:
    kind = DyingOnceEnv if cause == "crash" else RaisingOnceEnv
    envs = BusVectorEnv(
        [partial(kind, tmp_path / "died", 100)],
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(steps=1, max_hold=1e-9),
        restart=True,
    )
    try:
        envs.reset()
        truncated, steps = np.zeros(1, np.bool_), 0
        while not truncated[0]:
            steps += 1
            _, rewards, terminated, truncated, infos = envs.step(np.ones(1, np.int64))
        assert infos["recycled"].tolist() == [True]
        assert infos["fault"]["cause"].tolist() == [cause]
        assert infos["final_obs"][0][:2].tolist() == [1, steps]
        assert "fault" not in infos["final_info"]
        assert (rewards[0], terminated[0]) == (10.0 + steps, False)
    finally:
        envs.close(terminate=True)


class DyingOnceEnv(CountingEnv):
    """Ends its process in the first reset of its second life."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(length)
        self._dies = path.exists() and path.stat().st_size == 1
        path.open("a").write(".")

    def reset(self, **kwargs: Any) -> Any:
        if self._dies:
            self._die()
        return super().reset(**kwargs)

    def _die(self) -> None:
        os._exit(5)


class RaisingOnceEnv(DyingOnceEnv):
    """Raises there instead."""

    def _die(self) -> None:
        raise ValueError("raised on purpose")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_reset_is_a_place_to_recycle_with_its_seeds_and_options(
    mode: AutoresetMode,
) -> None:
    envs = BusVectorEnv(
        [partial(CountingEnv, 100)] * 4,
        num_actors=2,
        autoreset_mode=mode,
        recycle_after=RecycleAfter(steps=4),
    )
    try:
        for number in range(5):
            observations, _ = envs.reset(seed=10 * number, options={"a": number})
            assert observations[:, 1].tolist() == [0] * 4
            assert observations[:, 3].tolist() == [10 * number + i for i in range(4)]
            options = envs.get_attr("options")
            assert [given[-1] for given in options] == [{"a": number}] * 4
            for step in (1, 2):
                observations, *_ = envs.step(np.zeros(4, np.int64))
                assert observations[:, 1].tolist() == [step] * 4
            assert envs.statistics().recycled == number
        observations, _ = envs.reset()  # a fresh env is seeded, the others go on
        assert all(seed is not None for seed in observations[:, 3])
    finally:
        envs.close()


def test_a_reset_of_all_envs_of_one_actor_by_mask_is_one_too() -> None:
    envs = BusVectorEnv(
        [partial(CountingEnv, 100)] * 4,
        num_actors=2,
        autoreset_mode=AutoresetMode.DISABLED,
        recycle_after=RecycleAfter(steps=2),
    )
    try:
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        pids = envs.actor_pids()
        envs.reset(options={"reset_mask": np.array([True, False, True, True])})
        assert envs.statistics().recycled == 1
        assert envs.actor_pids()[0] == pids[0]
        assert envs.actor_pids()[1] != pids[1]
        observations, *_ = envs.step(np.zeros(4, np.int64))
        assert observations[:, 1].tolist() == [1, 2, 1, 1]
    finally:
        envs.close()


def test_after_a_time_out_while_an_actor_is_exchanged_the_next_step_is_right() -> None:
    envs = BusVectorEnv(
        [partial(CountingEnv, 3)] * 2, num_actors=2, recycle_after=RecycleAfter(episodes=1)
    )
    try:
        envs.reset(seed=0)
        timeouts = 0
        last = [0, 0]
        while timeouts < 3:
            envs.step_async(np.zeros(2, np.int64))
            leaving = envs.statistics().actors_ready < 2
            missed = False
            try:
                observations, *_ = envs.step_wait(timeout=0.001 if leaving else PATIENCE)
            except multiprocessing.TimeoutError:
                timeouts += 1
                missed = True
                observations, *_ = envs.step(np.zeros(2, np.int64))
            for i in range(2):  # episodes are 0, 1, 2, 3; a row may be lost with its step
                step, ways = int(observations[i][1]), {(last[i] + 1) % 4}
                assert step in (ways | {(last[i] + 2) % 4} if missed else ways)
                last[i] = step
    finally:
        envs.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_looks")
def test_recycling_keeps_the_memory_of_an_env_that_leaks_bounded() -> None:
    limit, most, steps = 250, 0.0, 0
    envs = BusVectorEnv([LeakingEnv], recycle_after=RecycleAfter(rss_mb=limit))
    try:
        envs.reset(seed=0)
        while envs.statistics().recycled < 3:
            for _ in range(10):
                envs.step(np.zeros(1, np.int64))
                steps += 1
            pass_time(0.02)  # it grows no faster than memory is looked at, on a busy machine too
            most = max(most, *(size / MB for size in tree_memory(envs.actor_pids()).values()))
    finally:
        envs.close()
    assert steps / 4 > 3 * 100  # MiB in all
    assert most < limit + 150


@pytest.mark.usefixtures("quick_looks")
def test_an_actor_over_its_limit_is_killed_and_its_envs_come_back() -> None:
    settings: dict[str, Any] = {"memory_limit_mb": 280, "restart": True}
    envs = make_vec(GreedyEnv, 2, num_actors=2, vector_kwargs=settings)
    try:
        envs.reset(seed=0)
        _, rewards, terminated, truncated, infos = envs.step(np.array([13, 1]))
        assert truncated.tolist() == [True, False]
        assert not terminated.any()
        assert rewards[0] == 0.0
        assert infos["fault"]["cause"][0] == "memory"
        assert "memory_limit_mb is 280" in infos["fault"]["error"][0]
        observations, *_ = envs.step(np.array([1, 1]))
        assert observations[:, 1].tolist() == [0, 2]
        assert envs.statistics().faults == {"memory": 1}
    finally:
        envs.close()


@pytest.mark.usefixtures("quick_looks")
def test_without_restart_the_loss_says_what_the_limit_was() -> None:
    envs = BusVectorEnv([GreedyEnv], memory_limit_mb=280)
    try:
        envs.reset(seed=0)
        with pytest.raises(ActorLostError, match=r"was killed: it used \d+ MiB.* memory_limit_mb"):
            envs.step(np.array([13]))
    finally:
        envs.close(terminate=True)


class InterruptingEnv(LifeEnv):
    """Presses its driver's Ctrl-C in the first reset of its second life, and waits for a file."""

    def __init__(self, folder: Path, driver: int) -> None:
        super().__init__(3)
        self._folder, self._driver = folder, driver
        self._made = folder / f"made-{self.life}"
        self._made.touch()

    def reset(self, **kwargs: Any) -> Any:
        if self.episode == 0 and len(list(self._folder.glob("made-*"))) == 2:
            os.kill(self._driver, signal.SIGINT)
            wait_until((self._folder / "go on").exists, "what the driver does then")
        return super().reset(**kwargs)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("restart", [False, True], ids=["raises", "restarts"])
@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_an_exchange_in_a_step_goes_on_where_ctrl_c_broke_it_off(
    tmp_path: Path, restart: bool, timeout: float | None
) -> None:
    envs = BusVectorEnv(
        [partial(InterruptingEnv, tmp_path, os.getpid())],
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(episodes=1),
        restart=restart,
    )
    try:
        last, _ = envs.reset(seed=0)
        for _ in range(2):
            last, *_ = envs.step(np.ones(1))
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.ones(1))
        (tmp_path / "go on").touch()
        observations, rewards, terminated, truncated, infos = envs.step_wait(timeout)
        assert (terminated.tolist(), truncated.tolist()) == ([True], [False])
        assert infos["final_obs"][0].tolist() == [*last[0, :2], 3.0, 1.0]
        assert rewards[0] == reward_of(infos["final_obs"][0])
        assert "fault" not in infos
        life, episode, step, _ = observations[0]
        assert life != last[0, 0]
        assert step == 0
        observations, *_ = envs.step(np.ones(1))
        assert observations[0].tolist() == [life, episode, 1.0, 1.0]
        assert envs.statistics().recycled == 1
    finally:
        envs.close(terminate=True)


def test_a_fault_in_the_step_in_which_an_actor_is_exchanged_is_told() -> None:
    envs = BusVectorEnv(
        [partial(LifeEnv, 2), partial(LifeEnv, 100)],
        num_actors=1,
        autoreset_mode=AutoresetMode.SAME_STEP,
        recycle_after=RecycleAfter(steps=1),
        restart=True,
    )
    try:
        envs.reset()
        before, *_ = envs.step(np.ones(2))
        observations, rewards, terminated, truncated, infos = envs.step(np.array([1.0, RAISE]))
        assert envs.statistics().recycled == 1
        assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, True])
        assert rewards.tolist() == [102.0, 0.0]
        assert infos["fault"]["cause"].tolist() == [None, "error"]
        assert infos["final_obs"][1].tolist() == before[1].tolist()
        assert (observations[:, 0] != before[:, 0]).all()
        assert observations[:, 1:].tolist() == [[1.0, 0.0, 0.0]] * 2
    finally:
        envs.close(terminate=True)


def test_the_row_that_begins_an_episode_after_a_fault_is_not_cut_off() -> None:
    envs = BusVectorEnv(
        [partial(LifeEnv, 100)] * 2,
        num_actors=1,
        recycle_after=RecycleAfter(steps=1, max_hold=1e-9),
        restart=True,
    )
    try:
        envs.reset()
        cut = [envs.step(np.array(actions))[3] for actions in ([1.0, RAISE], [1.0] * 2, [1.0] * 2)]
        assert [row.tolist() for row in cut] == [[False, True], [False, False], [True, True]]
    finally:
        envs.close(terminate=True)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_hook_that_raises_when_an_actor_was_exchanged_takes_no_result_away(
    mode: AutoresetMode,
) -> None:
    def raise_it(_env_id: int, _life: int) -> None:
        raise RuntimeError("of a hook")

    envs = BusVectorEnv(
        [partial(LifeEnv, 2)],
        autoreset_mode=mode,
        recycle_after=RecycleAfter(episodes=1),
        hooks=Hooks(on_restart=raise_it),
    )
    try:
        first, _ = envs.reset()
        envs.step(np.ones(1))
        if mode is AutoresetMode.NEXT_STEP:
            envs.step(np.ones(1))
        with pytest.raises(RuntimeError, match="of a hook"):
            envs.step(np.ones(1))
        observations, *_ = envs.step_wait()
        assert observations[0, 0] != first[0, 0]
        assert observations[0, 1:].tolist() == [1.0, 0.0, 0.0]
    finally:
        envs.close(terminate=True)
