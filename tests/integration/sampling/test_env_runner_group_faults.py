"""What becomes of a group when runners, their envs or the driver fail, for real."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.error import NoAsyncCallError

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.errors import FaultCause
from envbus.runner.group.config import GroupConfig
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.policies.connectors import Normalize
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.workers.config import Timeouts
from tests.envs import HangingEnv
from tests.integration.group_children import PATIENCE, Driver, is_alive, traced, wait_until
from tests.runner.group.test_env_runner_group import Steps

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., EnvRunnerGroup]
AGAIN = RestartPolicy(max_restarts=2, backoff=0.01)
ENVS = [functools.partial(CountingEnv, 5)] * 4


@pytest.fixture
def make() -> Iterator[Make]:
    groups: list[EnvRunnerGroup] = []

    def _make(
        envs: Any = None,
        policies: Any = None,
        restart: bool | RestartPolicy = AGAIN,
        pool: Any = None,
        sample_timeout: float | None = 300.0,
        **config: Any,
    ) -> EnvRunnerGroup:
        group = EnvRunnerGroup(
            2,
            envs or ENVS,
            policies or Steps(),
            RunnerConfig(**config),
            settings=GroupConfig(
                restart=restart, sample_timeout=sample_timeout, pool_settings=pool or {}
            ),
        )
        groups.append(group)
        return group

    yield _make
    for group in groups:
        group.stop(terminate=True)


def below(pid: int) -> list[int]:
    """Return the processes that a runner has started: a fork server, and env actors below it."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def wait_until_ready(group: EnvRunnerGroup) -> None:
    wait_until(
        lambda: all(status.state == "ready" for status in group.probe(timeout=PATIENCE)),
        "all runners to run again",
    )


@pytest.mark.slow
@pytest.mark.parametrize("restart", [AGAIN, False])
def test_who_runs_tells_the_weights_that_a_dead_runner_was_asked_for(
    make: Make, restart: bool | RestartPolicy
) -> None:
    group = make(restart=restart)
    os.kill(group.runner_pids()[0], signal.SIGKILL)

    assert group.get_weights().keys() == {"default_policy"}

    if restart:  # also where nobody is there but who comes
        for pid in group.runner_pids():
            os.kill(pid, signal.SIGKILL)
        assert group.get_state()["weights"].keys() == {"default_policy"}


class Unsendable(Steps):
    """A policy that cannot be sent to a runner as long as it `is_busy`."""

    is_busy = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_busy:
            raise RuntimeError("the policy is busy")
        return super().__reduce_ex__(protocol)


@pytest.mark.slow
def test_a_policy_that_cannot_be_sent_to_a_next_life_is_a_failure_of_that_life(make: Make) -> None:
    policy = Unsendable()
    group = make(policies=policy, restart=RestartPolicy.always(backoff=0.01))
    policy.is_busy = True
    os.kill(group.runner_pids()[0], signal.SIGKILL)
    while group.statistics().restarts < 3:
        group.sample(8, timeout=PATIENCE)
    policy.is_busy = False
    wait_until_ready(group)
    assert group.sample(8, timeout=PATIENCE).runners == (0, 1)


@pytest.mark.slow
def test_weights_of_a_state_keep_their_version_whatever_was_asked_before_and_in_a_next_life(
    make: Make,
) -> None:
    group = make()
    group.set_weights({"default_policy": {"number": np.array([7])}}, version=4)
    state = group.get_state()
    group.set_weights({"default_policy": {"number": np.array([9])}}, version=30)
    group.sample_async(8)
    group.set_state(state)
    asked_before = group.collect(2, timeout=PATIENCE).single()
    assert chosen_by(asked_before) == {(9, 30)}
    assert group.policy_versions == group.get_state()["policy_versions"] == {"default_policy": 4}
    group.foreach(EnvRunner.set_weights, {"default_policy": {"number": np.array([11])}}, 50)
    assert group.policy_versions == {"default_policy": 50}
    assert group.get_state()["policy_versions"] == {"default_policy": 4}
    os.kill(group.runner_pids()[0], signal.SIGKILL)
    group.sample(8, timeout=PATIENCE)
    wait_until_ready(group)
    assert chosen_by(group.sample(8, timeout=PATIENCE).single()) == {(7, 4), (11, 50)}


