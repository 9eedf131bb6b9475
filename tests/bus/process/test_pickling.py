"""What a child knows of functions that it cannot import."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from envbus.bus.process.pickling import pickled

_SOURCE = """
def outer(value):
    def inner():
        return [value for _ in range(2)]
    return inner
"""


def test_code_keeps_its_file_and_lines_so_that_tracebacks_show_them() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_SOURCE, "/somewhere/program.py", "exec"), names)  # noqa: S102 - ours
    outer: Callable[[str], Callable[[], list[str]]] = pickle.loads(pickled(names["outer"]))
    inner = outer("x")
    assert inner() == ["x", "x"]
    for function, line in ((outer, 2), (inner, 3)):
        code = function.__code__
        assert (code.co_filename, code.co_firstlineno) == ("/somewhere/program.py", line)


def test_a_text_like_a_missing_files_name_stays_what_it_is() -> None:
    function = pickle.loads(pickled(lambda: "<dynamic-code>"))
    assert function() == "<dynamic-code>"
