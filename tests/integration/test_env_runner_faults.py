from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.restart import RestartPolicy
from envbus.runner.callbacks import Callbacks
from envbus.runner.env_runner import EnvRunner
from envbus.runner.faults import EnvError, FaultCause
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from tests.runner.pool_envs import PATIENCE

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


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[ActorPool] = []

    def _make(envs: Any, mode: str, restart: bool = True, **config: Any) -> EnvRunner:
        pool = ActorPool(
            envs,
            num_actors=len(envs),
            autoreset_mode=mode,
            restart_failed_sub_environments=restart,
            restart_policy=RestartPolicy(max_restarts=2, backoff=0.01) if restart else None,
        )
        pools.append(pool)
        return EnvRunner(pool, lambda seen: np.zeros(len(seen), np.int64), RunnerConfig(**config))

    yield _make
    for pool in pools:
        pool.close(terminate=True)


@BOTH
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_r_12_a_faulty_episode_is_dropped_or_cut_and_the_others_are_untouched(
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
def test_r_13_fragments_of_a_faulty_episode_that_have_left_can_be_found(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make([functools.partial(CountingEnv, 1000)] * 2, mode, vectorized=vectorized)
    first = runner.sample(num_env_steps=10).single()
    os.kill(runner.envs.actor_pids()[0], signal.SIGKILL)
    second = runner.sample(num_env_steps=10, timeout=PATIENCE).single()
    assert runner.get_metrics()["faulty_eps_ids"] == [first["eps_id"][0]]
    assert second["t"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert second["incarnation"].tolist() == [1] * 5 + [0] * 5


@BOTH
def test_an_env_that_is_given_up_leaves_the_others(make: Make, mode: str, vectorized: bool) -> None:
    runner = make([FailsAlways, functools.partial(CountingEnv, 3)], mode, vectorized=vectorized)
    sample = runner.sample(num_env_steps=12, timeout=PATIENCE)
    assert sample.single()["env_id"].tolist() == [1] * 6
    assert sample.faults[-1].given_up
    assert runner.sample(num_env_steps=12).single()["env_id"].tolist() == [1] * 12
    with pytest.raises(RestartLimitError, match=r"envs \[0\] of 2 failed too often"):
        runner.assert_healthy()


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


def test_r_07_r_08_each_episode_is_created_once_and_ends_once_also_by_a_fault(
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
