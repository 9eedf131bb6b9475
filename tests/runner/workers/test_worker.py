from __future__ import annotations

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.workers.worker import share_out


def test_sources_are_shared_out_in_order_and_evenly() -> None:
    actors = share_out(list("abcdefgh"), 3, remote=0, shared=True)
    assert [actor.sources for actor in actors] == [["a", "b"], ["c", "d", "e"], ["f", "g", "h"]]
    assert [actor.env_ids for actor in actors] == [range(2), range(2, 5), range(5, 8)]
    assert [actor.name for actor in actors] == ["actor-0", "actor-1", "actor-2"]
    assert all(actor.shares_memory and not actor.remote for actor in actors)


def test_the_last_actors_are_remote_and_share_no_memory() -> None:
    sources = [print, {"id": "A"}, {"id": "B"}]
    actors = share_out(sources, 3, remote=2, shared=True)
    assert [actor.remote for actor in actors] == [False, True, True]
    assert [actor.shares_memory for actor in actors] == [True, False, False]


def test_a_function_is_refused_where_it_would_go_to_a_remote_actor() -> None:
    with pytest.raises(ConfigError, match="env 1 goes to a remote actor and is a builtin_function"):
        share_out([{"id": "A"}, print], 2, remote=1, shared=True)
