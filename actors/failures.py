"""Exceptions of envs as values: text and plain arguments, never the object."""

from __future__ import annotations

import traceback
from typing import Any

from envbus.actors.protocol import SlotError
from envbus.bus.messages import Tree

__all__ = ["slot_error"]

#: Characters of a message or traceback that cross; a pathological one must not fill the bus.
_MAX_TEXT = 64 * 1024
_INT64 = range(-(2**63), 2**63)


def slot_error(slot: int, phase: str, error: BaseException) -> SlotError:
    """Return what is to be told about `error`. Never raises, whatever the exception's class.

    Args:
        slot: The slot whose env raised.
        phase: What was being done: build, reset, step, autoreset, call, close.
        error: Any exception, also SystemExit and KeyboardInterrupt.
    """
    kind = type(error)
    return SlotError(
        slot=slot,
        phase=phase,
        type_module=_text(kind.__module__),
        type_name=_text(kind.__qualname__),
        message=_message(error),
        traceback=_traceback(error),
        args=_arguments(error),
    )


def _message(error: BaseException) -> str:
    try:
        return _text(str(error))
    except Exception as second:  # __str__ is anybody's code
        return f"(its text cannot be shown: {type(second).__qualname__} in __str__)"


def _traceback(error: BaseException) -> str:
    try:
        return _text("".join(traceback.format_exception(error)))
    except Exception as second:  # formatting calls anybody's __str__ and __repr__
        frames = "".join(traceback.format_tb(error.__traceback__))
        return _text(
            f"Traceback (most recent call last):\n{frames}{type(error).__qualname__} (not shown: "
            f"{type(second).__qualname__} while formatting)\n"
        )


def _arguments(error: BaseException) -> Tree | None:
    args: Any = getattr(error, "args", None)
    return Tree(args) if type(args) is tuple and all(map(_is_plain, args)) else None


def _is_plain(value: object) -> bool:
    # Exact types only: a subclass may be anything, and would arrive as its base.
    if type(value) is str:
        return len(value) <= _MAX_TEXT and _text(value) == value
    if type(value) is bytes:
        return len(value) <= _MAX_TEXT
    if type(value) is int:
        return value in _INT64
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, float)


def _text(value: object) -> str:
    """`value` as text that UTF-8 can express, of bounded length."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
