from __future__ import annotations

import pytest

from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.connections import Connections
from envbus.runner.workers.worker import Actor

pytestmark = pytest.mark.timeout(60)


def test_of_remote_actors_that_wait_the_first_that_joined_is_employed() -> None:
    actors = [Actor(index, ["source"], index, remote=True, shared=True) for index in range(2)]
    config = FleetConfig(num_actors=2, remote_actors=2, bind=("tcp://127.0.0.1:*",))
    connections = Connections(actors, config, "envbus.actors.process.joining:main")
    try:
        for name in ("first", "second", "third"):
            connections.join(name.encode(), name)
        assert [connections.engage(), connections.engage(), connections.engage()] == [*actors, None]
        assert [actor.peer_name for actor in actors] == ["first", "second"]
    finally:
        connections.close(0.0, terminate=True)
