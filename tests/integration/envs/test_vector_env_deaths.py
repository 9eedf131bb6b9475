"""`BusVectorEnv` when processes die, hang, or ignore what they are told."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.process.stacks import LEFT_TO_WRITERS
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import ActorLostError
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts
from tests.envs import FailingEnv, HangingEnv
from tests.integration.group_children import PATIENCE, is_alive, wait_until
from tests.runner.pool_envs import GatedEnv, PidEnv, TouchingEnv, killed_at_the_end

pytestmark = pytest.mark.timeout(180)

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
METHODS = pytest.mark.parametrize("context", ["fork", "spawn"])
Make = Callable[..., BusVectorEnv]
#: Restarts without a wait, and more of them than any test needs.
AT_ONCE = RestartPolicy(max_restarts=100, window=1000.0, backoff=0.001)


@pytest.fixture
def make() -> Iterator[Make]:
    yield from killed_at_the_end(BusVectorEnv)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_and_wait(pid: int) -> None:
    kill(pid)
    wait_until(lambda: not is_alive(pid), "its end")


# --- with restart ---------------------------------------------------------------------------


@pytest.mark.slow_but_first
@MODES
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
def test_a_death_in_a_step_ends_the_episodes_of_its_envs_only(
    make: Make, mode: AutoresetMode, shared_memory: bool
) -> None:
    envs = make(
        [partial(PidEnv, 10**6)] * 4,
        num_actors=2,
        shared_memory=shared_memory,
        autoreset_mode=mode,
        restart=AT_ONCE,
    )
    envs.reset(seed=10)
    for turn in range(1, 4):
        pids = envs.actor_pids()
        observations, rewards, terminations, truncations, infos = envs.step(np.array([1, 13, 1, 1]))
        assert terminations.tolist() == [False] * 4
        assert truncations.tolist() == [True, True, False, False]
        assert rewards[:2].tolist() == [0.0, 0.0]
        assert infos["_fault"].tolist() == [True, True, False, False]
        assert infos["fault"]["cause"][1] == "crash"
        assert "SIGKILL" in infos["fault"]["error"][1]
        assert str(pids[0]) in infos["fault"]["error"][1]
        new = [restart_seed(10 + i, i, turn) for i in range(2)]
        if mode is AutoresetMode.DISABLED:
            mask = np.array([True, True, False, False])
            observations, _ = envs.reset(options={"reset_mask": mask})
            assert observations[:2, :3].tolist() == [[1, 0, 0]] * 2
        else:
            if mode is AutoresetMode.NEXT_STEP:
                observations, rewards, terminations, truncations, infos = envs.step(np.ones(4))
                assert not (terminations | truncations).any()
                assert rewards[:2].tolist() == [0.0, 0.0]
                assert "fault" not in infos
            assert observations[:2].tolist() == [[1, 0, 0, new[0]], [1, 0, 0, new[1]]]
        before = observations[2:, 1].copy()
        observations, *_ = envs.step(np.full(4, 2))
        assert observations[:, 1].tolist() == [1, 1, *(before + 1)]
        assert observations[2:, 0].tolist() == [1, 1]
        assert envs.actor_pids()[0] != pids[0]
        assert envs.actor_pids()[1] == pids[1]
    assert envs.statistics().restarts == 3


@pytest.mark.slow_but_first
def test_a_new_life_is_made_of_what_was_given_and_not_of_what_became_of_it(make: Make) -> None:
    config = {"length": 10**6}
    envs = make([partial(_ConfiguredEnv, config=config)] * 2, num_actors=2, restart=AT_ONCE)
    envs.reset()
    config["length"] = 1  # for other envs
    envs.step(np.array([13, 1]))
    for _ in range(3):
        _, _, terminations, truncations, infos = envs.step(np.ones(2))
        assert "fault" not in infos
        assert not (terminations | truncations).any()


class _ConfiguredEnv(PidEnv):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config["length"])


@pytest.mark.slow_but_first
@MODES
def test_a_death_between_two_steps_is_told_by_the_next(make: Make, mode: AutoresetMode) -> None:
    envs = make(
        [partial(PidEnv, 10**6)] * 2,
        num_actors=2,
        autoreset_mode=mode,
        restart=AT_ONCE,
    )
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(np.ones(2))
        kill_and_wait(envs.actor_pids()[0])
        _, rewards, _, truncations, infos = envs.step(np.ones(2))
        assert truncations.tolist() == [True, False]
        assert (rewards[0], rewards[1] > 0) == (0.0, True)
        assert infos["_fault"].tolist() == [True, False]
        if mode is AutoresetMode.DISABLED:
            envs.reset(options={"reset_mask": np.array([True, False])})
        else:
            envs.step(np.ones(2))


@pytest.mark.slow_but_first
@MODES
def test_a_death_between_a_reset_and_the_first_step_is_told_by_that(
    make: Make, mode: AutoresetMode
) -> None:
    envs = make(
        [partial(PidEnv, 10**6)] * 2,
        num_actors=2,
        autoreset_mode=mode,
        restart=AT_ONCE,
    )
    for seed in range(3):
        first, _ = envs.reset(seed=seed)
        kill_and_wait(envs.actor_pids()[0])
        with pytest.raises(ActorLostError):
            envs.get_attr("length")
        envs.get_attr("length")  # waits for the fresh process
        observations, rewards, _, truncations, infos = envs.step(np.ones(2))
        assert truncations.tolist() == [True, False]
        assert (rewards[0], rewards[1] > 0) == (0.0, True)
        assert infos["_fault"].tolist() == [True, False]
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][0].tolist() == first[0].tolist()
            assert observations[0, :2].tolist() == [1, 0]
        else:
            assert observations[0].tolist() == first[0].tolist()
            observations, _, _, truncations, infos = envs.step(np.ones(2))
            assert observations[:, 1].tolist() == [0, 2]
            assert not truncations.any()
            assert "fault" not in infos


@pytest.mark.slow_but_first
@MODES
def test_a_death_in_a_reset_is_followed_by_the_same_reset(
    make: Make, mode: AutoresetMode, tmp_path: Path
) -> None:
    envs = make(
        [partial(DyingInResetEnv, tmp_path / "died"), CountingEnv],
        num_actors=2,
        autoreset_mode=mode,
        restart=AT_ONCE,
    )
    observations, infos = envs.reset(seed=5)
    assert observations[:, 3].tolist() == [5, 6]
    assert infos["_fault"].tolist() == [True, False]
    assert infos["fault"]["cause"][0] == "crash"
    assert envs.statistics().restarts == 1
    _, _, _, truncations, infos = envs.step(np.ones(2))
    assert not truncations[0]
    assert "fault" not in infos


class DyingInResetEnv(CountingEnv):
    """Kills its process in the first reset of all."""

    def __init__(self, path: Path) -> None:
        super().__init__(10**6)
        self.path = path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if not self.path.exists():
            self.path.touch()
            kill(os.getpid())
        return super().reset(seed=seed)


def test_a_death_before_a_reset_is_told_by_it_and_costs_nothing(make: Make) -> None:
    envs = make([CountingEnv] * 2, num_actors=2, restart=True)
    envs.reset(seed=0)
    kill_and_wait(envs.actor_pids()[1])
    observations, infos = envs.reset(seed=8)
    assert observations[:, 3].tolist() == [8, 9]
    assert infos["_fault"].tolist() == [False, True]
    assert "fault" not in envs.step(np.ones(2))[4]


@pytest.mark.slow_but_first
@MODES
def test_too_many_deaths_are_an_error_that_names_the_last(make: Make, mode: AutoresetMode) -> None:
    envs = make(
        [partial(PidEnv, 10**6)] * 2,
        num_actors=2,
        autoreset_mode=mode,
        restart=RestartPolicy(max_restarts=2, window=1000.0, backoff=0.001),
    )
    envs.reset(seed=0)

    def step_until_it_raises() -> None:
        for _ in range(20):
            _, _, _, truncations, _ = envs.step(np.array([13, 1]))
            if mode is AutoresetMode.DISABLED and truncations[0]:
                envs.reset(options={"reset_mask": truncations})

    with pytest.raises(RestartLimitError, match=r"actor-0.*env 0.*after 2 restarts.*SIGKILL"):
        step_until_it_raises()
    with pytest.raises(RestartLimitError, match="actor-0"):
        envs.step(np.array([1, 1]))
    with pytest.raises(RestartLimitError, match="actor-0"):
        envs.reset()


def test_all_actors_may_die_at_once(make: Make) -> None:
    envs = make(
        [partial(PidEnv, 10**6)] * 3,
        num_actors=3,
        restart=AT_ONCE,
    )
    envs.reset(seed=0)
    _, _, _, truncations, _ = envs.step(np.full(3, 13))
    assert truncations.all()
    observations, *_ = envs.step(np.ones(3))
    assert observations[:, :3].tolist() == [[1, 0, 0]] * 3
    observations, *_ = envs.step(np.ones(3))
    assert observations[:, 1].tolist() == [1, 1, 1]


def test_a_stopped_actor_that_was_replaced_says_nothing_any_more(make: Make) -> None:
    envs = make([CountingEnv] * 2, num_actors=2, restart=True)
    envs.reset(seed=0)
    pid = envs.actor_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    envs.step_async(np.ones(2))
    kill(pid)
    _, _, _, truncations, _ = envs.step_wait()
    assert truncations.tolist() == [True, False]
    for _ in range(5):
        envs.step(np.ones(2))
    assert envs.statistics().late_replies == 0


@pytest.mark.slow
@METHODS
def test_the_death_of_the_fork_server_is_that_of_all_actors(make: Make, context: str) -> None:
    envs = make(
        [partial(CountingEnv, 10**6)] * 3,
        num_actors=3,
        context=context,
        restart=AT_ONCE,
    )
    envs.reset(seed=0)
    pids = envs.actor_pids()
    kill_server_of(pids)
    _, _, _, truncations, infos = envs.step(np.ones(3))
    assert truncations.all()
    assert "fork server" in infos["fault"]["error"][0]
    observations, *_ = envs.step(np.ones(3))
    assert observations[:, :2].tolist() == [[1, 0]] * 3
    assert not set(pids) & set(envs.actor_pids())


def kill_server_of(pids: list[int]) -> None:
    (server,) = {psutil.Process(pid).ppid() for pid in pids}
    kill(server)
    wait_until(lambda: not any(map(is_alive, pids)), "the actors' ends")


# --- without restart ------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("action", "words"), [(13, "signal SIGKILL"), (14, "exit code 7"), (15, "SystemExit")]
)
@METHODS
def test_a_death_in_a_step_is_named(make: Make, action: int, words: str, context: str) -> None:
    envs = make([partial(PidEnv, 10**6)] * 3, num_actors=3, context=context)
    envs.reset()
    pid = envs.actor_pids()[1]
    with pytest.raises(Exception, match=words) as caught:
        envs.step(np.array([1, action, 1]))
    if action != 15:
        assert isinstance(caught.value, ActorLostError)
        assert caught.value.env_ids == [1]
        for text in ("actor-1", str(pid), "env 1", "Step"):
            assert text in str(caught.value)
        with pytest.raises(ActorLostError, match="actor-1"):
            envs.step(np.ones(3))
        with pytest.raises(ActorLostError, match="actor-1"):
            envs.reset()
        with pytest.raises(ActorLostError, match="actor-1"):
            envs.call("add", 1)
    else:
        envs.reset()
        envs.step(np.ones(3))
    envs.close()


@pytest.mark.slow_but_first
@METHODS
def test_the_death_of_the_fork_server_is_named(make: Make, context: str) -> None:
    envs = make([CountingEnv] * 2, num_actors=2, context=context)
    envs.reset()
    kill_server_of(envs.actor_pids())
    with pytest.raises(ActorLostError, match=r"(?s)actor-0 .*SIGKILL.*fork server"):
        envs.step(np.ones(2))
    envs.close()
    assert make([CountingEnv], context=context).reset()[0].shape == (1, 4)


@pytest.mark.parametrize("terminate", [False, True])
@pytest.mark.parametrize("pending", [False, True])
def test_close_works_after_a_death(make: Make, terminate: bool, pending: bool) -> None:
    envs = make([CountingEnv] * 2, num_actors=2)
    envs.reset()
    if pending:
        envs.step_async(np.ones(2))
        envs.step_wait()
    kill_and_wait(envs.actor_pids()[0])
    envs.close(terminate=terminate)
    assert envs.closed


def test_close_works_after_a_death_that_a_pending_step_has_not_told(
    make: Make, tmp_path: Path
) -> None:
    envs = make([partial(GatedEnv, tmp_path / "gate")] * 2, num_actors=2)
    envs.reset()
    envs.step_async(np.ones(2))
    kill_and_wait(envs.actor_pids()[0])
    with pytest.warns(UserWarning, match="pending call"):
        envs.close(timeout=1.0)
    assert envs.closed


# --- close ----------------------------------------------------------------------------------


class StubbornEnv(HangingEnv):
    """Hangs where it is told to, and its process ignores SIGTERM."""

    def __init__(self, where: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().__init__(where)


@pytest.mark.slow_but_first
@METHODS
@pytest.mark.parametrize("env", [HangingEnv, StubbornEnv])
@pytest.mark.parametrize("where", ["step", "close"])
def test_close_is_bounded_whatever_the_envs_do(
    make: Make, context: str, env: Callable[[str], Any], where: str
) -> None:
    envs = make([partial(env, where), CountingEnv], num_actors=2, context=context)
    envs.reset()
    pids = envs.actor_pids()
    start = time.monotonic()
    if where == "step":
        envs.step_async(np.ones(2))
        with pytest.warns(UserWarning, match="pending call"):
            envs.close(timeout=0.5)
    else:
        envs.step(np.ones(2))
        envs.close(timeout=0.5)
    assert time.monotonic() - start < PATIENCE
    assert [pid for pid in pids if is_alive(pid)] == []


def test_a_close_that_fails_in_one_env_closes_the_others(make: Make, tmp_path: Path) -> None:
    envs = make(
        [partial(FailingEnv, "close"), partial(TouchingEnv, tmp_path / "closed")], num_actors=1
    )
    envs.reset()
    envs.close()
    assert (tmp_path / "closed").exists()


@pytest.mark.slow_but_first
@METHODS
def test_a_dropped_vector_env_ends_its_processes(context: str) -> None:
    envs = BusVectorEnv([CountingEnv] * 2, num_actors=2, context=context)
    envs.reset()
    pids = envs.actor_pids()
    del envs
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)), "the actors' end")


def test_a_dropped_vector_env_in_the_middle_of_a_step_ends_its_processes() -> None:
    envs = BusVectorEnv([HangingEnv] * 2, num_actors=2)
    envs.reset()
    envs.step_async(np.ones(2))
    pids = envs.actor_pids()
    del envs
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)), "the actors' end")


# --- leaks ----------------------------------------------------------------------------------


def descriptors() -> set[tuple[str, str]]:
    """Return the open ones of this process: number, and what it is of.

    Those that are new can be told from them, also if some of an earlier test go meanwhile.
    """
    gc.collect()
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that reads this folder
            found.add((file.name, os.readlink(file)))
    return found


def traces() -> dict[str, Any]:
    """Return what this process holds of the machine."""
    gc.collect()
    me = psutil.Process()
    return {
        "descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "native threads": me.num_threads(),
        "processes": len(me.children(recursive=True)),
        "shared memory": len(os.listdir("/dev/shm")),  # noqa: S108
        "mappings": sum("envbus" in m.path for m in me.memory_maps(grouped=False)),
    }


def wait_for_no_more_than(before: dict[str, Any]) -> None:
    """Wait until there is no more of anything: the thread that is asked for figures ends later."""
    # Others on this machine may use shared memory too.
    room = before | {"shared memory": before["shared memory"] + 5}

    def over() -> dict[str, Any]:
        return {what: count for what, count in traces().items() if count > room[what]}

    wait_until(lambda: not over(), f"no more than {room}")


@pytest.mark.slow
@pytest.mark.skipif(not (LOCAL_LINKS_EXIST and LEFT_TO_WRITERS), reason="of Linux")
@METHODS
def test_an_actor_takes_two_descriptors_also_after_a_restart(make: Make, context: str) -> None:
    def taken(num_actors: int) -> tuple[int, int]:
        before = descriptors()
        envs = make(
            [partial(PidEnv, 10**6)] * num_actors,
            num_actors=num_actors,
            context=context,
            restart=AT_ONCE,
        )
        envs.reset()
        at_first = descriptors()
        envs.step(np.full(num_actors, 13))
        envs.step(np.ones(num_actors))
        assert envs.statistics().restarts == num_actors
        now = descriptors()
        envs.close()
        return len(at_first - before), len(now - before)

    taken(1)  # what stays for the next ones is made
    few, many = taken(1), taken(3)
    assert few[0] == few[1]
    assert many == (few[0] + 2 * 2, few[0] + 2 * 2)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("dying", [False, True], ids=["closed", "killed"])
def test_fifty_lives_leave_nothing_behind(
    dying: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)

    def live() -> None:
        envs = BusVectorEnv([CountingEnv] * 2, num_actors=2)
        envs.reset(seed=0)
        envs.step(np.ones(2))
        if dying:
            kill(envs.actor_pids()[0])
        envs.close()

    live()
    before = traces()
    for _ in range(50):
        live()
    wait_for_no_more_than(before)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.alone
def test_a_life_with_restarts_leaves_nothing_behind() -> None:
    def live() -> None:
        envs = BusVectorEnv(
            [partial(PidEnv, 10**6)] * 2,
            num_actors=2,
            restart=AT_ONCE,
        )
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(np.array([13, 1]))
            envs.step(np.array([1, 1]))
        envs.close()

    live()
    before = traces()
    live()
    wait_for_no_more_than(before)


# --- side by side ---------------------------------------------------------------------------


def test_two_vector_envs_side_by_side_and_one_in_a_thread(make: Make) -> None:
    one, two = make([CountingEnv] * 2, num_actors=2), make([CountingEnv] * 3, num_actors=1)
    found: list[Any] = []

    def in_a_thread() -> None:
        envs = BusVectorEnv([partial(CountingEnv, 1000)] * 2, num_actors=2)
        observations, _ = envs.reset(seed=30)
        for _ in range(50):
            observations, *_ = envs.step(np.ones(2))
        found.append(observations.tolist())
        envs.close()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    one.reset(seed=10)
    two.reset(seed=20)
    for step in range(1, 3):
        assert one.step(np.full(2, 1))[0].tolist() == [[1, step, 1, 10], [1, step, 1, 11]]
        assert two.step(np.full(3, 2))[0][2].tolist() == [1, step, 2, 22]
    thread.join(PATIENCE)
    assert found == [[[1, 50, 1, 30], [1, 50, 1, 31]]]


def test_a_time_out_is_the_callers_and_close_still_works() -> None:
    envs = BusVectorEnv([HangingEnv, CountingEnv], num_actors=2, timeouts=Timeouts(close=0.5))
    envs.reset()
    envs.step_async(np.ones(2))
    with pytest.raises(multiprocessing.TimeoutError, match="actor-0"):
        envs.step_wait(timeout=0.1)
    pids = envs.actor_pids()
    envs.close()
    assert [pid for pid in pids if is_alive(pid)] == []