def chosen_by(batch: Any) -> set[tuple[int, int]]:
    """Return the weights that chose the rows, and the versions that these name."""
    return set(zip(batch["actions"].tolist(), batch["policy_version"].tolist(), strict=True))


def test_a_killed_runners_share_is_lost_and_the_next_life_goes_on_with_weights_and_state(
    make: Make,
) -> None:
    group = make(
        observation_connector=Normalize(CountingEnv.observation_space), seed=5, worker_index=3
    )
    group.set_weights({"default_policy": {"number": np.array([7])}}, version=4)
    seen = set(group.sample(40, timeout=PATIENCE).single()["eps_id"].tolist())
    pid = group.runner_pids()[1]
    family = below(pid)
    assert len(family) >= 2
    os.kill(pid, signal.SIGSTOP)
    asked = group.sample_async(40)
    os.kill(pid, signal.SIGKILL)
    sample = group.collect(2, timeout=PATIENCE)
    assert asked == (0, 1)
    assert (sample.runners, sample.env_steps, sample.late_runners) == ((0,), 40, ())
    [fault] = sample.runner_faults
    assert (fault.runner, fault.cause, fault.restarts) == (1, FaultCause.CRASH, 0)
    assert fault.lost_share
    assert not fault.given_up
    assert f"pid {pid}" in fault.message
    assert "SIGKILL" in fault.message
    wait_until(lambda: not any(map(is_alive, family)), "the end of its env actors")
    seen |= set(sample.single()["eps_id"].tolist())
    wait_until_ready(group)
    group.assert_healthy()
    again = group.sample(40, timeout=PATIENCE)
    assert (again.runners, again.env_steps, again.runner_faults) == ((0, 1), 40, ())
    batch = again.single()
    fresh = batch[batch["env_id"] >= 2]
    assert batch["actions"].tolist() == [7] * 40
    assert set(batch["policy_version"].tolist()) == {4}
    assert set(fresh["env_id"].tolist()) == {2, 3}
    assert not seen & set(fresh["eps_id"].tolist())
    # Its filter has begun where the group's was: a lone first observation would become 0.
    assert np.abs(fresh["obs"][0]).max() > 0.0
    assert group.statistics().restarts == 1
    assert group.probe(timeout=PATIENCE)[1].incarnation == 1


@pytest.mark.slow
def test_a_sample_goes_on_with_the_others_while_one_runner_is_down(make: Make) -> None:
    group = make(restart=RestartPolicy(max_restarts=2, backoff=3.0, max_backoff=3.0))
    faults = []
    for _ in range(2):  # the first restart would be at once
        wait_until_ready(group)
        group.restart(1, "for a test")
        wait_until(lambda: group.probe(timeout=0.1)[1].state == "starting", "its end")
        sample = group.sample(30, timeout=PATIENCE)
        faults += sample.runner_faults
    assert (sample.runners, sample.env_steps) == ((0,), 30)
    # The other may have delivered before the second one's end was told.
    assert {(fault.runner, fault.cause) for fault in faults} == {(1, FaultCause.REQUEST)}
    assert all("for a test" in fault.message for fault in faults)


@pytest.mark.slow
def test_who_waits_for_runners_that_are_all_gone_is_told_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    group = make(restart=RestartPolicy(max_restarts=2, backoff=6.0, max_backoff=6.0))
    first = group.runner_pids()
    for runner in (0, 1):
        group.restart(runner, "for a test")
    wait_until(lambda: group.probe(0.1) and set(first).isdisjoint(group.runner_pids()), "new ones")
    wait_until_ready(group)  # the first restart is at once, the next after a pause
    for runner in (0, 1):
        group.restart(runner, "for a test")
    wait_until(lambda: {one.state for one in group.probe(0.1)} == {"starting"}, "their ends")
    assert group.sample(4).env_steps == 4
    assert "no runner is there" in caplog.text
    assert "being started again: runner 0 (life " in caplog.text


