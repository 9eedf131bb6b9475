from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatten, flatten_space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envbus.bus.errors import ConfigError
from envbus.runner.policies.connectors import Flatten, FrameStack, Normalize, OneHot

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
SPACES = [
    BOX,
    spaces.Box(0, 255, (3, 2), np.uint8),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(z=BOX, a=spaces.Tuple([spaces.Discrete(3), BOX]), m=spaces.MultiBinary(2)),
]


def keys(count: int, agent: str = "a") -> list[tuple[int, str]]:
    return [(env_id, agent) for env_id in range(count)]


def samples(space: spaces.Space[Any], count: int) -> tuple[list[Any], Any]:
    """Single elements, and the same as a batch."""
    space.seed(3)
    singles = [space.sample() for _ in range(count)]
    empty: Any = create_empty_array(space, n=count)
    return singles, concatenate(space, singles, empty)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_flatten_is_gymnasiums_row_by_row(space: spaces.Space[Any]) -> None:
    singles, batch = samples(space, 5)
    connector = Flatten(space)
    flat = connector(batch, keys(5))
    expected: Sequence[Any] = [flatten(space, single) for single in singles]
    assert flat.tolist() == np.stack(expected).tolist()
    assert connector.space == flatten_space(space)
    assert flat.dtype == connector.space.dtype
    assert all(row in connector.space for row in flat)


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Sequence(BOX), spaces.Dict(a=spaces.Text(3), b=BOX)], ids=str
)
def test_what_has_no_fixed_size_is_not_flattened(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match="Flatten takes"):
        Flatten(space)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_one_hot_rows_are_in_its_space(space: spaces.Space[Any]) -> None:
    _, batch = samples(space, 5)
    connector = OneHot(space)
    hot = list(iterate(_batched(connector.space, 5), connector(batch, keys(5))))
    assert all(row in connector.space for row in hot)


def _batched(space: spaces.Space[Any], count: int) -> spaces.Space[Any]:
    return batch_space(space, count)


def test_one_hot_counts_from_the_start_and_refuses_what_is_outside() -> None:
    connector = OneHot(spaces.Discrete(3, start=5))
    assert connector(np.array([5, 7]), keys(2)).tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match="outside Discrete"):
        connector(np.array([4]), keys(1))


def test_frames_begin_with_the_first_one_repeated_and_move_on() -> None:
    stack = FrameStack(spaces.Box(0, 9, (1,), np.int64), 3)
    seen = [stack(np.array([[t], [t + 4]]), keys(2))[:, :, 0].tolist() for t in range(3)]
    assert seen == [
        [[0, 0, 0], [4, 4, 4]],
        [[0, 0, 1], [4, 4, 5]],
        [[0, 1, 2], [4, 5, 6]],
    ]
    assert stack.space == spaces.Box(0, 9, (3, 1), np.int64)


def test_frames_are_kept_per_env_and_agent_until_the_episodes_end() -> None:
    stack = FrameStack(spaces.Box(0, 9, (), np.float32), 2)
    rows = [(0, "a"), (0, "b"), (1, "a")]
    stack(np.array([1.0, 2.0, 3.0]), rows)
    stack.reset([0, 7])
    got = stack(np.array([4.0, 5.0, 6.0]), [(1, "a"), (0, "b"), (0, "c")])
    assert got.tolist() == [[3, 4], [5, 5], [6, 6]]


def test_nested_frames_keep_their_structure_and_no_one_elses_memory() -> None:
    stack = FrameStack(spaces.Dict(a=BOX, b=spaces.Discrete(2)), 2)
    batch = {"a": np.zeros((1, 2), np.float32), "b": np.array([1])}
    first = stack(batch, keys(1))
    batch["a"][:] = 7
    first["a"][:] = 8
    second = stack({"a": np.ones((1, 2), np.float32), "b": np.array([0])}, keys(1))
    assert second["a"].tolist() == [[[0, 0], [1, 1]]]
    assert second["b"].tolist() == [[1, 0]]
    with pytest.raises(ConfigError, match="a positive integer, not 0"):
        FrameStack(BOX, 0)


