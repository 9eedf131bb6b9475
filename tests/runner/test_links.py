from __future__ import annotations

import pytest

from envbus.runner.actor import Actor
from envbus.runner.config import FleetConfig
from envbus.runner.links import Links

pytestmark = pytest.mark.timeout(60)


def test_of_remote_actors_that_wait_the_first_that_joined_is_employed() -> None:
    actors = [Actor(index, ["source"], index, remote=True, shared=True) for index in range(2)]
    config = FleetConfig(num_actors=2, remote_actors=2, bind=("tcp://127.0.0.1:*",))
    links = Links(actors, config, "envbus.actors.hosting:main")
    try:
        for name in ("first", "second", "third"):
            links.join(name.encode(), name)
        assert [links.engage(), links.engage(), links.engage()] == [*actors, None]
        assert [actor.peer_name for actor in actors] == ["first", "second"]
    finally:
        links.close(0.0, terminate=True)
