from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.connectors import (
    ClipActions,
    ClipRewards,
    Connector,
    ConnectorError,
    Pipeline,
    RescaleActions,
    connected_rewards,
    given_space,
)

KEYS = [(0, "a"), (1, "a"), (2, "a")]
REWARDS = np.array([-7.5, 0.0, 0.25])


def test_rewards_are_clipped_to_a_bound_or_to_their_signs() -> None:
    assert ClipRewards(0.5)(REWARDS, KEYS).tolist() == [-0.5, 0.0, 0.25]
    assert ClipRewards()(REWARDS, KEYS).tolist() == [-1.0, 0.0, 1.0]
    assert REWARDS.tolist() == [-7.5, 0.0, 0.25]
    assert ClipRewards(0.5).space == spaces.Box(-0.5, 0.5, (), np.float64)


@pytest.mark.parametrize("odd", [0.0, -1.0, "1", True])
def test_a_limit_of_rewards_is_a_number_over_0(odd: Any) -> None:
    with pytest.raises(ConfigError, match="limit must be"):
        ClipRewards(odd)


class Making(Connector):
    def __init__(self, made: Any) -> None:
        self.made = made

    def __call__(self, batch: Any, keys: Any) -> Any:
        return self.made


@pytest.mark.parametrize("made", [None, 1.0, [1.0, 2.0], [[1.0]] * 3, ["1", "2", "3"]])
def test_what_is_no_number_per_row_is_refused(made: Any) -> None:
    with pytest.raises(ConnectorError, match="of 3 rewards; it returns a number per row"):
        connected_rewards(Making(made), REWARDS, KEYS)


def test_a_list_of_numbers_becomes_an_array() -> None:
    assert connected_rewards(Making([1, 2, 3]), REWARDS, KEYS).tolist() == [1, 2, 3]


def test_what_a_policy_gives_is_the_space_of_the_first_action_connector() -> None:
    box = spaces.Box(0.0, 8.0, (2,))
    unit = spaces.Box(-1.0, 1.0, (2,))
    assert given_space(None, box) is box
    assert given_space(Pipeline([]), box) is box
    nested = Pipeline([Pipeline([RescaleActions(box)]), ClipActions(box)])
    assert given_space(nested, box) == unit
    with pytest.raises(ConfigError, match="the action connector Making has no `space`"):
        given_space(Making(None), box)
