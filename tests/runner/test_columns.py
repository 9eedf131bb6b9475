from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.columns import Columns


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def step(columns: Columns, ids: Any, value: float, *, done: bool = False) -> None:
    """One row per env: observation `value`, action, reward and next observation follow from it."""
    rows = np.full((len(ids), 1), value)
    columns.observe(ids, rows)
    columns.act(ids, ids, int(value), {"logp": rows[:, 0] / 2})
    flags = np.full(len(ids), done)
    columns.complete(ids, rows + 1, rows[:, 0] * 10, flags, ~flags)


def begin(columns: Columns, ids: Any, number: int, t: int = 0) -> None:
    columns.begin(ids, eps_id=ids + number, incarnation=ids * 0 + 1, t=t)


def test_rows_come_env_by_env_and_as_views_if_all_are_full() -> None:
    columns = Columns(2, 2)
    begin(columns, ints(0, 1), 100, t=5)
    step(columns, ints(1), 0.0, done=True)
    begin(columns, ints(1), 200)
    step(columns, ints(0, 1), 1.0)
    step(columns, ints(0), 2.0)
    batch = columns.batch(columns.num_rows, "agent0", 9)
    assert batch["obs"][:, 0].tolist() == [1, 2, 0, 1]
    assert batch["next_obs"][:, 0].tolist() == [2, 3, 1, 2]
    assert batch["rewards"].tolist() == [10, 20, 0, 10]
    assert batch["eps_id"].tolist() == [100, 100, 101, 201]
    assert batch["t"].tolist() == [5, 6, 5, 0]
    assert batch["env_id"].tolist() == [0, 0, 1, 1]
    assert batch["policy_version"].tolist() == [1, 2, 0, 1]
    assert batch["terminateds"].tolist() == [False, False, True, False]
    assert batch["logp"].tolist() == [0.5, 1, 0, 0.5]
    assert batch["unroll_id"].tolist() == [9] * 4
    again = columns.batch(columns.num_rows, "agent0", 9)
    assert np.shares_memory(batch["obs"], again["obs"])
    assert columns.batch(ints(1, 0), "agent0", 9)["obs"][:, 0].tolist() == [1]


def test_columns_grow_and_keep_what_they_hold() -> None:
    columns = Columns(2, 1)
    begin(columns, ints(0, 1), 0)
    for value in range(5):
        step(columns, ints(1), value)
    step(columns, ints(0), 7)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert batch["obs"][:, 0].tolist() == [7, 0, 1, 2, 3, 4]
    assert batch["t"].tolist() == [0, 0, 1, 2, 3, 4]


def test_what_was_rewound_leaves_no_trace() -> None:
    columns = Columns(1, 4)
    begin(columns, ints(0), 10)
    step(columns, ints(0), 0)
    columns.truncate(0)
    begin(columns, ints(0), 20)
    step(columns, ints(0), 1)
    step(columns, ints(0), 2)
    columns.rewind(0, 1)
    begin(columns, ints(0), 30)
    step(columns, ints(0), 3, done=True)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert batch["eps_id"].tolist() == [10, 30]
    assert batch["t"].tolist() == [0, 0]


def test_kept_and_open_rows_go_over_into_the_next_fragment() -> None:
    columns = Columns(2, 4)
    begin(columns, ints(0, 1), 0)
    step(columns, ints(0, 1), 0)
    step(columns, ints(0), 1)
    columns.observe(ints(0), np.array([[5.0]]))
    columns.act(ints(0), ints(3), 8, {"logp": np.array([0.25])})
    following = columns.following(1, kept=ints(2, 0), opened=np.array([True, False]))
    following.complete(ints(0), np.array([[6.0]]), np.ones(1), *np.zeros((2, 1), np.bool_))
    batch = following.batch(following.num_rows, "agent0", 0)
    assert batch["obs"][:, 0].tolist() == [0, 1, 5]
    assert batch["policy_version"].tolist() == [0, 1, 8]
    assert batch["t"].tolist() == [0, 1, 2]
    assert columns.batch(columns.num_rows, "agent0", 0)["obs"][:, 0].tolist() == [0, 1, 0]


def test_a_wider_dtype_widens_and_another_shape_is_refused() -> None:
    columns = Columns(1, 3)
    begin(columns, ints(0), 0)
    step(columns, ints(0), 1)
    columns.observe(ints(0), np.array([[2]]))
    columns.act(ints(0), np.array([1.5]), 0, {"logp": np.zeros(1)})
    columns.complete(ints(0), np.array([[3]]), np.zeros(1), *np.zeros((2, 1), np.bool_))
    assert columns.batch(columns.num_rows, "a", 0)["actions"].tolist() == [0.0, 1.5]
    with pytest.raises(ValueError, match="obs has shape"):
        columns.observe(ints(0), np.zeros((1, 2)))
    with pytest.raises(ValueError, match="extra columns are"):
        columns.act(ints(0), ints(0), 0, {})


