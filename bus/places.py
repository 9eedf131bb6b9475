"""Where a value stands inside a payload, for error messages such as `infos[3]['env']`.

Pure, and slow: called only when something cannot be sent.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator

import msgspec

from envbus.bus.messages import Tree

__all__ = ["place_of", "short_repr"]


def place_of(root: object, target: object) -> str | None:
    """Return the path from `root` to `target`, found by identity, or None.

    Args:
        root: A struct, `Tree`, dict, list or tuple; other objects are not looked into.
        target: What to look for.
    """
    pending: list[tuple[str, object]] = [("", root)]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop()
        if value is target:
            return path.lstrip(".")
        if id(value) in seen:  # a value may contain itself
            continue
        seen.add(id(value))
        pending += [(path + step, child) for step, child in _children(value)]
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Tree):
        yield "", value.value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{short_repr(key)}]", item
            yield f", in the key {short_repr(key)}", key
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item


def short_repr(value: object) -> str:
    """Return the beginning of `repr(value)`, valid as UTF-8; never fails."""
    try:
        text = reprlib.repr(value)
    except Exception as exc:  # its `__repr__` is anybody's code; big ints refuse, too
        return f"<repr failed: {type(exc).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()[:200]
