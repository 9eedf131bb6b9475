from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.bus.brief import brief, cut, printable


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


def deep() -> Any:
    value: Any = 1
    for _ in range(500):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "value",
    [
        10**10_000,
        -(1 << 10_000_000),
        deep(),
        "x" * 10**7,
        b"x" * 10**7,
        ["x" * 10**6] * 1000,
        np.str_("x" * 10**6),
        np.zeros((300, 300)),
        Broken(),
        [Broken()],
        float("nan"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_has_a_short_form(value: Any) -> None:
    assert 0 < len(brief(value)) <= 400


def test_small_values_look_as_they_do_elsewhere() -> None:
    for value in (1, "a", b"a", [1, 2], {"a": (None, True)}, 1.5):
        assert brief(value) == repr(value)


def test_a_text_that_is_cut_says_so() -> None:
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("x" * 11, 10) == "xxxxxx ..."


def test_control_characters_are_escaped_and_letters_are_not() -> None:
    assert printable("Grüße") == "Grüße"
    assert printable("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