def test_nested_observations_are_columns_of_columns() -> None:
    columns = Columns(1, 1)
    begin(columns, ints(0), 0)
    seen = {"a": np.ones((1, 2)), "b": (np.zeros(1, np.int64),)}
    columns.observe(ints(0), seen)
    columns.act(ints(0), ints(0), 0, {})
    columns.complete(ints(0), seen, np.zeros(1), *np.zeros((2, 1), np.bool_))
    batch = columns.batch(columns.num_rows, "a", 0)
    assert batch["obs"]["a"].shape == (1, 2)
    assert batch["next_obs"]["b"][0].tolist() == [0]


def test_no_rows_are_an_empty_batch() -> None:
    assert len(Columns(3, 2).batch(ints(0, 0, 0), "a", 0)) == 0


def test_what_was_observed_is_handed_out_as_views_where_envs_are_in_step() -> None:
    columns = Columns(4, 3)
    begin(columns, ints(0, 1, 2, 3), 0)
    rows = np.arange(3.0).reshape(3, 1)
    in_step = columns.observe(ints(1, 2, 3), rows)
    assert np.array_equal(in_step, rows)
    step(columns, ints(2), 5.0)
    apart = columns.observe(ints(1, 2, 3), rows)
    assert np.array_equal(apart, rows)
    in_step[2] = 7.0
    assert apart[2] == 2.0
    step(columns, ints(1), 3.0)
    assert in_step[0] == 3.0


def test_envs_in_step_and_alone_leave_the_rows_that_others_leave() -> None:
    together, apart = Columns(3, 2), Columns(3, 2)
    for columns in (together, apart):
        begin(columns, ints(0, 1, 2), 0)
    for value in range(5):  # they grow on the way
        step(together, ints(0, 1, 2), value)
        step(apart, ints(1), value)
        step(apart, ints(0, 2), value)
    one, other = (columns.batch(columns.num_rows, "agent0", 0) for columns in (together, apart))
    assert one["obs"][:, 0].tolist() == [0, 1, 2, 3, 4] * 3
    for name in ("obs", "next_obs", "rewards", "logp", "policy_version", "terminateds"):
        assert one[name].tolist() == other[name].tolist()


def test_large_memory_is_used_again_once_nobody_has_it() -> None:
    wide, flags = np.ones((2, 1 << 16)), np.zeros(2, bool)

    def fragment(columns: Columns) -> Any:
        columns = columns.following(1, ints(0, 0), flags)
        begin(columns, ints(0, 1), 0)
        columns.observe(ints(0, 1), wide)
        columns.act(ints(0, 1), ints(0, 1), 0, {})
        columns.complete(ints(0, 1), wide, np.zeros(2), flags, flags)
        return columns, columns.batch(columns.num_rows, "agent0", 0)

    def places(batch: Any) -> set[int]:
        return {batch[name].__array_interface__["data"][0] for name in ("obs", "next_obs")}

    columns, first = fragment(Columns(2, 1))
    columns, second = fragment(columns)
    columns, third = fragment(columns)
    assert len(places(first) | places(second) | places(third)) == 6
    was, kept = places(second), third["obs"][1:]  # a view of it is enough to have it
    del second, third
    columns, fourth = fragment(columns)
    assert places(fourth) == was
    assert (kept == 1.0).all()


def test_columns_are_made_where_the_caller_wants_them_and_stay_its_own() -> None:
    memory = np.zeros((2, 80_000), np.float64)
    free = [memory[0], memory[1]]

    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        fits = shape == (4, 20_000) and dtype == np.float64
        return free.pop(0).reshape(shape) if fits and free else None

    columns = Columns(2, 2, make)
    begin(columns, ints(0, 1), 0)
    for value in (1.0, 2.0):
        rows = np.full((2, 20_000), value)
        columns.observe(ints(0, 1), rows)
        columns.act(ints(0, 1), ints(0, 1), 0, {})
        columns.complete(ints(0, 1), rows + 1, ints(0, 1), ints(0, 0) > 0, ints(0, 0) > 0)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert np.array_equal(memory[0].reshape(2, 2, -1)[:, :, 0], [[1, 2], [1, 2]])
    assert np.array_equal(memory[1].reshape(2, 2, -1)[:, :, 0], [[2, 3], [2, 3]])
    assert np.shares_memory(batch["obs"], memory)
    del batch
    following = columns.following(2, ints(0, 0), ints(0, 0) > 0)
    begin(following, ints(0, 1), 0)
    following.observe(ints(0, 1), rows)
    assert memory[0].reshape(2, 2, -1)[0, 0, 0] == 1.0  # it is not used again by itself
