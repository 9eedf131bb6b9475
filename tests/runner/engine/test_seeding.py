from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.engine.seeding import Life, restart_seed, spread_seeds


def test_env_i_gets_seed_plus_i() -> None:
    assert spread_seeds(42, 3) == [42, 43, 44]
    assert spread_seeds(0, 1) == [0]


def test_seeds_of_some_envs_are_in_the_order_of_their_ids() -> None:
    assert spread_seeds([7, None, 5], 5, [4, 0, 1]) == [None, 5, None, None, 7]
    assert spread_seeds(10, 3, [2]) == [10, 11, 12]
    with pytest.raises(ValueError, match="3 seeds for 2 env_ids"):
        spread_seeds([1, 2, 3], 3, [0, 1])


def test_a_negative_seed_has_lives_of_its_own() -> None:
    incarnations = [restart_seed(seed, 0, life) for seed in (-7, 7) for life in (1, 2)]
    assert len(set(incarnations)) == 4


def test_no_seed_seeds_nobody() -> None:
    assert spread_seeds(None, 2) == [None, None]


def test_seeds_may_come_one_by_one_with_none_among_them() -> None:
    assert spread_seeds([3, None, 5], 3) == [3, None, 5]
    assert spread_seeds((3, None), 2) == [3, None]


@pytest.mark.parametrize("seed", [np.int64(7), np.uint8(7), 2**70])
def test_all_integers_are_seeds(seed: Any) -> None:
    assert spread_seeds(seed, 2) == [int(seed), int(seed) + 1]
    spread = spread_seeds([seed, None], 2)
    assert spread == [int(seed), None]
    assert type(spread[0]) is int


def test_an_array_of_integers_is_a_sequence_of_seeds() -> None:
    assert spread_seeds(np.array([4, 9]), 2) == [4, 9]


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3], []])
def test_another_number_of_seeds_than_of_envs_is_refused_with_both(seeds: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"num_envs=2 but got length={len(seeds)}"):
        spread_seeds(seeds, 2)


@pytest.mark.parametrize("seed", [1.5, "12", ["1", "2"], [1.0, 2], object(), {1, 2}, b"ab"])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(TypeError):
        spread_seeds(seed, 2)


def test_a_restarted_env_gets_a_seed_of_its_own_each_time() -> None:
    """Not the one that it crashed with, and the same in a run with the same faults."""
    seeds = {restart_seed(3, env_id, life) for env_id in range(10) for life in range(1, 10)}
    assert len(seeds) == 90
    assert 3 not in seeds
    assert restart_seed(3, 4, 1) == restart_seed(3, 4, 1)
    assert restart_seed(2**70, 4, 1) is not None


def test_lives_of_envs_samplers_and_runners_have_seeds_of_their_own() -> None:
    seeds = {
        restart_seed(seed, 0, number, life)
        for seed in (-7, 7)
        for number in (1, 2, 3)
        for life in Life
    }
    assert len(seeds) == 18


def test_an_env_that_was_never_seeded_is_not_seeded_by_a_restart() -> None:
    assert restart_seed(None, 1, 1) is None
