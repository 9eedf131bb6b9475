from __future__ import annotations

from typing import Any

import numpy as np

from envbus.runner.columns import RunningEpisodes
from envbus.runner.episode import EpisodeIds
from envbus.runner.sampling import RunnerConfig


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def test_ids_follow_from_env_and_number_and_differ_between_runners() -> None:
    ids = []
    for index in (0, 1):
        episodes = RunningEpisodes(RunnerConfig(worker_index=index), "p", 3)
        for chosen in (ints(0, 2), ints(2)):
            episodes.begin(chosen, chosen * 0, chosen * 0)
            ids += episodes.ids.running[chosen].tolist()
    assert ids[:3] == [0, 2, 5]
    assert len(set(ids)) == 6


def test_a_result_tells_of_all_fragments_together() -> None:
    episodes = RunningEpisodes(RunnerConfig(), "p", 2)
    episodes.begin(ints(1), ints(4), ints(0))
    for reward in (0.5, 2.0):
        episodes.step(ints(1), np.array([reward]))
    episodes.fragments[1] = 3
    result = episodes.result(1, False, True, None, has_rows=True)
    assert (result.episode_return, result.length, result.fragments) == (2.5, 2, 4)
    assert (result.eps_id, result.env_id, result.incarnation) == (1, 1, 4)
    assert (result.terminated, result.truncated, result.faulty) == (False, True, False)
    assert result.agent_policies == {"agent0": "p"}
    dropped = episodes.result(1, False, False, 1, has_rows=False)
    assert (dropped.agent_steps, dropped.fragments) == ({"agent0": 1}, 3)


def test_ids_that_go_on_from_others_are_never_used_twice() -> None:
    ids = EpisodeIds(0, 3)
    ids.begin(np.arange(3))
    ids.begin(1)
    assert ids.running.tolist() == [0, 4, 2]
    assert ids.following == 6
    ids.go_on_from(20)
    assert ids.running.tolist() == [0, 4, 2]
    ids.begin(np.array([0, 1]))
    assert ids.running.tolist() == [20, 21, 2]
    ids.go_on_from(5)  # less than its own
    ids.begin(2)
    assert ids.running.tolist() == [20, 21, 25]
