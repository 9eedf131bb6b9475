from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.errors import EnvError, Fault, FaultCause
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.workers.recycling import RecycleAfter
from tests.runner.pool_envs import PATIENCE
from tests.runner.sampling.test_column_sampler import Elsewhere, Here
from tests.runner.sampling_scenes import zeros
from tests.waiting import pass_time, wait_until

Make = Callable[..., EnvRunner]
WAYS = [("NextStep", True), ("Disabled", True), ("Disabled", False)]
BOTH = pytest.mark.parametrize(("mode", "vectorized"), WAYS, ids=["next-step", "columns", "dicts"])


class FailsOnce(CountingEnv):
    """Raises in one step of its second episode; those that are made anew do not."""

    made_in: Any = None

    def step(self, action: Any) -> Any:
        if self.episode == 2 and self.steps_taken == 2 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            raise RuntimeError("broken")
        self.steps_taken += 1
        return super().step(action)

    def __init__(self, mark: str, length: int) -> None:
        super().__init__(length)
        self.mark = mark
        self.steps_taken = 0

    def reset(self, **kwargs: Any) -> Any:
        self.steps_taken = 0
        return super().reset(**kwargs)


class ExitsOnce(FailsOnce):
    """Ends its process in that step."""

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except RuntimeError:
            os._exit(1)


class FailsAlways(CountingEnv):
    def step(self, action: Any) -> Any:
        raise RuntimeError("broken")


class Log(Callbacks):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_sub_environment_created(self, *, env_id: int, incarnation: int) -> None:
        self.calls.append(("env", env_id, incarnation))

    def on_fault(self, *, fault: Any) -> None:
        self.calls.append(("fault", fault.env_id, str(fault.error).splitlines()[0][-6:]))


def started_again(envs: Any, pools: list[ActorPool], **settings: Any) -> ActorPool:
    """Return a pool that makes envs and actors anew, and is killed at the end of the test."""
    restart = {
        "restart": RestartPolicy(max_restarts=9, backoff=0.01),
    }
    pools.append(ActorPool(envs, **{**restart, **settings}))
    return pools[-1]


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(envs: Any, mode: str, restart: bool = True, **config: Any) -> EnvRunner:
        policy = RestartPolicy(max_restarts=2, backoff=0.01) if restart else None
        pool = started_again(
            envs,
            pools,
            num_actors=len(envs),
            autoreset_mode=mode,
            restart=policy if restart else False,
        )
        return EnvRunner(pool, zeros, RunnerConfig(**config))

    return _make


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_a_faulty_episode_is_dropped_or_cut_and_the_others_are_untouched(
    make: Make, mode: str, vectorized: bool, kept: bool, tmp_path: Any
) -> None:
    envs = [
        functools.partial(FailsOnce, str(tmp_path / "mark"), 5),
        functools.partial(CountingEnv, 5),
    ]
    log = Log()
    runner = make(
        envs,
        mode,
        vectorized=vectorized,
        callbacks=log,
        rollout_fragment_length=10,
        faulty_episodes="truncate" if kept else "drop",
    )
    sample = runner.sample(timeout=PATIENCE)
    batch = sample.single()
    mine = batch[batch["env_id"] == 0]
    other = batch[batch["env_id"] == 1]
    assert other["t"].tolist() == [0, 1, 2, 3, 4] * 2
    if kept:
        assert mine["t"].tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
        assert mine["truncateds"].tolist()[6]
        assert mine["incarnation"].tolist() == [0] * 7 + [1] * 3
    else:
        assert mine["t"].tolist() == [0, 1, 2, 3, 4] * 2
        assert mine["incarnation"].tolist() == [0] * 5 + [1] * 5
    assert [fault.env_id for fault in sample.faults] == [0]
    metrics = runner.get_metrics()
    assert (metrics["num_faulty_episodes"], metrics["num_env_restarts"]) == (1, 1)
    assert metrics["num_dropped_rows"] == (0 if kept else 2)
    assert log.calls == [("env", 0, 0), ("env", 1, 0), ("fault", 0, "broken"), ("env", 0, 1)]


