"""A driver that does something else for longer than a deadline takes nobody for late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.broker.stall_grace import GRACE
from envbus.runner import ActorPool, BusVectorEnv, Timeouts
from tests.waiting import pass_time


def do_something_else() -> None:
    """Longer than the deadlines here."""
    pass_time(0.6)


ENV = "envbus.actors.testing:CountingEnv"
SETTINGS = {
    "num_actors": 2,
    "restart": True,
    "timeouts": Timeouts(step=0.3),
}


@pytest.mark.parametrize("local_links", [True, False])
def test_an_actor_of_a_pool_that_died_meanwhile_crashed_and_was_not_late(local_links: bool) -> None:
    with ActorPool([ENV] * 4, local_links=local_links, **SETTINGS) as pool:
        pool.reset(seed=0)
        pool.recv(min_envs=4)
        os.kill(pool.actor_pids()[0], signal.SIGSTOP)  # so that its steps stay unanswered
        pool.send([1] * 4)
        os.kill(pool.actor_pids()[0], signal.SIGKILL)
        do_something_else()
        faults, received = [], []
        while len(received) < 4:
            batch = pool.recv()
            faults += batch.faults
            received += batch.env_ids.tolist()
        assert [(fault.env_id, fault.cause.value) for fault in faults] == [
            (0, "crash"),
            (1, "crash"),
        ]
        assert "SIGKILL" in faults[0].message
        assert sorted(received) == [0, 1, 2, 3]
        assert pool.statistics().restarts == 1


def test_an_actor_of_a_vector_env_that_died_meanwhile_crashed_and_was_not_late() -> None:
    with closing(BusVectorEnv([ENV] * 4, **SETTINGS)) as envs:
        envs.reset(seed=0)
        os.kill(envs.actor_pids()[0], signal.SIGSTOP)
        envs.step_async([1] * 4)
        os.kill(envs.actor_pids()[0], signal.SIGKILL)
        do_something_else()
        _, _, _, truncations, infos = envs.step_wait()
        assert truncations.tolist() == [True, True, False, False]
        assert [infos["fault"]["cause"][i] for i in (0, 1)] == ["crash", "crash"]


class _ObjectEnv(CountingEnv):
    """Its infos hold what goes over its actor's pipe."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"path": Path("seen")}


@pytest.mark.slow
def test_no_answer_is_lost_for_which_the_pipe_has_no_room_meanwhile() -> None:
    with ActorPool([_ObjectEnv] * 350, num_actors=1) as pool:
        pool.reset(seed=0)
        pool.recv(min_envs=350)
        for env_id in range(350):
            pool.send([1], [env_id])
        pass_time(10.5)  # longer than others wait for room
        received: list[int] = []
        while len(received) < 350:
            batch = pool.recv(timeout=20.0)
            assert not batch.late
            received += batch.env_ids.tolist()
        assert sorted(received) == list(range(350))


STEPS = """
import sys, time
from envbus.runner import ActorPool, Timeouts

if __name__ == "__main__":
    pool = ActorPool(
        ["envbus.actors.testing:CountingEnv"] * 8,
        num_actors=4,
        restart=True,
        timeouts=Timeouts(step=1.8),
        local_links=sys.argv[1] == "local_links",
    )
    pool.reset(seed=0)
    ready = pool.recv(min_envs=8).env_ids
    print("ready", flush=True)
    end = time.monotonic() + 11.0
    while time.monotonic() < end:
        pool.send([1] * len(ready), ready)
        ready = pool.recv().env_ids
    print(pool.statistics().faults, flush=True)
    pool.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local_links", "sockets"])
def test_nobody_is_late_when_the_whole_driver_was_stopped(transport: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STEPS, transport], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        for _ in range(3):
            os.kill(driver.pid, signal.SIGSTOP)
            pass_time(2.2)
            os.kill(driver.pid, signal.SIGCONT)
            pass_time(2.0 * GRACE)  # an absence within the grace of the last one gets none
        assert driver.stdout.readline() == "{}\n"
    assert driver.returncode == 0