@pytest.mark.slow
def test_a_sample_that_is_empty_as_all_runners_died_says_so(make: Make) -> None:
    group = make()
    group.sample_async(10**9)
    for pid in group.runner_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(one.state == "sampling" for one in group.probe(0.1)), "their ends")
    sample = group.collect(2)
    with pytest.raises(ValueError, match=r"runners ended, .* \(0, 1; see `runner_faults`\)"):
        sample.single()


@pytest.mark.slow
def test_collect_waits_where_all_runners_were_being_started_again_when_they_were_to_be_asked(
    make: Make,
) -> None:
    group = make(restart=RestartPolicy(max_restarts=2, backoff=3.0, max_backoff=3.0))
    for _ in range(2):  # the first restart is at once, the next is not
        wait_until_ready(group)
        group.sample_async(10**9)
        for pid in group.runner_pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(s.state == "sampling" for s in group.probe(0.1)), "their ends")
        assert len(group.collect(2).runner_faults) == 2
    assert group.sample_async(4) == ()
    assert group.collect(timeout=0.0).agent_steps == 0
    assert group.sample_async(4) == ()
    assert group.collect(timeout=PATIENCE).agent_steps == 0
    asked = group.sample_async(4)
    assert asked
    assert group.collect(2, timeout=PATIENCE).env_steps == 4 * len(asked)
    with pytest.raises(NoAsyncCallError):
        group.collect()


def test_a_hung_runner_is_killed_and_started_again(make: Make) -> None:
    group = make(sample_timeout=2.0)
    pid = group.runner_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    sample = group.sample(20)
    assert (sample.runners, sample.env_steps) == ((1,), 10)
    assert [fault.cause for fault in sample.runner_faults] == [FaultCause.TIMEOUT]
    assert not is_alive(pid)
    wait_until_ready(group)
    assert group.sample(20, timeout=PATIENCE).runners == (0, 1)


@pytest.mark.slow
def test_a_runner_that_fails_too_often_is_given_up_and_the_others_go_on(make: Make) -> None:
    group = make(restart=False)
    os.kill(group.runner_pids()[0], signal.SIGKILL)
    wait_until(lambda: group.probe(timeout=0.5)[0].state == "lost", "its end")
    with pytest.raises(RestartLimitError, match=r"runners \[0\] of 2"):
        group.assert_healthy()
    sample = group.sample(20, timeout=PATIENCE)
    assert (sample.runners, sample.env_steps) == ((1,), 20)
    assert [(fault.runner, fault.given_up) for fault in sample.runner_faults] == [(0, True)]
    group.set_weights({"default_policy": {"number": np.array([1])}})
    assert group.foreach(lambda runner: runner.config.worker_index) == {1: 1}
    (pid,) = group.runner_pids()
    os.kill(pid, signal.SIGKILL)
    assert group.sample(20, timeout=PATIENCE).runners == ()
    with pytest.raises(RestartLimitError, match=r"runners \[0, 1\] of 2"):
        group.sample(20)


class DiesOnce(CountingEnv):
    """Its process is killed in its third step, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__(5)
        self.mark = mark

    def step(self, action: Any) -> Any:
        if self.count == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.slow
def test_an_env_that_fails_in_a_runner_is_named_by_its_id_in_the_group(
    make: Make, tmp_path: Path
) -> None:
    envs = [CountingEnv, CountingEnv, functools.partial(DiesOnce, tmp_path / "mark")]
    group = make(
        envs,
        pool={
            "num_actors": 1,
            "restart": RestartPolicy(max_restarts=2, backoff=0.01),
        },
    )
    sample = group.sample(30, timeout=PATIENCE)
    assert sample.env_steps == 30
    assert [fault.env_id for fault in sample.faults] == [1, 2]
    assert sample.runner_faults == ()
    metrics = group.get_metrics()
    assert (metrics["num_faulty_episodes"], metrics["num_env_restarts"]) == (2, 2)


@pytest.mark.slow
def test_stop_during_a_sample_that_never_ends_kills_after_the_time_to_close() -> None:
    settings = GroupConfig(timeouts=Timeouts(close=0.5))
    group = EnvRunnerGroup(2, [HangingEnv] * 2, Steps(), settings=settings)
    pids = group.runner_pids()
    family = [process for pid in pids for process in below(pid)]
    group.sample_async(4)
    group.stop()
    assert not any(map(is_alive, [*pids, *family]))
    group.stop()


# --- how programs end -----------------------------------------------------------------------

PROGRAM = """
import contextlib, json, os, signal, sys, threading
import gymnasium as gym
import numpy as np
from envbus.actors.testing import CountingEnv
from tests.envs import HangingEnv
from envbus.runner import EnvRunnerGroup

