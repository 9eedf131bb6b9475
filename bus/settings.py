"""What a number that somebody sets may be, told by its name where it is not. Pure."""

from __future__ import annotations

import math
import numbers
from typing import Any

from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError

__all__ = ["check_number", "positive_int"]


def check_number(
    name: str,
    value: object,
    *,
    whole: bool = False,
    least: float = -math.inf,
    over: float = -math.inf,
    most: float = math.inf,
    finite: bool = False,
    optional: bool = False,
) -> None:
    """See that an argument or a setting is a number, before something far away fails of it.

    Raises:
        ConfigError: It is something else; a bool is no number, nor is NaN.
    """
    if optional and value is None:
        return
    kind = numbers.Integral if whole else numbers.Real
    number: Any = value  # mypy knows no order of `numbers.Real`
    none = " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, kind) or number != number:
        wanted = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} must be {wanted}{none}, not {brief(value)}")
    fits = least <= number <= most and (number > over or over == -math.inf)
    if not fits or (finite and abs(number) == math.inf):
        limits = (("at least", least), ("over", over), ("at most", most))
        rules = [f"{words} {limit:g}" for words, limit in limits if abs(limit) != math.inf]
        rules += ["finite"] * finite
        raise ConfigError(f"{name} must be {' and '.join(rules)}{none}, not {brief(value)}")


def positive_int(
    name: str, value: object, *, wanted: str = "a positive integer", most: float = math.inf
) -> int:
    """Return a count that somebody sets, also one of NumPy's integers, as an int.

    Raises:
        ConfigError: It is something else; a bool is no number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise ConfigError(f"{name} must be {wanted}, not {brief(value)}")
    check_number(name, value, most=most)
    return int(value)
