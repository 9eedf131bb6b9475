"""How a `BusVectorEnv` ends: closed, dropped, forgotten, with calls pending."""

from __future__ import annotations

import gc
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError

from envbus.actors.testing import CountingEnv, ExitingEnv
from envbus.runner import ActorLostError, BusVectorEnv
from tests.envs import FailingEnv, HangingEnv
from tests.integration.group_children import is_alive, wait_until


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"the ends of {pids}")


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
    wait_until_gone(pids)
    assert envs.actor_pids() == []
    assert envs.closed


def test_the_end_of_a_with_block_closes_also_if_it_raised() -> None:
    with BusVectorEnv([CountingEnv] * 2) as envs:
        envs.reset()
        pids = envs.actor_pids()
    assert envs.closed
    envs = BusVectorEnv([CountingEnv] * 2)
    pids += envs.actor_pids()
    with pytest.raises(AttributeError), envs:
        envs.get_attr("no_such_attribute")
    assert envs.closed
    wait_until_gone(pids)


def test_close_with_terminate_asks_nobody(tmp_path: Path) -> None:
    file = tmp_path / "closed"
    envs = BusVectorEnv([partial(_NotingEnv, file), partial(HangingEnv, "close")])
    pids = envs.actor_pids()
    envs.close(terminate=True)
    wait_until_gone(pids)


def test_what_hangs_in_a_step_or_in_close_is_killed_after_the_time_out() -> None:
    envs = BusVectorEnv([CountingEnv, partial(HangingEnv, "step")], num_actors=2)
    pids = envs.actor_pids()
    envs.reset()
    envs.step_async([0, 0])
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close(timeout=0.1)
    wait_until_gone(pids)
    envs = BusVectorEnv([CountingEnv, partial(HangingEnv, "close")], num_actors=2)
    pids = envs.actor_pids()
    envs.close(timeout=0.1)
    wait_until_gone(pids)


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
    wait_until_gone(pids)


def test_an_actor_that_ended_does_not_keep_the_others_from_closing() -> None:
    """Before or in a pending call, told or not."""
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
        wait_until_gone(pids)


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


@pytest.mark.slow_but_first
@pytest.mark.parametrize("cyclic", [False, True], ids=["dropped", "in a cycle"])
@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_a_dropped_one_ends_its_processes_without_a_word(cyclic: bool, pending: bool) -> None:
    """Also if it is collected together with the sockets below it, in whatever order."""
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
    wait_until_gone(pids)
    assert [str(warning.message) for warning in told] == []


@pytest.mark.slow
def test_many_one_after_the_other_leave_nothing_open() -> None:
    """In small."""
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
    # ZeroMQ's threads close descriptors later. What earlier tests have left may go meanwhile.
    wait_until(lambda: process.num_fds() <= before[0], "the ends of all descriptors")
    wait_until(lambda: process.num_threads() <= before[1], "the ends of all threads")


def test_proxies_of_a_manager_work_in_the_envs() -> None:
    """As with `multiprocessing`, whose children know their parent's key."""
    with multiprocessing.Manager() as manager:
        values = manager.list()
        envs = BusVectorEnv([CountingEnv] * 2)
        envs.exec_func(lambda env: values.append(env.length))
        assert list(values) == [3, 3]
        envs.close()
