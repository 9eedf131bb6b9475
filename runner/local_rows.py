"""What a simulator's own copy of a policy adds to a row, as the runner's policy would. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envbus.bus.messages import Tree as Wrapped
from envbus.runner.nested import Tree

__all__ = ["fitted"]


def fitted(given: Mapping[str, Any], like: Mapping[str, Tree]) -> tuple[dict[str, Tree], list[str]]:
    """Return columns of one row by name, and what is wrong with those that were given.

    Args:
        given: By name, as it came over the wire.
        like: What the runner's policy gives for a row: names, structure, shapes and dtypes. What
            is missing, or is otherwise, is NaN, or 0 where there is no NaN; what is more is left
            out: all rows of a policy have the same columns.
    """
    row: dict[str, Tree] = {}
    wrong = []
    for name, expected in like.items():
        try:
            row[name] = _cast(given[name], expected)
        except KeyError:
            wrong.append(f"{name} is missing")
            row[name] = _blank(expected)
        except (ValueError, TypeError, OverflowError) as exc:
            wrong.append(f"{name}: {exc}")
            row[name] = _blank(expected)
    return row, wrong


def _cast(value: Any, expected: Tree) -> Tree:
    if type(value) is Wrapped:
        value = value.value
    if isinstance(expected, dict):
        if not isinstance(value, Mapping) or value.keys() != expected.keys():
            raise ValueError(f"expected a map of {sorted(expected)}")
        return {key: _cast(value[key], part) for key, part in expected.items()}
    if isinstance(expected, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            raise ValueError(f"expected {len(expected)} values")
        return tuple(_cast(one, part) for one, part in zip(value, expected, strict=True))
    dtype = np.result_type(expected)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or array.shape != np.shape(expected):
        raise ValueError(
            f"expected {dtype} of shape {np.shape(expected)}, got {array.dtype} of {array.shape}"
        )
    return array.astype(dtype)


def _blank(expected: Tree) -> Tree:
    if isinstance(expected, dict):
        return {key: _blank(part) for key, part in expected.items()}
    if isinstance(expected, tuple):
        return tuple(_blank(part) for part in expected)
    dtype = np.result_type(expected)
    return np.full(np.shape(expected), np.nan if dtype.kind in "fc" else 0, dtype)
