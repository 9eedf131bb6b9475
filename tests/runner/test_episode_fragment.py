from __future__ import annotations

from typing import Any

import numpy as np

from envbus.runner.episode import EpisodeRecorder, Fragment

GO_ON = {"__all__": False}


def play(steps: int, agents: int = 1, cut_at: int = 0) -> Fragment:
    """Agent i acts in every (i + 1)th step."""
    recorder = EpisodeRecorder(1, 0)
    seen: dict[Any, Any] = {agent: np.zeros(1) for agent in range(agents)}
    ready = recorder.reset(seen)
    for t in range(1, steps + 1):
        for agent in ready:
            recorder.act(agent, 0)
        if t - 1 == cut_at:
            recorder.cut()
        seen = {agent: np.full(1, t) for agent in range(agents) if t % (agent + 1) == 0}
        ready = recorder.step(seen, {}, GO_ON, GO_ON)
    return recorder.cut()


def test_a_fragment_is_split_between_two_env_steps() -> None:
    fragment = play(10, agents=2)
    first, rest = fragment.split(5)
    assert [part.env_steps for part in (first, rest)] == [5, 5]
    assert [batch["t"].tolist() for _, batch in first.parts] == [[0, 1, 2, 3, 4], [1, 3]]
    assert [batch["t"].tolist() for _, batch in rest.parts] == [[5, 6, 7, 8, 9], [5, 7, 9]]
    first, rest = rest.split(1)
    assert [batch["t"].tolist() for _, batch in first.parts] == [[5], [5]]
    assert rest.begin == 6


def test_who_has_no_row_in_a_part_is_not_in_it() -> None:
    first, rest = play(4, agents=2).split(1)
    assert [len(batch) for _, batch in first.parts] == [1]
    assert [len(batch) for _, batch in rest.parts] == [3, 2]


def test_env_steps_are_found_that_have_as_many_rows() -> None:
    fragment = play(10, agents=2, cut_at=4)
    assert fragment.begin == 4
    assert [batch["t"].tolist() for _, batch in fragment.parts] == [[*range(4, 10)], [5, 7, 9]]
    assert [fragment.env_steps_with(rows) for rows in (1, 2, 3, 4, 9, 10)] == [1, 2, 2, 3, 6, 6]
