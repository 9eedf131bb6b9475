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
#: `BaseException.args` itself.
_ARGS: Any = BaseException.__dict__["args"].__get__


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
        type_module=_name(kind, "__module__"),
        type_name=_name(kind, "__qualname__"),
        message=_message(error),
        traceback=_traceback(error),
        args=_arguments(error),
    )


def _name(kind: type, attribute: str) -> str:
    try:
        return _text(getattr(kind, attribute))
    except BaseException:  # a metaclass may make it anything
        return "?"


def _message(error: BaseException) -> str:
    try:
        return _text(str(error))
    except BaseException as second:  # __str__ is anybody's code, and may even exit
        return f"(its text cannot be shown: {_name(type(second), '__qualname__')} in __str__)"


def _traceback(error: BaseException) -> str:
    try:
        return _text("".join(traceback.format_exception(error)))
    except BaseException as second:  # formatting calls anybody's __str__ and __repr__
        frames = "".join(traceback.format_tb(error.__traceback__))
        return _text(
            f"Traceback (most recent call last):\n{frames}{_name(type(error), '__qualname__')} "
            f"(not shown: {_name(type(second), '__qualname__')} while formatting)\n"
        )


def _arguments(error: BaseException) -> Tree | None:
    # The tuple that BaseException keeps, not a property of the same name.
    args: Any = _ARGS(error)
    return Tree(args) if all(map(_is_plain, args)) else None


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
    # The type's own method: `str()` may return a subclass, which may encode as it likes.
    text = str.encode(str(value), "utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
