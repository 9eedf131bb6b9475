from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.connectors import (
    ClipActions,
    Connector,
    ConnectorError,
    FreezeActions,
    Pipeline,
    RescaleActions,
)

BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32), dtype=np.float32)
KEYS = [(0, "a"), (1, "a"), (2, "a")]


def test_clipped_actions_are_in_the_space_and_of_its_dtype() -> None:
    got = ClipActions(BOX)(np.array([[-9.0, -9.0], [0.5, 0.5], [9.0, 99.0]]), KEYS)
    assert got.tolist() == [[-2, 0], [0.5, 0.5], [2, 10]]
    assert all(row in BOX for row in got)


def test_rescaled_actions_go_from_minus_one_and_one_to_the_bounds() -> None:
    connector = RescaleActions(BOX)
    got = connector(np.array([[-1.0, 0.0], [1.0, 1.0], [5.0, -5.0]]), KEYS)
    assert got.tolist() == [[-2, 5], [2, 10], [2, 0]]
    assert connector.space == spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert all(row in BOX for row in got)


def test_whole_numbers_are_rounded() -> None:
    space = spaces.Box(0, 3, (1,), np.int32)
    got = RescaleActions(space)(np.array([[-1.0], [0.2], [1.0]]), KEYS)
    assert (got.tolist(), got.dtype) == ([[0], [2], [3]], np.int32)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint64])
def test_the_highest_and_the_lowest_whole_number_stay_what_they_are(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    space = spaces.Box(limits.min, limits.max, (1,), dtype)
    ends = [[limits.min], [limits.max]]
    for connector, actions in (
        (RescaleActions(space), np.array([[-1.0], [1.0]], np.float32)),
        (ClipActions(space), np.array([[-1e30], [1e30]])),
        (ClipActions(space), np.array(ends, dtype)),
    ):
        got = connector(actions, KEYS[:2])
        assert (got.tolist(), got.dtype) == (ends, dtype)


def test_bounds_may_be_as_far_apart_as_numbers_go() -> None:
    most = np.finfo(np.float64).max
    connector = RescaleActions(spaces.Box(-most, most, (1,), np.float64))
    given = np.array([[-1.0], [0.0], [0.5], [1.0]], np.float32)
    there = connector(given, KEYS)
    assert there[:, 0].tolist() == pytest.approx([-most, 0.0, 0.5 * most, most])
    assert (there[0, 0], there[-1, 0]) == (-most, most)
    assert connector.invert(there, KEYS).tolist() == given.tolist()


def test_parts_that_are_no_box_stay_as_they_are() -> None:
    space = spaces.Dict(move=BOX, jump=spaces.Discrete(2))
    jump = np.array([0, 1, 1])
    batch = {"move": np.full((3, 2), 9.0), "jump": jump}
    for connector in (ClipActions(space), RescaleActions(space)):
        got = connector(batch, KEYS)
        assert got["jump"] is jump
        assert all(row in BOX for row in got["move"])
    assert RescaleActions(space).space["jump"] == spaces.Discrete(2)


def test_infinite_bounds_cannot_be_rescaled_to() -> None:
    with pytest.raises(ConfigError, match="infinite bounds"):
        RescaleActions(spaces.Box(-np.inf, np.inf, (1,), np.float32))


def test_actions_that_are_sent_are_read_only_copies() -> None:
    raw: Any = {"move": np.zeros((3, 2), np.float32), "jump": np.array([0, 1, 1])}
    space = spaces.Dict(move=BOX, jump=spaces.Discrete(2))
    sent = Pipeline([ClipActions(space), FreezeActions(space)])(raw, KEYS)
    for name in ("move", "jump"):
        assert not np.shares_memory(sent[name], raw[name])
        assert raw[name].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            sent[name][0] = 1
    row = sent["move"][1]  # what one env gets
    assert not row.flags.writeable


def test_rescaled_actions_are_told_as_the_policy_would_have_given_them() -> None:
    box = spaces.Box(np.array([0.0, 5.0], np.float32), np.array([10.0, 5.0], np.float32))
    both = Pipeline([RescaleActions(box), ClipActions(box), FreezeActions(box)])
    given = np.array([[-1.0, 0.0], [0.5, 0.0]], np.float32)
    there = both(given, KEYS)
    back = both.invert(there, KEYS)
    assert back.dtype == np.float32
    assert np.allclose(back, given)


def test_a_connector_without_a_way_back_says_so() -> None:
    class OneWay(Connector):
        pass

    with pytest.raises(ConnectorError, match=r"0:OneWay failed: .* cannot tell what an action was"):
        Pipeline([OneWay()]).invert(np.zeros(1), KEYS)
