from __future__ import annotations

import pytest

from envbus.runner.group.shares import Share, share_out, worker_index


def amounts(shares: list[Share | None]) -> list[int]:
    return [0 if share is None else share.amount for share in shares]


def test_each_env_contributes_an_equal_part_wherever_it_is() -> None:
    shares = share_out(Share("env_steps", 120), [1, 3, 2], [None] * 3, turn=0)
    assert amounts(shares) == [20, 60, 40]
    assert {share.unit for share in shares if share} == {"env_steps"}


@pytest.mark.parametrize("turn", range(7))
def test_a_number_that_does_not_divide_is_met_exactly_and_goes_round(turn: int) -> None:
    shares = share_out(Share("episodes", 5), [2, 2], [None, None], turn=turn)
    assert sum(amounts(shares)) == 5
    assert amounts(shares) == ([3, 2] if turn % 4 in (0, 1) else [2, 3])


def test_without_a_number_each_takes_a_fragment_unless_it_owes_one() -> None:
    assert share_out(Share(), [4, 4], [None, None], turn=0) == [Share(), Share()]
    assert share_out(Share(), [4, 4], [Share(), None], turn=0) == [None, Share()]


def test_who_owes_is_not_asked_and_what_it_owes_counts() -> None:
    owed = [Share("env_steps", 50), None, None]
    shares = share_out(Share("env_steps", 100), [1, 1, 1], owed, turn=0)
    assert shares[0] is None
    assert amounts(shares) == [0, 25, 25]
    assert amounts(share_out(Share("env_steps", 40), [1, 1, 1], owed, turn=0)) == [0, 0, 0]
    # Episodes and fragments that are owed do not count as steps.
    owed = [Share("episodes", 50), None, None]
    assert amounts(share_out(Share("env_steps", 100), [1, 1, 1], owed, turn=0)) == [0, 50, 50]


def test_all_may_owe_and_nothing_may_be_wanted() -> None:
    assert share_out(Share("env_steps", 9), [1], [Share("env_steps", 1)], turn=0) == [None]
    assert share_out(Share("env_steps", 0), [2, 2], [None, None], turn=0) == [None, None]


def test_a_share_is_of_one_kind_and_not_negative() -> None:
    assert Share.of(None, None) == Share()
    assert (Share.of(3, None).num_env_steps, Share.of(3, None).num_episodes) == (3, None)
    assert (Share.of(None, 3).num_env_steps, Share.of(None, 3).num_episodes) == (None, 3)
    with pytest.raises(ValueError, match="not both"):
        Share.of(1, 1)
    with pytest.raises(ValueError, match="negative"):
        Share.of(None, -1)


def test_no_two_lives_of_any_runners_have_one_worker_index() -> None:
    indices = [worker_index(7, i, life, 3) for i in range(3) for life in range(10)]
    assert len(set(indices)) == len(indices)
    assert min(indices) == 7
