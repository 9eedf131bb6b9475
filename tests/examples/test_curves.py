from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow


def test_recorded_runs_are_drawn(tmp_path: Path) -> None:
    runs = [
        {"seed": seed, "target": 3.0, "steps": [10, 20], "returns": [1.0, seed]} for seed in (2, 3)
    ]
    recorded = tmp_path / "some.jsonl"
    recorded.write_text("".join(f"{json.dumps(run)}\n" for run in runs), "utf-8")
    plot = tmp_path / "some.svg"
    script = ROOT / "examples" / "curves.py"
    subprocess.run(
        [sys.executable, str(script), "--plot", str(plot), str(recorded), str(recorded)],
        check=True,
        timeout=60,
    )
    assert "seed 3" in plot.read_text("utf-8")
