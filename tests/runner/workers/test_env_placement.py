from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.workers.env_placement import EnvPlacement
from envbus.runner.workers.worker import Actor, share_out


@pytest.fixture
def actors() -> list[Actor]:
    """Return actor 0 with envs 0 to 2, one vector env, and 3; actor 1 with env 4."""
    first, second = share_out(["a", "b", "c"], 2, remote=0, shared=True)[::-1]
    first.index, second.index = 0, 1
    first.env_ids, first.counts = range(4), [3, 1]
    second.env_ids, second.counts = range(4, 5), [1]
    return [first, second]


def test_env_ids_are_grouped_by_actor_and_in_order(actors: list[Actor]) -> None:
    placement = EnvPlacement(actors)
    assert placement.by_actor([4, 2, 0]) == [(actors[0], [0, 2]), (actors[1], [4])]
    assert [placement.actor_of(i).index for i in range(5)] == [0, 0, 0, 0, 1]


def test_the_envs_of_a_vector_env_step_together(actors: list[Actor]) -> None:
    placement = EnvPlacement(actors)
    assert placement.units == [range(3), range(3, 4), range(4, 5)]
    assert placement.vector_groups == dict.fromkeys(range(3), range(3))
    placement.check_vector_groups([3])
    placement.check_vector_groups([4, 2, 1, 0])
    with pytest.raises(ValueError, match=r"envs 0 to 2 are one vector env.*\[1\] are not named"):
        placement.check_vector_groups([0, 2, 4])


def test_env_ids_are_known_integers_named_once(actors: list[Actor]) -> None:
    placement = EnvPlacement(actors)
    assert placement.check_ids(np.array([4, 0])) == [4, 0]
    with pytest.raises(ValueError, match=r"unknown env ids \[5, -1\]; there are envs 0 to 4"):
        placement.check_ids([5, 0, -1])
    with pytest.raises(ValueError, match=r"env ids \[2\] are named more than once"):
        placement.check_ids([2, 1, 2])
    with pytest.raises(TypeError, match="env_ids has integers"):
        placement.check_ids([1.0])  # type: ignore[list-item]  # on purpose


@pytest.mark.parametrize("mask", [[True, False], np.array([True, False])])
def test_a_mask_is_not_taken_for_the_ids_1_and_0(actors: list[Actor], mask: Any) -> None:
    with pytest.raises(TypeError, match=r"not .*True.*those of a mask are numpy.flatnonzero"):
        EnvPlacement(actors).check_ids(mask)


def test_the_envs_of_each_actor_are_spread_over_groups() -> None:
    def groups(*actors: list[int]) -> list[list[int]]:
        sources = [str(i) for i in range(sum(map(len, actors)))]
        made = share_out(sources, len(actors), remote=0, shared=True)
        first = 0
        for index, (actor, counts) in enumerate(zip(made, actors, strict=True)):
            actor.index, actor.counts = index, counts
            actor.env_ids = range(first, first + sum(counts))
            first = actor.env_ids.stop
        return EnvPlacement(made).groups(2)

    assert groups([1, 1, 1, 1], [1, 1]) == [[0, 1, 4], [2, 3, 5]]
    assert groups([1, 1, 1], [1, 1, 1]) == [[0, 1, 5], [2, 3, 4]]
    assert groups([1], [1], [1], [1]) == [[0, 2], [1, 3]]
    assert groups([3, 1], [2]) == [[0, 1, 2], [3, 4, 5]]
    assert groups([4]) == [[0, 1, 2, 3], []]
