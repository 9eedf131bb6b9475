"""What cleans TMPDIR up removes the folder of a run that goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envbus.actors import ExternalEnv
from envbus.actors.external.protocol import GetAction, StartEpisode
from envbus.actors.testing import CountingEnv
from envbus.bus.folders import FOLDER_VARIABLE
from envbus.bus.gateway import GatewayConfig
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner import EnvRunner, ExternalEnvBridge
from envbus.runner.bridge.hosting import Where
from envbus.runner.conformance.talk import Talk
from envbus.runner.group.config import GroupConfig
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import Timeouts
from tests.integration.bridge.test_gateway_hangs import joined
from tests.integration.group_children import PATIENCE, wait_until
from tests.integration.policies_under_test import make_probe, rows
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen
from tests.runner.pool_envs import PidEnv, receive_until_back

pytestmark = pytest.mark.timeout(120)

OFTEN = RestartPolicy(max_restarts=20, backoff=0.01, max_backoff=0.05)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders go, with a path that leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="eb") as folder:
        monkeypatch.setenv(FOLDER_VARIABLE, folder)
        yield Path(folder)


class ShortLived(ExternalEnv):
    """Plays one episode, and fails."""

    def __init__(self) -> None:
        super().__init__(ACTION, OBSERVATION)

    def run(self) -> None:
        episode = self.start_episode()
        self.get_action(episode, seen(1))
        self.end_episode(episode, seen(2))
        raise RuntimeError("start me again")


class KillableEnv(CountingEnv):
    """Ends its process once, as soon as a file is there, which it removes."""

    def __init__(self, sign: Path) -> None:
        super().__init__()
        self.sign = sign

    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            self.sign.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def clean(temporary: Path) -> None:
    removed = list(temporary.iterdir())
    assert removed
    for folder in removed:
        shutil.rmtree(folder)


def pool_that_needs_no_tmpdir(_: int) -> ActorPool:
    """Python looks for TMPDIR once, and tries it by a file that a process killed then leaves."""
    pool = ActorPool([PidEnv])
    assert tempfile.tempdir is None
    return pool


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="nameless files are in TMPDIR here")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_runner_that_starts_processes_writes_no_file(context: str) -> None:
    settings = GroupConfig(context=context)
    with EnvRunnerGroup(
        1, pool_that_needs_no_tmpdir, lambda rows: np.zeros(len(rows)), settings=settings
    ) as group:
        assert len(group.runner_pids()) == 1


def test_actors_without_local_links_come_back_and_those_that_run_stay(temporary: Path) -> None:
    timeouts = Timeouts(start=PATIENCE)
    with ActorPool(
        [PidEnv] * 2, num_actors=2, local_links=False, restart=OFTEN, timeouts=timeouts
    ) as pool:
        pool.reset()
        assert len(pool.recv(min_envs=2).env_ids) == 2
        (_, other) = pool.actor_pids()
        for life in (1, 2):
            clean(temporary)
            pool.send(np.array([13]), [0])  # kills its process
            assert receive_until_back(pool, 0).incarnations.tolist() == [life]
            assert pool.actor_pids()[1] == other
            pool.send(np.zeros(2, np.int64))
            batch = pool.recv(min_envs=2)
            assert dict(zip(batch.env_ids, batch.incarnations, strict=True)) == {0: life, 1: 0}
    assert not list(temporary.iterdir())


@pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")
def test_policy_workers_count_and_come_back(temporary: Path) -> None:
    with PolicyWorkers(make_probe, 2, restart=OFTEN) as workers:
        policy = workers.policy()
        assert policy.compute_actions(rows(1), None).actions.tolist() == [1.0]
        before = workers.pids()
        clean(temporary)
        assert policy.compute_actions(rows(2), None).actions.tolist() == [2.0]
        wait_until(lambda: not workers.statistics().silent, "new askers to find the way")
        assert workers.pids() == before
        clean(temporary)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: set(before).isdisjoint(workers.pids()) and "2 of 2" in repr(workers),
            "two replacements",
        )
        assert policy.compute_actions(rows(3), None).actions.tolist() == [3.0]
        wait_until(lambda: not workers.statistics().silent, "both to answer")
    assert not list(temporary.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")
def test_a_runner_that_is_started_again_finds_the_policy_workers(temporary: Path) -> None:
    policy = functools.partial(np.zeros, dtype=np.int64)
    with (
        PolicyWorkers(lambda: lambda rows: policy(len(rows)), 1) as workers,
        EnvRunnerGroup(
            1, [CountingEnv], workers.policy(), settings=GroupConfig(restart=OFTEN)
        ) as group,
    ):
        assert group.sample(4).env_steps == 4
        clean(temporary)
        os.kill(group.runner_pids()[0], signal.SIGKILL)
        wait_until(lambda: group.sample(4).runners == (0,), "its rows")
    assert not list(temporary.iterdir())


@pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")
def test_rows_are_shared_with_policy_workers_whose_sockets_were_removed(temporary: Path) -> None:
    with PolicyWorkers(lambda: lambda rows: np.zeros(len(rows), np.int64), share_from=0) as workers:
        policy = workers.policy()
        for _ in range(2):
            with ActorPool([CountingEnv]) as pool, EnvRunner(pool, policy) as runner:
                assert runner.sample(num_env_steps=4).env_steps == 4
            clean(temporary)
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_actors_within_a_runner_come_back(temporary: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    settings = GroupConfig(pool_settings={"num_actors": 1, "local_links": False, "restart": OFTEN})
    envs = [functools.partial(KillableEnv, sign)]
    with EnvRunnerGroup(
        1, envs, lambda rows: np.zeros(len(rows), np.int64), settings=settings
    ) as group:
        assert group.sample(4).env_steps == 4
        clean(temporary)
        sign.touch()
        wait_until(lambda: group.sample(4).faults, "the end of its actor")
        assert group.sample(4).env_steps == 4
    assert not list(temporary.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stream", "ws"])
def test_clients_of_a_gateway_join(transport: str, temporary: Path, short_tmp_path: Path) -> None:
    local = ("127.0.0.1:0",)
    config = GatewayConfig(tcp=local, websocket=local)
    endpoint = f"ipc://{short_tmp_path}/bridge"  # beside TCP its own processes need no folder
    with ExternalEnvBridge(OBSERVATION, ACTION, bind=endpoint, gateway=config) as bridge:
        (address,) = [one for one in bridge.addresses if one.startswith(f"{transport}:")]

        def ask(talk: Talk, number: int) -> None:
            talk.ask(StartEpisode(episode_id=f"e{number}"))
            seen = [number, 0]
            assert talk.ask(GetAction(episode_id=f"e{number}", observation=seen)).action == number

        def play() -> None:
            first, _ = joined(address, "before")
            for number in (1, 2):
                clean(temporary)
                later, _ = joined(address, "after")
                ask(later, 10 + number)
                ask(first, number)
                later.close()
            first.close()

        with in_thread(play) as client:
            Runner(bridge).serve(client.over)
    assert not list(temporary.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["thread", "process"])
def test_simulators_of_a_bridge_come_back(
    where: Where, temporary: Path, short_tmp_path: Path
) -> None:
    with ExternalEnvBridge(bind=f"ipc://{short_tmp_path}/bridge") as bridge:
        runner = Runner(bridge)
        bridge.host(ShortLived, where=where, restart=RestartPolicy.always(backoff=0.01))
        runner.serve(lambda: runner.ended)
        clean(temporary)
        seen_before = len(runner.ended)
        runner.serve(lambda: len(runner.ended) > seen_before + 3)
    assert not list(temporary.iterdir())
