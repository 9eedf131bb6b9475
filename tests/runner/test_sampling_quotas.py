from __future__ import annotations

import pytest

from envbus.runner.sampling import Quota, share_out, worker_index


def amounts(quotas: list[Quota | None]) -> list[int]:
    return [0 if quota is None else quota.amount for quota in quotas]


def test_each_env_contributes_an_equal_part_wherever_it_is() -> None:
    quotas = share_out(Quota("env_steps", 120), [1, 3, 2], [None] * 3, turn=0)
    assert amounts(quotas) == [20, 60, 40]
    assert {quota.unit for quota in quotas if quota} == {"env_steps"}


@pytest.mark.parametrize("turn", range(7))
def test_a_number_that_does_not_divide_is_met_exactly_and_goes_round(turn: int) -> None:
    quotas = share_out(Quota("episodes", 5), [2, 2], [None, None], turn=turn)
    assert sum(amounts(quotas)) == 5
    assert amounts(quotas) == ([3, 2] if turn % 4 in (0, 1) else [2, 3])


def test_without_a_number_each_takes_a_fragment_unless_it_owes_one() -> None:
    assert share_out(Quota(), [4, 4], [None, None], turn=0) == [Quota(), Quota()]
    assert share_out(Quota(), [4, 4], [Quota(), None], turn=0) == [None, Quota()]


def test_who_owes_is_not_asked_and_what_it_owes_counts() -> None:
    owed = [Quota("env_steps", 50), None, None]
    quotas = share_out(Quota("env_steps", 100), [1, 1, 1], owed, turn=0)
    assert quotas[0] is None
    assert amounts(quotas) == [0, 25, 25]
    assert amounts(share_out(Quota("env_steps", 40), [1, 1, 1], owed, turn=0)) == [0, 0, 0]
    # Episodes and fragments that are owed do not count as steps.
    owed = [Quota("episodes", 50), None, None]
    assert amounts(share_out(Quota("env_steps", 100), [1, 1, 1], owed, turn=0)) == [0, 50, 50]


def test_all_may_owe_and_nothing_may_be_wanted() -> None:
    assert share_out(Quota("env_steps", 9), [1], [Quota("env_steps", 1)], turn=0) == [None]
    assert share_out(Quota("env_steps", 0), [2, 2], [None, None], turn=0) == [None, None]


def test_a_quota_is_of_one_kind_and_not_negative() -> None:
    assert Quota.of(None, None) == Quota()
    assert (Quota.of(3, None).num_env_steps, Quota.of(3, None).num_episodes) == (3, None)
    assert (Quota.of(None, 3).num_env_steps, Quota.of(None, 3).num_episodes) == (None, 3)
    with pytest.raises(ValueError, match="not both"):
        Quota.of(1, 1)
    with pytest.raises(ValueError, match="negative"):
        Quota.of(None, -1)


def test_no_two_lives_of_any_runners_have_one_worker_index() -> None:
    indices = [worker_index(7, i, life, 3) for i in range(3) for life in range(10)]
    assert len(set(indices)) == len(indices)
    assert min(indices) == 7
