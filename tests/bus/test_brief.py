from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.brief import brief, cut, printable
from envbus.bus.wire.messages import Tree


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


def test_arrays_are_shown_without_their_numbers() -> None:
    many = np.arange(2**12, dtype=np.uint8).reshape((2,) * 12)  # NumPy would show each of them
    told = f"<an array of |u1, shape {many.shape}>"
    pair = spaces.GraphInstance(many, None, None)
    within = np.zeros((), np.dtype([("a", np.uint8, (2,) * 12)]))[()]
    assert brief(many) == told
    assert brief([many, {"a": many}]) == f"[{told}, {{'a': {told}}}]"
    assert brief(OrderedDict(a=many)) == f"{{'a': {told}}}"
    assert brief(pair) == f"({told}, None, None)"
    assert brief(Tree([many])) == f"Tree([{told}])"
    assert brief(within) == "<a scalar of |V4096>"
