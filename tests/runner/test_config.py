from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from envbus.runner.config import choose_autoreset_mode


@pytest.mark.parametrize("word", ["SameStep", "SAME_STEP", "same_step", AutoresetMode.SAME_STEP])
def test_a_mode_is_named_by_its_value_or_its_name(word: object) -> None:
    assert choose_autoreset_mode(word) is AutoresetMode.SAME_STEP


@pytest.mark.parametrize("word", ["sometimes", "", None, 1])
def test_what_is_no_mode_is_refused_with_those_that_there_are(word: object) -> None:
    with pytest.raises(ValueError, match="one of 'NextStep', 'SameStep', 'Disabled', not"):
        choose_autoreset_mode(word)
