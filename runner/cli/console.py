"""What the commands share: a line for a refusal, the log, secrets from files, spaces of an env."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from envbus.bus.errors import ConfigError
from envbus.runner.extras import how_to_install

__all__ = [
    "AskedFormat",
    "JsonLines",
    "LogFormat",
    "Metrics",
    "announce",
    "find_modules_here",
    "in_options",
    "log_to",
    "open_console",
    "read_token",
    "read_tokens",
    "refuse",
    "say",
    "serving_metrics",
    "spaces_of",
]

#: An option that several commands share.
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve figures for Prometheus there: /metrics, /healthz and /readyz. Port 0: any.",
    ),
]

#: By argument of the classes behind the commands: the option that gives it.
_OPTIONS = {
    "token": "--token-file",
    "certificate": "--tls-cert",
    "private_key": "--tls-key",
    "insecure": "--insecure",
    "keys": "--keys",
    "allow": "--allow",
    "server_key": "--server-key",
    "bind": "--bind",
    "max_rate": "--max-rate",
    "origins": "--origin",
    "num_actors": "--num-actors",
    "num_envs": "--num-envs",
    "threads_per_process": "--threads-per-process",
    "kill_one": "--kill-one",
}
#: One with its value, as Python has it; or a name that is no English word.
_ARGUMENT = re.compile(
    rf"\b({'|'.join(_OPTIONS)})=(?:True|'[^']*')?|\b({'|'.join(n for n in _OPTIONS if '_' in n)})\b"
)
#: What a line of the log says of a fault, where that is known.
_OF_FAULTS = ("env", "actor", "cause")
#: Columns of what is no terminal.
_UNWRAPPED = 10_000


class LogFormat(str, Enum):
    """How the log looks."""

    TEXT = "text"
    JSON = "json"


#: The option of commands that log.
AskedFormat = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        help="json: a JSON object per line of the log, with time, level, logger and message; "
        "of faults also env, actor and cause.",
    ),
]


class JsonLines(logging.Formatter):
    """One JSON object per record.

    `time` (ISO 8601, UTC), `level`, `logger`, `message`; `traceback` of an exception; of faults
    `env` (its id), `actor` (its process' name) and `cause`, where these are known.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _OF_FAULTS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Saying(logging.Handler):
    """Prints lines as they are, above what moves on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        try:
            say(self._console, self.format(record))
        except Exception:
            self.handleError(record)


def refuse(message: str, *, code: int = 2) -> int:
    """Say in one line why nothing is done, in words of the command line; return the exit code."""
    sys.stderr.write(f"envbus: error: {in_options(' '.join(message.split()))}\n")
    return code


def in_options(message: str) -> str:
    """Return a text that speaks of Python's arguments as one of the options that give them."""
    return _ARGUMENT.sub(lambda found: _OPTIONS[found[1] or found[2]], message)


def open_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console on standard output, standard error or `file`.

    Off a terminal no line is wrapped: those who read it search for whole messages.
    """
    console = Console(file=file, stderr=stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(file=file, stderr=stderr, highlight=False, width=_UNWRAPPED)
    )


def say(console: Console, text: str) -> None:
    """Print a line as it is: `a:b:` is an import path, no emoji."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def announce(text: str, log_format: LogFormat) -> None:
    """Write to standard error what is no fault, as a line of the log looks."""
    if log_format is LogFormat.JSON:
        told = {"name": "envbus", "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        text = JsonLines().format(logging.makeLogRecord(told))
    say(open_console(stderr=True), text)


def find_modules_here() -> None:
    """Let `module:function` name a file of the current folder, as `python -m` would."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def log_to(console: Console, log_format: LogFormat = LogFormat.TEXT) -> None:
    """Show warnings, a dead actor for example, without tearing the progress line."""
    handler: logging.Handler
    if log_format is LogFormat.JSON:
        handler = _Saying(console) if console.is_terminal else logging.StreamHandler(console.file)
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        return
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_time=False, show_path=False, markup=False, highlighter=None
        )
        form = "%(message)s"
    else:  # RichHandler would fill each line up with blanks
        handler, form = logging.StreamHandler(console.file), "%(levelname)-8s %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format=form)


@contextmanager
def serving_metrics(address: str | None) -> Iterator[str]:
    """Serve this process' figures for Prometheus meanwhile; gives where, "" without an address.

    Raises:
        ConfigError: The address is none, or is taken; or the extra is missing.
    """
    if address is None:
        yield ""
        return
    try:
        from envbus.runner.monitoring.exporter import MetricsServer
    except ImportError as exc:
        raise ConfigError(f"--metrics: {how_to_install('monitoring')}") from exc
    with MetricsServer(address) as server:
        yield f"http://{server.address}/metrics"


def spaces_of(env: str | None) -> tuple[Any, Any] | None:
    """Return observation and action space of the env that `--env` names; None without one.

    Raises:
        ConfigError: It cannot be made.
    """
    if env is None:
        return None
    import gymnasium

    try:
        made = gymnasium.make(env)
    except (Exception, SystemExit) as exc:  # whatever the env's own module raises
        raise ConfigError(f"--env {env}: {str(exc) or type(exc).__name__}") from exc
    spaces = made.observation_space, made.action_space
    made.close()
    return spaces


def read_token(file: Path | None) -> str | None:
    """Return the token that a file holds; None without one.

    Raises:
        ConfigError: It cannot be read, or others may read it.
    """
    if file is None:
        return None
    from envbus.bus.transport.curve_keys import (
        check_private,  # with ZeroMQ, which few commands need
    )

    try:
        check_private(file, "token")
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the token cannot be read: {exc}") from exc


def read_tokens(file: Path | None) -> str | dict[str, str] | None:
    """Return the token that a file holds, or those of several clients by name; None without a file.

    Each line is a token, or `name:token`; those that are empty or begin with `#` are left out. One
    without a name is called by its line, "line-3", where there are several.

    Raises:
        ConfigError: As `read_token`; or a name is there twice.
    """
    text = read_token(file)
    if text is None:
        return None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if len(lines) < 2 and ":" not in "".join(line for _, line in lines):
        return "".join(line for _, line in lines)
    found: dict[str, str] = {}
    for number, line in lines:
        given, _, token = line.rpartition(":")
        name = given or f"line-{number}"
        if name in found:
            raise ConfigError(f"{file} has two tokens of the name {name!r}")
        found[name] = token
    return found
