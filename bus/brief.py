"""What stands in a message for people of a value that anybody may have chosen. Pure."""

from __future__ import annotations

import reprlib
from typing import Any, Final

__all__ = ["brief", "cut", "printable"]

#: Characters of one value in a message.
_LONGEST: Final = 400
#: Characters of strings, and of the representations of other objects, within a value.
_PART: Final = 80


class _Brief(reprlib.Repr):
    """`reprlib`'s, which goes few levels deep, without its ways to fail or to take long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _PART
        self.maxlevel = 4

    def repr_int(self, x: int, _level: int) -> str:
        """Without the time, or the error, of an int that has a million digits."""
        return repr(x) if x.bit_length() <= 256 else f"<an int of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes, _level: int) -> str:
        """Without a copy of all of it."""
        return repr(x[:_PART]) + ("..." if len(x) > _PART else "")

    def repr_ndarray(self, x: Any, _level: int) -> str:
        """Without its numbers: NumPy shows all of them where each side is short."""
        return f"<an array of {x.dtype.str}, shape {x.shape}>"

    def repr_void(self, x: Any, _level: int) -> str:
        """As an array, which may be in it."""
        return f"<a scalar of {x.dtype.str}>"

    def repr_OrderedDict(self, x: Any, level: int) -> str:
        """As a dict."""
        return self.repr_dict(x, level)

    def repr_GraphInstance(self, x: Any, level: int) -> str:
        """As a tuple."""
        return self.repr_tuple(x, level)

    def repr_Tree(self, x: Any, level: int) -> str:
        """By what it holds."""
        return f"Tree({self.repr1(x.value, level - 1)})"

    def repr_instance(self, x: Any, level: int) -> str:
        """Of an exception what it holds: msgpack's of what is too long hold all that was read."""
        if not isinstance(x, BaseException):
            return super().repr_instance(x, level)
        return f"{type(x).__name__}({', '.join(self.repr1(one, level - 1) for one in x.args)})"


_brief = _Brief()


def brief(value: object) -> str:
    """Return what a value looks like, in a few hundred characters; never raises."""
    try:
        return cut(_brief.repr(value), _LONGEST)
    except Exception:  # a `__repr__` of anybody's
        return f"<{type(value).__name__}>"


def printable(text: str) -> str:
    """Return a text without line breaks, escape sequences and their like, for logs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cut(text: str, longest: int) -> str:
    """Return a text of at most so many characters, its end marked where it was cut."""
    return text if len(text) <= longest else text[: longest - 4] + " ..."
