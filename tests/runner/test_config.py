from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from envbus.bus.errors import ConfigError
from envbus.runner.config import FleetConfig, choose_autoreset_mode


@pytest.mark.parametrize("word", ["SameStep", "SAME_STEP", "same_step", AutoresetMode.SAME_STEP])
def test_a_mode_is_named_by_its_value_or_its_name(word: object) -> None:
    assert choose_autoreset_mode(word) is AutoresetMode.SAME_STEP


@pytest.mark.parametrize("word", ["sometimes", "", None, 1])
def test_what_is_no_mode_is_refused_with_those_that_there_are(word: object) -> None:
    with pytest.raises(ValueError, match="one of 'NextStep', 'SameStep', 'Disabled', not"):
        choose_autoreset_mode(word)


@pytest.mark.parametrize("count", ["1", -1, 0.5, None, True])
def test_a_number_of_remote_actors_that_is_none_is_refused_by_name(count: object) -> None:
    with pytest.raises(ConfigError, match="remote_actors must be"):
        FleetConfig(remote_actors=count, bind="ipc:///nowhere/bus")  # type: ignore[arg-type]
