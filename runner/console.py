"""What the command line says besides results: one line for a refusal, and the log."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

__all__ = ["log_to", "refuse"]


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