def test_normalised_rows_have_mean_0_and_variance_1() -> None:
    rows = np.random.default_rng(0).normal(5.0, 3.0, (1000, 2)).astype(np.float32)
    connector = Normalize(BOX)
    for part in np.split(rows, 10):
        connector(part, keys(100))
    connector.update = False
    got = connector(rows, keys(1000))
    assert got.dtype == np.float32
    assert got.mean(axis=0) == pytest.approx([0, 0], abs=1e-4)
    assert got.std(axis=0) == pytest.approx([1, 1], abs=1e-4)
    assert connector.get_state()["count"] == 1000


def test_normalised_rows_are_clipped_and_other_parts_left_alone() -> None:
    connector = Normalize(spaces.Dict(a=BOX, b=spaces.Discrete(9)), clip=0.5)
    batch = {"a": np.array([[0, 9], [4, 1]], np.float32), "b": np.array([7, 8])}
    got = connector(batch, keys(2))
    assert np.abs(got["a"]).max() == 0.5
    assert got["b"] is batch["b"]
    assert connector.space["a"] == spaces.Box(-0.5, 0.5, (2,), np.float32)


def test_without_anything_learnt_rows_are_clipped_only() -> None:
    connector = Normalize(spaces.Box(0, 255, (2,), np.uint8))
    connector.update = False
    got = connector(np.array([[1, 9], [10, 255]], np.uint8), keys(2))
    assert (got.tolist(), got.dtype) == ([[1, 9], [10, 10]], np.float32)
    assert all(row in connector.space for row in got)


def test_a_restored_filter_goes_on_where_the_other_was() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    first = Normalize(BOX)
    first(rows[:10], keys(10))
    second = Normalize(BOX)
    second.set_state(first.get_state())
    assert second.collect_delta()["count"] == 0
    assert second(rows[10:], keys(10)).tolist() == first(rows[10:], keys(10)).tolist()


@pytest.mark.parametrize(
    ("count", "mean", "m2", "told"),
    [
        (3, np.zeros(4), np.zeros(4), r"shapes \[\(4,\)\], its space \[\(2,\)\]"),
        (3, np.zeros(2), np.zeros(3), r"shapes \[\(3,\)\]"),
        (3, np.full(2, np.nan), np.zeros(2), "has NaN"),
        (3, np.zeros(2), np.full(2, -1.0), "below 0"),
        (-3, np.zeros(2), np.zeros(2), "below 0"),
        (0, np.zeros(2), np.zeros(2), r"its space \[\]"),
        ("x", np.zeros(2), np.zeros(2), "no state of a Normalize"),
    ],
)
def test_a_state_that_fits_no_filter_is_refused_and_changes_nothing(
    count: Any, mean: Any, m2: Any, told: str
) -> None:
    connector = Normalize(BOX)
    connector(np.ones((3, 2), np.float32), keys(3))
    before = connector.get_state()
    state = {"count": count, "means": [mean], "m2s": [m2]}
    for take in (connector.set_state, connector.sync, lambda one: connector.merge(one, [])):
        with pytest.raises(ConfigError, match=told):
            take(state)
    assert repr(connector.get_state()) == repr(before)


def test_an_infinity_is_the_bound_and_teaches_nothing() -> None:
    normalize = Normalize(spaces.Box(-np.inf, np.inf, (1,), np.float32), clip=5.0)
    keys = [(0, "a"), (1, "a"), (2, "a")]
    infinite = np.array([[np.inf], [-np.inf], [np.inf]], np.float32)
    assert normalize(infinite, keys).ravel().tolist() == [5.0, -5.0, 5.0]
    rows = normalize(np.array([[1.0], [3.0], [np.inf]], np.float32), keys).ravel()
    assert rows.tolist() == pytest.approx([-1.0, 1.0, 5.0])
    assert normalize.get_state()["count"] == 2
