from __future__ import annotations

import io
from pathlib import Path

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import in_options, open_console, read_tokens


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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("secret\n", "secret"),
        ("# of all\n\n secret \n", "secret"),
        ("alice:secret\n", {"alice": "secret"}),
        ("alice:one\n# gone: bob\ntwo\n", {"alice": "one", "line-3": "two"}),
        ("", ""),
    ],
)
def test_a_file_holds_one_token_or_several_with_names(
    text: str, tokens: object, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    assert read_tokens(file) == tokens
    assert read_tokens(None) is None


def test_two_tokens_of_one_name_are_refused_without_a_word_of_them(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\nalice:two\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="two tokens of the name 'alice'") as caught:
        read_tokens(file)
    assert "one" not in str(caught.value).replace(str(file), "")
