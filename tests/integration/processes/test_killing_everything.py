"""Clients, policy workers and the process of the bridge, killed at random moments."""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.integration.bridge.test_serving import PATIENCE, STEPS, Server, Simulator, recorded
from tests.integration.bus_programs import free_port
from tests.integration.group_children import is_alive
from tests.integration.served_policies import WORKERS
from tests.waiting import pass_time

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

CLIENTS = 2
ROUNDS = 2


class Scene:
    """A server with policy workers, its clients, and the killer of all of them."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self.episodes = folder / "episodes"
        self.workers = folder / "workers"
        self.workers.mkdir()
        self.bind = f"tcp://127.0.0.1:{free_port()}"
        self.chance = random.Random(seed)
        self.killed = dict.fromkeys(("client", "worker", "bridge"), 0)
        #: Those whose end some client was told.
        self.told: set[str] = set()
        self._names = 0
        self._stack = stack
        self.serve()
        self.clients = [self.client() for _ in range(CLIENTS)]

    def serve(self) -> None:
        options = ("--bind", self.bind, "--record", str(self.episodes))
        self.server = self._stack.enter_context(Server(*options, policy="echo_in_workers"))

    def client(self) -> Simulator:
        self._names += 1
        client = Simulator(self.bind, f"s{self._names}")
        self._stack.callback(client.kill)
        return client

    def kill_a_client(self) -> None:
        index = self.chance.randrange(CLIENTS)
        self.told |= self.clients[index].kill()
        self.clients[index] = self.client()
        self.killed["client"] += 1

    def kill_a_worker(self) -> None:
        alive = [pid for one in self.workers.iterdir() if is_alive(pid := int(one.name))]
        if alive:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(alive), signal.SIGKILL)
                self.killed["worker"] += 1

    def kill_the_bridge(self) -> None:
        self.server.process.kill()
        self.server.process.wait(PATIENCE)
        self.killed["bridge"] += 1
        self.serve()

    def all_play(self) -> None:
        """Return when each client was told of the ends of some more episodes."""
        for client in self.clients:
            for _ in range(4):
                client.fresh_line()


def test_killing_client_bridge_or_policy_worker_at_any_moment_loses_no_finished_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKERS, str(tmp_path / "workers"))
    seed = secrets.randbits(32)
    logging.getLogger(__name__).warning("seed %d", seed)  # shown if the test fails
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, seed)
        for _ in range(ROUNDS):
            scene.all_play()
            blows = [scene.kill_a_client, scene.kill_a_worker, scene.kill_a_worker]
            scene.chance.shuffle(blows)
            for blow in [*blows, scene.kill_the_bridge]:
                pass_time(scene.chance.uniform(0.0, 0.3))  # any moment
                blow()
        scene.all_play()
        for client in scene.clients:
            scene.told |= client.kill()
    found = recorded(scene.episodes)
    assert scene.killed["client"] == scene.killed["bridge"] == ROUNDS
    assert scene.killed["worker"] >= ROUNDS
    assert len(scene.told) > 4 * CLIENTS * ROUNDS
    assert scene.told <= set(found), f"{len(scene.told - set(found))} episodes are lost"
    for rows in found.values():
        assert rows["actions"].tolist() == list(range(STEPS))
        assert rows["obs"][:, 0].tolist() == list(range(STEPS))
        assert rows["rewards"].tolist() == [1.0] * STEPS
        assert rows["terminateds"].tolist() == [False] * (STEPS - 1) + [True]
