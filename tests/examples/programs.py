"""Runs the examples as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.sources import ROOT

__all__ = ["run_example"]


def run_example(name: str, *arguments: str | Path) -> dict[str, Any]:
    """Return what the example says in its last line; it has 280 s, alone it needs ten."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found