def tell(value):
    print(json.dumps(value), flush=True)

def zeros(observations):
    return np.zeros(len(observations), np.int64)
"""


@pytest.fixture
def temporary(short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = short_tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def start(source: str, tmp_path: Path) -> Driver:
    return Driver(PROGRAM + textwrap.dedent(source), tmp_path)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("state", ["idle", "sampling", "stopped"])
def test_kill_9_of_the_driver_leaves_no_runner_and_no_env_actor(
    state: str, tmp_path: Path, temporary: Path
) -> None:
    source = f"""
    envs = [{"HangingEnv" if state == "sampling" else "CountingEnv"}] * 2
    group = EnvRunnerGroup(1, envs, zeros)
    group.sample_async(2 if {state == "sampling"} else 0)
    tell(group.runner_pids())
    signal.pause()
    """
    with start(source, tmp_path) as driver:
        pids = driver.read()
        family = [process for pid in pids for process in below(pid)]
        assert len(family) >= 2
        if state == "stopped":
            for pid in [*pids, *family]:
                os.kill(pid, signal.SIGSTOP)
        driver.kill()
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
        assert not any(map(is_alive, [*pids, *family]))
    wait_until(lambda: not list(temporary.iterdir()), "its folders to be removed")


@pytest.mark.slow
def test_ctrl_c_ends_a_sample_and_all_processes_and_is_told_once(
    tmp_path: Path, temporary: Path
) -> None:
    source = """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with EnvRunnerGroup(2, [HangingEnv] * 2, zeros) as group:
        tell(group.runner_pids())
        group.sample(4)
    """
    with start(source, tmp_path) as driver:
        pids = driver.read()
        wait_until(lambda: all(len(below(pid)) >= 2 for pid in pids), "their env actors")
        driver.process.send_signal(signal.SIGINT)
        code, _, errors = driver.finish()
        assert code == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
        assert not any(map(is_alive, pids))
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise ValueError('mine')"])
def test_a_program_that_ends_leaves_nothing_and_says_little(
    end: str, tmp_path: Path, temporary: Path
) -> None:
    source = f"""
    group = EnvRunnerGroup(1, [CountingEnv] * 2, zeros)
    group.sample(4)
    {end}
    """
    with start(source, tmp_path) as driver:
        code, out, errors = driver.finish()
        assert (code, out) == (int("raise" in end), "")
        said = errors.rstrip().rpartition("\n")[2]
        assert said == ("ValueError: mine" if "raise" in end else "")
        assert traced(driver.trace) == []
    assert list(temporary.iterdir()) == []


class WideEnv(CountingEnv):
    """Its observations take memory."""

    observation_space = gym.spaces.Box(0, 1, (300_000,), np.float32)

    def reset(self, **keywords: Any) -> Any:
        _, info = super().reset(**keywords)
        return self._wide(), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return self._wide(), *rest

    def _wide(self) -> Any:
        return np.full(300_000, self.count / 100, np.float32)


@pytest.mark.slow
def test_rows_for_which_there_is_no_memory_come_with_the_next_call(make: Make) -> None:
    group = make([functools.partial(WideEnv, 100)] * 4, pool={"num_actors": 0})
    group.sample_async(48)  # 115 MB: the allocator keeps no such piece, and others let go of none
    wait_until(lambda: {one.state for one in group.probe(PATIENCE)} == {"ready"}, "their samples")
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**20, hard))
    try:
        with pytest.raises(MemoryError):
            group.collect(2, timeout=PATIENCE)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    sample = group.collect(2, timeout=PATIENCE)
    assert (sample.runners, sample.env_steps) == ((0, 1), 96)
    assert group.get_metrics()["num_env_steps_sampled_lifetime"] == 96
