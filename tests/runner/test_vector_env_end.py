"""How a `BusVectorEnv` ends: closed, dropped, forgotten, with calls pending (P-03, F-26)."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError

from envbus.actors.testing import CountingEnv, ExitingEnv, FailingEnv, HangingEnv
from envbus.runner import ActorLostError, BusVectorEnv
from tests.runner.pool_envs import PATIENCE


def gone(pids: list[int]) -> bool:
    deadline = PATIENCE
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return psutil.wait_procs(processes, timeout=deadline)[1] == []


class _NotingEnv(CountingEnv):
    """Leaves a file when it is closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def close(self) -> None:
        self.file.touch()


def test_close_lets_each_env_close(tmp_path: Path) -> None:
    files = [tmp_path / str(index) for index in range(4)]
    envs = BusVectorEnv([partial(_NotingEnv, file) for file in files], num_actors=2)
    pids = envs.actor_pids()
    envs.reset()
    envs.close()
    assert all(file.exists() for file in files)
    assert gone(pids)
    assert envs.closed


def test_close_with_terminate_asks_nobody(tmp_path: Path) -> None:
    file = tmp_path / "closed"
    envs = BusVectorEnv([partial(_NotingEnv, file), partial(HangingEnv, "close")])
    pids = envs.actor_pids()
    envs.close(terminate=True)
    assert gone(pids)


def test_what_hangs_in_a_step_or_in_close_is_killed_after_the_time_out() -> None:
    """F-17."""
    envs = BusVectorEnv([CountingEnv, partial(HangingEnv, "step")], num_actors=2)
    pids = envs.actor_pids()
    envs.reset()
    envs.step_async([0, 0])
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close(timeout=0.1)
    assert gone(pids)
    envs = BusVectorEnv([CountingEnv, partial(HangingEnv, "close")], num_actors=2)
    pids = envs.actor_pids()
    envs.close(timeout=0.1)
    assert gone(pids)


@pytest.mark.parametrize("env", [partial(FailingEnv, "close"), partial(FailingEnv, "step")])
def test_an_env_that_fails_meanwhile_does_not_keep_the_others_from_closing(
    env: Callable[[], CountingEnv],
) -> None:
    envs = BusVectorEnv([CountingEnv, env], num_actors=2)
    pids = envs.actor_pids()
    envs.reset()
    envs.step_async([0, 0])
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close()
    assert gone(pids)


def test_an_actor_that_ended_does_not_keep_the_others_from_closing() -> None:
    """F-03: before or in a pending call, told or not."""
    for told in (True, False):
        envs = BusVectorEnv([CountingEnv, ExitingEnv], num_actors=2)
        pids = envs.actor_pids()
        envs.reset()
        envs.step_async([0, 0])
        if told:
            with pytest.raises(ActorLostError):
                envs.step_wait()
            envs.close()
        else:
            with pytest.warns(UserWarning, match="pending call to `step`"):
                envs.close()
        assert gone(pids)


def test_closing_again_is_nothing_and_using_it_is_an_error() -> None:
    envs = BusVectorEnv([CountingEnv])
    envs.close()
    envs.close(terminate=True)
    uses: list[Callable[[], Any]] = [
        partial(envs.reset_send),
        partial(envs.step_fetch),
        partial(envs.exec_func, print),
        partial(envs.has_attr, "x"),
        lambda: envs.np_random_seed,
    ]
    for use in uses:
        with pytest.raises(ClosedEnvironmentError, match=r"`BusVectorEnv`, after a call to"):
            use()


@pytest.mark.parametrize("cyclic", [False, True], ids=["dropped", "in a cycle"])
@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_a_dropped_one_ends_its_processes_without_a_word(cyclic: bool, pending: bool) -> None:
    """F-26: also if it is collected together with the sockets below it, in whatever order."""
    envs = BusVectorEnv([CountingEnv] * 2, num_actors=2)
    pids = envs.actor_pids()
    envs.reset()
    if pending:
        envs.step_async([0, 0])
    if cyclic:
        envs.metadata["itself"] = envs
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del envs
        gc.collect()
    assert gone(pids)
    assert [str(warning.message) for warning in told] == []


def test_two_side_by_side_do_not_know_of_each_other() -> None:
    """K-06."""
    first, second = BusVectorEnv([CountingEnv] * 2), BusVectorEnv([CountingEnv] * 3)
    first.reset(seed=1)
    second.reset(seed=5)
    first.step_async([1, 2])
    second.step_async([3, 4, 5])
    assert second.step_wait()[0][:, 2].tolist() == [3, 4, 5]
    first_observations = first.step_wait()[0]
    first.close()
    assert first_observations[:, 2].tolist() == [1, 2]
    assert second.step([6, 7, 8])[0][:, 2].tolist() == [6, 7, 8]
    second.close()


def test_it_can_be_made_and_used_in_a_thread() -> None:
    """K-06."""
    seen: list[Any] = []

    def work() -> None:
        envs = BusVectorEnv([CountingEnv] * 2)
        seen.append(envs.reset(seed=4)[0][:, 3].tolist())
        envs.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert seen == [[4, 5]]


def test_many_one_after_the_other_leave_nothing_open() -> None:
    """F-30, in small."""
    process = psutil.Process()

    def once() -> None:
        envs = BusVectorEnv([CountingEnv] * 2)
        envs.reset()
        envs.close()

    once()
    gc.collect()
    before = (process.num_fds(), process.num_threads())
    for _ in range(10):
        once()
    gc.collect()
    assert (process.num_fds(), process.num_threads()) == before


def test_proxies_of_a_manager_work_in_the_envs() -> None:
    """As with `multiprocessing`, whose children know their parent's key."""
    with multiprocessing.Manager() as manager:
        values = manager.list()
        envs = BusVectorEnv([CountingEnv] * 2)
        envs.exec_func(lambda env: values.append(env.length))
        assert list(values) == [3, 3]
        envs.close()
