"""How the pure parts of the bus check themselves: a broken invariant is our bug, never input's."""

from __future__ import annotations

__all__ = ["expect"]


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` holds; also under `python -O`."""
    if not condition:
        raise AssertionError(message)
