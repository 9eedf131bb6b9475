"""What the commands share: one line for a refusal, the log, secrets from files."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from envbus.bus.errors import ConfigError

__all__ = ["log_to", "read_token", "refuse"]


def refuse(message: str, *, code: int = 2) -> int:
    """Say in one line why nothing is done; return the exit code."""
    sys.stderr.write(f"envbus: error: {' '.join(message.split())}\n")
    return code


def log_to(console: Console) -> None:
    """Show warnings, a dead actor for example, without tearing the progress line."""
    handler = RichHandler(
        console=console, show_time=False, show_path=False, markup=False, highlighter=None
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s")


def read_token(file: Path | None) -> str | None:
    """Return the token that a file holds; None without one.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return None if file is None else file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the token cannot be read: {exc}") from exc
