"""Pickles what only children of this program are given: factories, functions, any other object.

Leaves out the way that it takes (`pipe.py`). Nothing that came over a socket is unpickled.
"""

from __future__ import annotations

import io
import types
from typing import Any, Final

import cloudpickle

__all__ = ["pickled"]

_BY_TYPE: Final = cloudpickle.Pickler.dispatch_table
#: What cloudpickle 3.1.3 and later write in the place of a file's name.
_NO_FILE: Final = "<dynamic-code>"


def _reduce_code(code: types.CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, args = _BY_TYPE[types.CodeType](code)
    return make, tuple(
        code.co_filename if type(arg) is str and arg == _NO_FILE else arg for arg in args
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """As cloudpickle, but code keeps its file, so that tracebacks of children show lines."""

    dispatch_table = _BY_TYPE.new_child({types.CodeType: _reduce_code})


def pickled(obj: object) -> bytes:
    """Return what `cloudpickle.loads` makes `obj` of.

    Raises:
        Exception: It cannot be pickled; any object's own code may run here.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(obj)
        return file.getvalue()