@BOTH
def test_fragments_of_a_faulty_episode_that_have_left_can_be_found(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make([functools.partial(CountingEnv, 1000)] * 2, mode, vectorized=vectorized)
    first = runner.sample(num_env_steps=10).single()
    os.kill(runner.envs.actor_pids()[0], signal.SIGKILL)
    second = runner.sample(num_env_steps=10, timeout=PATIENCE).single()
    assert runner.get_metrics()["faulty_eps_ids"] == [first["eps_id"][0]]
    assert second["t"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert second["incarnation"].tolist() == [1] * 5 + [0] * 5


@pytest.mark.slow_but_first
@BOTH
def test_an_env_that_is_given_up_leaves_the_others(make: Make, mode: str, vectorized: bool) -> None:
    runner = make([FailsAlways, functools.partial(CountingEnv, 3)], mode, vectorized=vectorized)
    sample = runner.sample(num_env_steps=12, timeout=PATIENCE)
    assert sample.single()["env_id"].tolist() == [1] * 6
    assert sample.faults[-1].given_up
    assert runner.sample(num_env_steps=12).single()["env_id"].tolist() == [1] * 12
    with pytest.raises(RestartLimitError, match=r"envs \[0\] of 2 failed too often"):
        runner.assert_healthy()


@pytest.mark.slow_but_first
@BOTH
def test_without_restart_the_error_comes_out_and_the_next_sample_begins_anew(
    make: Make, mode: str, vectorized: bool, tmp_path: Any
) -> None:
    mark = str(tmp_path / "mark")
    runner = make(
        [functools.partial(FailsOnce, mark, 5), functools.partial(CountingEnv, 5)],
        mode,
        restart=False,
        vectorized=vectorized,
    )
    with pytest.raises(RuntimeError, match="broken"):
        runner.sample(num_env_steps=40)
    assert runner.sample(num_env_steps=20).single()["t"].tolist() == [0, 1, 2, 3, 4] * 4


class Episodes(Callbacks):
    """What happened, in order, by episode."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Any]] = {}
        self.envs: list[tuple[int, int]] = []
        self.faults: list[Any] = []
        self.samples = 0

    def on_sub_environment_created(self, *, env_id: int, incarnation: int) -> None:
        self.envs.append((env_id, incarnation))

    def on_episode_created(self, *, episode: Any) -> None:
        self.calls.setdefault(episode.eps_id, []).append("created")

    def on_episode_start(self, *, episode: Any) -> None:
        self.calls[episode.eps_id].append("start")

    def on_episode_step(self, *, episode: Any) -> None:
        self.calls[episode.eps_id].append("step")

    def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
        assert episode.faulty is (fault is not None)
        self.calls[episode.eps_id].append("end")
        if fault is not None:
            self.faults.append((fault.cause, type(fault.error)))

    def on_sample_end(self, *, sample: Any) -> None:
        self.samples += 1


def test_each_episode_is_created_once_and_ends_once_also_by_a_fault(
    make: Make, tmp_path: Any
) -> None:
    envs = [
        functools.partial(FailsOnce, str(tmp_path / "mark"), 5),
        functools.partial(CountingEnv, 5),
    ]
    log = Episodes()
    runner = make(envs, "Disabled", callbacks=log, rollout_fragment_length=8)
    steps = 0
    for _ in range(3):
        steps += runner.sample(timeout=PATIENCE).env_steps
    os.kill(runner.envs.actor_pids()[1], signal.SIGKILL)
    for _ in range(2):
        steps += runner.sample(timeout=PATIENCE).env_steps
    assert log.samples == 5
    assert sorted(log.envs) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert log.faults == [(FaultCause.ERROR, EnvError), (FaultCause.CRASH, type(None))]
    for calls in log.calls.values():
        steps_of = calls.count("step")
        whole = ["created", "start", *["step"] * steps_of, "end"]
        assert calls == whole[: len(calls)]  # those that run have not ended
    ends = sum("end" in calls for calls in log.calls.values())
    starts = sum("start" in calls for calls in log.calls.values())
    assert ends <= starts <= ends + 2
    taken = sum(calls.count("step") for calls in log.calls.values())
    assert taken == steps + runner.get_metrics()["num_dropped_rows"]


@pytest.mark.slow_but_first
@BOTH
def test_who_has_contributed_its_episode_and_begins_anew_with_its_process_plays_no_other(
    mode: str, vectorized: bool, tmp_path: Any
) -> None:
    envs = [
        functools.partial(CountingEnv, 1),
        functools.partial(ExitsOnce, str(tmp_path / "mark"), 5),
    ]
    policy = RestartPolicy(backoff=0.01)
    with ActorPool(envs, autoreset_mode=mode, num_actors=1, restart=policy) as pool:
        config = RunnerConfig(vectorized=vectorized)
        runner = EnvRunner(pool, lambda seen: np.zeros(len(seen), np.int64), config)
        for _ in range(3):
            sample = runner.sample(num_episodes=2, timeout=PATIENCE)
            assert sample.single()["env_id"].tolist() == [0, 1, 1, 1, 1, 1]
        assert pool.statistics().restarts == 1


@BOTH
def test_who_has_contributed_its_episode_may_be_recycled(mode: str, vectorized: bool) -> None:
    recycle = RecycleAfter(episodes=1)
    envs = [functools.partial(CountingEnv, 3)] * 4
    with ActorPool(envs, autoreset_mode=mode, num_actors=2, recycle_after=recycle) as pool:
        config = RunnerConfig(vectorized=vectorized)
        runner = EnvRunner(pool, lambda seen: np.zeros(len(seen), np.int64), config)
        for _ in range(8):
            sample = runner.sample(num_episodes=2, timeout=PATIENCE)
            assert sample.single()["t"].tolist() == [0, 1, 2] * 2
        assert pool.statistics().recycled


class Slow(CountingEnv):
    """Takes its time, and in its 14th step until another has run ahead."""

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def step(self, action: Any) -> Any:
        pass_time(0.005)
        if (self.episode, self.count) == (2, 3):
            wait_until(self.mark.exists, "who runs ahead")
        return super().step(action)


class RunsAhead(Slow):
    """Leaves a mark in its 29th step, within its third episode."""

    def step(self, action: Any) -> Any:
        if (self.episode, self.count) == (3, 8):
            self.mark.touch()
        return CountingEnv.step(self, action)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("faulty", ["drop", "truncate"])
def test_a_killed_env_that_ran_ahead_has_only_the_rows_it_may_have(
    pools: list[ActorPool], faulty: Literal["drop", "truncate"], tmp_path: Path
) -> None:
    # Env 0 is slow; 1 and 2 run ahead of it, 1 as far as it may until it is killed.
    mark = tmp_path / "mark"
    envs = [
        functools.partial(Slow, 10, mark),
        functools.partial(RunsAhead, 10, mark),
        functools.partial(CountingEnv, 10),
    ]
    pool = started_again(envs, pools, num_actors=3)
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


def two_groups(pools: list[ActorPool]) -> ActorPool:
    """Return two envs in each of two actors: 0 and 2 are one group, 1 and 3 the other."""
    pool = started_again([functools.partial(CountingEnv, 10)] * 4, pools, num_actors=2)
    assert pool.env_groups(2) == [[0, 2], [1, 3]]
    return pool


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
def test_a_fault_in_one_group_leaves_the_others_whole(pools: list[ActorPool], policy: Any) -> None:
    pool = two_groups(pools)
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


def test_an_env_that_fails_while_its_action_is_chosen_gets_no_row_for_it(
    pools: list[ActorPool],
) -> None:
    policy = Elsewhere()
    pool = two_groups(pools)
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
