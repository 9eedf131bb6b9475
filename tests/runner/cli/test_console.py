from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import LogFormat, in_options, log_to, open_console, read_tokens


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


@contextlib.contextmanager
def logged(*, is_terminal: bool = False) -> Iterator[io.StringIO]:
    """Log as JSON to what is returned, and to none of pytest's own handlers."""
    root, out = logging.getLogger(), io.StringIO()
    handlers, root.handlers, level = root.handlers, [], root.level
    try:
        log_to(Console(file=out, force_terminal=is_terminal, width=40), LogFormat.JSON)
        yield out
    finally:
        root.handlers = handlers
        root.setLevel(level)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_log_of_json_has_an_object_per_line(is_terminal: bool) -> None:
    logger = logging.getLogger("envbus.test")
    with logged(is_terminal=is_terminal) as out:
        of_fault = {"actor": "actor-3", "cause": "crash"}
        logger.warning("actor-%d [red]ended[/red]\n%s", 3, "x" * 100, extra=of_fault)
        logger.info("nobody is told")
        try:
            raise ValueError("boom")
        except ValueError:
            logger.exception("it failed", extra={"env": 5})
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "logger": "envbus.test",
        "message": f"actor-3 [red]ended[/red]\n{'x' * 100}",
        **of_fault,
    }
    assert (second["level"], second["env"]) == ("ERROR", 5)
    assert "ValueError: boom" in second["traceback"]


def test_what_json_has_no_form_for_is_logged_as_text() -> None:
    with logged() as out:
        logging.getLogger("envbus.test").warning("\ud800", extra={"env": {1}})
    assert json.loads(out.getvalue())["env"] == "{1}"
