from __future__ import annotations

import io

import pytest

from envbus.runner.cli.console import in_options, open_console


def test_off_a_terminal_lines_are_neither_wrapped_nor_filled_up() -> None:
    out = io.StringIO()
    words = "word " * 100
    open_console(out).print(words.strip())
    assert out.getvalue() == words.strip() + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "pass keys= and allow=, or say insecure=True",
            "pass --keys and --allow, or say --insecure",
        ),
        ("keys (server_key='server.key')", "keys (--server-key)"),
        ("num_actors must be 1", "--num-actors must be 1"),
        ("the token, its keys and what they allow", "the token, its keys and what they allow"),
    ],
)
def test_arguments_of_python_are_told_as_options(text: str, told: str) -> None:
    assert in_options(text) == told
