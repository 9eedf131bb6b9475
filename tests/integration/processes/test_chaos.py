"""The short form of `envbus chaos`: everything is broken for real, and the audit finds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from envbus.runner.chaos.messages import ChaosProgress
from envbus.runner.chaos.result import ChaosResult
from envbus.runner.chaos.run import ChaosConfig, run_chaos
from envbus.runner.chaos.schedule import FaultKind
from tests.integration.group_children import wait_until


def quiet(label: str, progress: ChaosProgress) -> None:
    """Say nothing."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_step_is_lost_doubled_or_mixed_up_whatever_breaks() -> None:
    config = ChaosConfig(seconds=13.0, calm_seconds=1.0, seed=3, num_envs=12, num_actors=3)
    result = run_chaos(config, quiet)
    assert result.violations == []
    assert {kind.kind for kind in result.kinds if kind.injected} == {
        kind.value for kind in FaultKind
    }
    assert {"crash", "timeout", "error"} <= set(result.faults)
    assert result.recovered.n > 10
    assert msgspec.json.decode(msgspec.json.encode(result), type=ChaosResult) == result


@pytest.mark.slow
def test_a_driver_that_fails_is_a_violation_with_its_last_words() -> None:
    config = ChaosConfig(seconds=5.0, calm_seconds=1.0, num_envs=1, num_actors=2)
    result = run_chaos(config, quiet)
    assert "num_actors=2 is more than the 1 env(s)" in result.violations[0]


@pytest.mark.slow_but_first
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        ["chaos", "--envs", "1", "--actors", "1"],
        ["bench", "vector", "--here", "--case", "null:2", "--out", "."],
    ],
)
def test_a_command_that_is_to_end_removes_its_folders(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "envbus.bench.entry", *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: any((tmp_path / "tmp").iterdir()), "a folder")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 128 + signal.SIGTERM
        assert not any((tmp_path / "tmp").iterdir())
    finally:
        process.kill()
        process.wait()
