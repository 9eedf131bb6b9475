"""A number that is set is one, within its range, and told by its name where it is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number, positive_int


@pytest.mark.parametrize(
    ("value", "rules"),
    [
        (3, {"whole": True, "least": 3}),
        (np.int64(3), {"whole": True}),
        (10**400, {"whole": True, "least": 0}),
        (np.float32(0.5), {"over": 0.0}),
        (math.inf, {"over": 0.0}),
        (10**400, {"finite": True}),
        (None, {"optional": True, "whole": True, "least": 1}),
    ],
)
def test_numbers_of_any_library_are_taken(value: object, rules: dict[str, Any]) -> None:
    check_number("size", value, **rules)


@pytest.mark.parametrize(
    ("value", "rules", "told"),
    [
        ("3", {}, "^size must be a number, not '3'$"),
        (None, {}, "^size must be a number, not None$"),
        (math.nan, {"least": 0}, "^size must be a number, not nan$"),
        (True, {"whole": True}, "^size must be a whole number, not True$"),
        (2.0, {"whole": True, "optional": True}, "^size must be a whole number or None, not 2.0$"),
        (-1, {"least": 0}, "^size must be at least 0, not -1$"),
        (0.0, {"over": 0.0}, "^size must be over 0, not 0.0$"),
        (3, {"least": 1, "most": 2}, "^size must be at least 1 and at most 2, not 3$"),
        (math.inf, {"over": 0.0, "finite": True}, "^size must be over 0 and finite, not inf$"),
    ],
)
def test_all_else_is_refused_by_its_name(value: object, rules: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_number("size", value, **rules)


def test_a_count_is_an_int_of_ours_whose_ever_it_was() -> None:
    assert type(positive_int("size", np.int64(3))) is int
    for wrong in (0, -1, True, 1.0, "1", None):
        with pytest.raises(ConfigError, match=r"^size must be a positive integer, not "):
            positive_int("size", wrong)
