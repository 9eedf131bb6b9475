from __future__ import annotations

import io

from envbus.runner.console import open_console


def test_off_a_terminal_lines_are_neither_wrapped_nor_filled_up() -> None:
    out = io.StringIO()
    words = "word " * 100
    open_console(out).print(words.strip())
    assert out.getvalue() == words.strip() + "\n"
