"""Faults of envs whose actor runs elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from envbus.actors.env.actor import EnvActor
from envbus.actors.process.remote import REMOTE_SERVICE
from envbus.bus.peer.session import HELLO_ID
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.codec import encode, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Goodbye, Header, Hello, Kind
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import ActorLostError
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts
from tests.integration.envs.test_remote_actors import PATIENCE, free_port, with_remote_actor
from tests.integration.faulty import EXIT, RAISE, RESTART, STOP
from tests.runner.pool_envs import receive_all, receive_until_back
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(120)

FAULTY = "tests.integration.faulty:FaultyEnv"


class Elsewhere(threading.Thread):
    """An actor that joins a runner by itself, in a thread of this process."""

    def __init__(self, endpoint: str, name: str) -> None:
        super().__init__()
        self._transport = ZmqPeer(endpoint, name.encode())
        self._hello = Hello(name=name, services=[REMOTE_SERVICE], heartbeat=10.0, capacity=99)
        self._actor = EnvActor()
        self._worker = Worker(
            self._transport, self._hello, self._actor.handlers, beside=self._between_messages
        )
        self.joined = threading.Event()
        self.came_back = threading.Event()
        self._is_to_come_back = False

    def run(self) -> None:
        self._worker.join(PATIENCE)
        self.joined.set()
        self._worker.run()

    def come_back(self) -> None:
        """Leave and join at one go, under the same routing id."""
        self._is_to_come_back = True
        assert self.came_back.wait(PATIENCE)

    def leave(self) -> None:
        self._worker.stop()
        self.join(PATIENCE)
        assert not self.is_alive()
        self._actor.close()

    def _between_messages(self) -> None:
        if self._is_to_come_back and not self.came_back.is_set():
            self._actor.close()
            for kind, number, payload in (
                (Kind.NOTICE, 0, Goodbye()),
                (Kind.REQUEST, HELLO_ID, self._hello),
            ):
                header = Header(PROTOCOL_VERSION, kind, number, type(payload).__name__, PATIENCE, 0)
                self._transport.send([encode_header(header), *encode(payload)])
            self.came_back.set()


def test_a_remote_env_that_raises_is_made_anew_alone() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint, "--allow", "tests") as process:
        envs = BusVectorEnv(
            [FAULTY] * 4,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            autoreset_mode="SameStep",
            **RESTART,
        )
        envs.reset(seed=0)
        for life in (1, 2):
            observations, _, _, truncations, infos = envs.step(np.array([1, 1, RAISE, 1]))
            assert truncations.tolist() == [False, False, True, False]
            assert "raised on purpose" in infos["fault"]["error"][2]
            assert observations[:, 1].tolist() == [life, life, 0, life]
            assert observations[2, 3] == restart_seed(2, 2, life)
        envs.close()
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_frozen_actor_that_goes_on_after_it_was_replaced_changes_nothing_and_leaves() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        with_remote_actor(endpoint, "--allow", "tests") as first,
        with_remote_actor(endpoint, "--allow", "tests") as second,
    ):
        envs = BusVectorEnv(
            [FAULTY] * 2,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            timeouts=Timeouts(step=2.0),
            **RESTART,
        )
        envs.reset(seed=0)
        pid = int(envs.step(np.ones(2))[4]["pid"][1])
        frozen, other = (first, second) if pid == first.pid else (second, first)
        os.kill(frozen.pid, signal.SIGSTOP)
        _, _, _, truncations, infos = envs.step(np.ones(2))
        assert truncations.tolist() == [False, True]
        assert infos["fault"]["cause"][1] == "timeout"
        *_, infos = envs.step(np.ones(2))
        assert infos["pid"][1] == other.pid
        os.kill(frozen.pid, signal.SIGCONT)
        for step in range(1, 200):
            observations, _, _, truncations, infos = envs.step(np.full(2, step % 10))
            assert observations[1].tolist() == [1, step, step % 10, restart_seed(1, 1, 1)]
            assert not truncations.any()
        assert infos["pid"][1] == other.pid
        assert frozen.wait(PATIENCE) == 1
        envs.close()


@pytest.mark.slow
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_deadline_and_a_lease_that_end_while_the_learner_is_away_end_one_life_only(
    has_spare: bool,
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        actor = stack.enter_context(with_remote_actor(endpoint, "--allow", "tests"))
        stack.callback(actor.kill)  # it will have stopped itself
        timeouts = Timeouts(step=1.0)
        pool = ActorPool(
            [FAULTY] * 2,
            num_actors=2,
            remote_actors=1,
            bind=endpoint,
            timeouts=timeouts,
            **RESTART,
        )
        stack.callback(pool.close)
        pool.reset(seed=0)
        receive_all(pool, range(2))
        if has_spare:
            stack.enter_context(with_remote_actor(endpoint, "--allow", "tests"))
        pool.send(np.array([1, STOP]))
        pass_time(6.0)  # the learner trains for longer than the lease of a remote actor
        if not has_spare:
            pool.recv(min_envs=1, timeout=PATIENCE)
            stack.enter_context(with_remote_actor(endpoint, "--allow", "tests"))
        batch = receive_until_back(pool, 1)
        assert batch.observations[-1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
        pool.close()  # the actors leave


@pytest.mark.slow
def test_a_pool_whose_remote_actor_dies_waits_for_the_next_to_join() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with with_remote_actor(endpoint, "--allow", "tests"):
        pool = ActorPool([FAULTY] * 2, num_actors=2, remote_actors=1, bind=endpoint, **RESTART)
        pool.reset(seed=0)
        receive_all(pool, range(2))
        pool.send(np.array([1, EXIT]))
        batch = pool.recv(min_envs=2, timeout=PATIENCE)
        faults = batch.faults or pool.recv(timeout=PATIENCE).faults
        assert [fault.env_id for fault in faults] == [1]
        with with_remote_actor(endpoint, "--allow", "tests"):
            batch = receive_until_back(pool, 1)
            assert batch.observations[-1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
            pool.close()


def envs_with_a_spare(endpoint: str, first: Elsewhere, spare: Elsewhere) -> BusVectorEnv:
    """Return two envs, the second one at the actor `first`, while `spare` waits."""
    first.start()
    envs = BusVectorEnv([FAULTY] * 2, num_actors=2, remote_actors=1, bind=endpoint, **RESTART)
    envs.reset(seed=0)
    spare.start()
    while not spare.joined.is_set():
        envs.step(np.ones(2))
    return envs


def test_an_actor_and_the_one_that_waits_leave_at_one_time_and_the_next_takes_over(
    tmp_path: Path,
) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    first, spare, third = (Elsewhere(endpoint, name) for name in ("first", "spare", "third"))
    envs = envs_with_a_spare(endpoint, first, spare)
    first.leave()
    spare.leave()  # the runner is away, and hears of both at one time
    third.start()
    _, _, _, truncations, infos = envs.step(np.ones(2))
    assert truncations.tolist() == [False, True]
    assert infos["fault"]["cause"][1] == "crash"
    observations, *_ = envs.step(np.ones(2))
    assert observations[1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
    envs.close()
    third.leave()


@pytest.mark.parametrize("terminate", [False, True])
def test_remote_actors_are_told_when_the_runner_ends(tmp_path: Path, terminate: bool) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    first, spare = (Elsewhere(endpoint, name) for name in ("first", "spare"))
    envs = envs_with_a_spare(endpoint, first, spare)
    envs.close(terminate=terminate)
    try:
        for actor in (first, spare):
            actor.join(PATIENCE)
            assert not actor.is_alive()
    finally:
        first.leave()
        spare.leave()


def test_a_call_waits_for_the_next_actor_until_its_deadline(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    first, second = (Elsewhere(endpoint, name) for name in ("first", "second"))
    first.start()
    timeouts = Timeouts(call=1.5)
    envs = BusVectorEnv(
        [FAULTY] * 2, num_actors=2, remote_actors=1, bind=endpoint, timeouts=timeouts, **RESTART
    )
    envs.reset(seed=0)
    first.leave()
    assert envs.step(np.ones(2))[3].tolist() == [False, True]
    missing = r"env 1\): no remote actor took its place in 1.5 s"
    with pytest.raises(ActorLostError, match=missing) as caught:
        envs.get_attr("render_mode")
    assert caught.value.env_ids == [1]
    assert envs.get_attr("render_mode", [0]) == (None,)
    second.start()
    observations, *_ = envs.step(np.ones(2))
    assert observations[1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
    assert envs.get_attr("render_mode") == (None, None)
    envs.close()
    second.leave()


def test_an_actor_that_leaves_and_joins_at_one_go_is_another_one(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    actor = Elsewhere(endpoint, "actor")
    actor.start()
    pool = ActorPool([FAULTY] * 2, num_actors=2, remote_actors=1, bind=endpoint, **RESTART)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    actor.come_back()
    assert select.select([pool], [], [], PATIENCE)[0], "its goodbye must have come"
    batch = receive_until_back(pool, 1)
    assert batch.observations[-1].tolist() == [1, 0, 0, restart_seed(1, 1, 1)]
    pool.close()
    actor.leave()
