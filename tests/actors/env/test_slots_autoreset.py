from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from envbus.actors.env.slots import Autoreset, same_step_info


def test_next_step_waits_until_the_reset() -> None:
    rule = Autoreset(AutoresetMode.NEXT_STEP, 2)
    assert rule.on_end(1) is False
    assert rule.waiting == [False, True]
    rule.on_reset(1)
    assert rule.waiting == [False, False]


def test_same_step_resets_at_once() -> None:
    rule = Autoreset(AutoresetMode.SAME_STEP, 2)
    assert rule.on_end(0) is True
    assert rule.waiting == [False, False]


def test_disabled_never_resets() -> None:
    rule = Autoreset(AutoresetMode.DISABLED, 2)
    assert rule.on_end(0) is False
    assert rule.waiting == [False, False]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_reset_that_was_asked_for_ends_the_waiting(mode: AutoresetMode) -> None:
    rule = Autoreset(mode, 1)
    rule.on_end(0)
    rule.on_reset(0)
    assert rule.waiting == [False]


def test_the_reset_info_stands_at_the_top() -> None:
    assert same_step_info([1], {"a": 1}, {"b": 2}) == {
        "final_obs": [1],
        "final_info": {"a": 1},
        "b": 2,
    }
