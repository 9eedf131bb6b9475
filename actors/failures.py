"""Exceptions as values: text and plain arguments, never the object; and back where that works."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from envbus.actors.protocol import SlotError
from envbus.bus.wire.messages import Tree

__all__ = ["original_of", "slot_error"]

#: Characters of a message or traceback that cross; a pathological one must not fill the bus.
_MAX_TEXT = 64 * 1024
_INT64 = range(-(2**63), 2**63)
#: Files below it are what calls envs, and of no use to who looks for an env's mistake.
_HERE = os.path.join(os.path.dirname(__file__), "")
#: Characters of a class' name that is looked up.
_MAX_NAME = 1000
#: What a class has of its own whose code would run when it is called, raised and shown. Whoever
#: prints a traceback asks for `__notes__`, and so calls `__getattr__`, too.
_CODE = {"__new__", "__init__", "__del__"}
_CODE |= {"__getattr__", "__getattribute__", "__setattr__", "__class__", "__notes__"}
_CODE |= {"__cause__", "__context__", "__suppress_context__", "__traceback__"}
_CODE |= {"__str__", "__repr__", "__format__"}
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


def original_of(
    module_name: str,
    type_name: str,
    message: str,
    args: tuple[object, ...] | None = None,
    *,
    trusted: bool,
) -> Exception | None:
    """Return the exception that was told of, if its class and arguments give it back.

    The class is looked up by name among what is imported, and called with the arguments or else
    with the text alone. What is not an `Exception` (SystemExit, KeyboardInterrupt) is not rebuilt,
    since raising it would end the caller's program.

    Args:
        module_name: Where the class is; "" if `type_name` begins with it.
        type_name: Its qualified name.
        message: Its text.
        args: Its arguments, if they are known.
        trusted: Whether who tells of it may have any exception's constructor called, as children
            may; else only classes are called that have no code of their own for it, such as
            built-in ones and `class CrashedError(Exception)` without a constructor.
    """
    if len(module_name) + len(type_name) > _MAX_NAME:
        return None
    if not module_name:
        return _original_of_dotted(type_name, message, trusted=trusted)
    cls = _find_class(module_name, type_name)
    if cls is None or not (trusted or _runs_no_code(cls)):
        return None
    original = None if args is None else _rebuilt(cls, args, message)
    # OSError's `args` leave the file's name out.
    return original or _rebuilt(cls, (message,), message)


def _original_of_dotted(name: str, message: str, *, trusted: bool) -> Exception | None:
    """As `original_of`, where nothing says at which dot the module's name ends."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module_name, type_name = ".".join(parts[:count]), ".".join(parts[count:])
        found = original_of(module_name, type_name, message, trusted=trusted)
        if found is not None:
            return found
    return None


def _rebuilt(cls: type[Exception], args: tuple[object, ...], message: str) -> Exception | None:
    """Return `cls(*args)` if that gives such an exception with that text."""
    try:
        original = cls(*args)
        return original if type(original) is cls and str(original) == message else None
    except BaseException:  # anybody's constructor and `__str__`: the text must do
        return None


def _find_class(module_name: str, qualified_name: str) -> type[Exception] | None:
    # Only what is imported already: who writes `except ThatType` has imported it, and a name
    # from a message never makes this process import a module.
    found: object = builtins if module_name == "builtins" else sys.modules.get(module_name)
    for part in qualified_name.split("."):
        # Not `getattr`, by which objects run code: `ctypes.cdll.x` loads a library.
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _runs_no_code(cls: type[Exception]) -> bool:
    """Return whether making, showing and raising one runs nothing but the interpreter's code."""
    return type(cls) is type and all(
        base.__module__ == "builtins" or _CODE.isdisjoint(vars(base)) for base in cls.__mro__
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
        told = traceback.TracebackException.from_exception(error, compact=True)
        own = [frame.filename.startswith(_HERE) for frame in told.stack]
        if not all(own):  # else the mistake is ours
            del told.stack[: own.index(False)]
        return _text("".join(told.format()))
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
