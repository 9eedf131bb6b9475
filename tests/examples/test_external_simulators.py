"""What docs/external-simulators.md prints works as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envbus.runner import EnvRunner, ExternalEnvBridge, RunnerConfig
from envbus.runner.policies import RandomPolicy
from tests.sources import ROOT

DOC = ROOT / "docs" / "external-simulators.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [text for language, text in BLOCK.findall(DOC.read_text("utf-8")) if language == "python"]
DRONE, *SNIPPETS = BLOCKS
BOX, PUSH = Box(-np.inf, np.inf, (2,), np.float32), Discrete(2)


@contextmanager
def serving(spaces: tuple[Any, Any]) -> Iterator[str]:
    """The address of a bridge whose simulators are answered."""
    agents = isinstance(spaces[0], dict)
    with ExternalEnvBridge(*spaces) as bridge:
        policy = RandomPolicy(PUSH, seed=0)
        policies = {"shared": policy} if agents else policy
        config = RunnerConfig(policy_mapping_fn=(lambda *_: "shared") if agents else None)
        with EnvRunner(bridge, policies, config) as runner, runner.serving():
            yield bridge.address


@pytest.mark.slow
@pytest.mark.parametrize(
    "snippet", [pytest.param(text, id=f"snippet {n}") for n, text in enumerate(SNIPPETS, 1)]
)
def test_a_snippet_runs(snippet: str) -> None:
    spaces: tuple[Any, Any] = BOX, PUSH
    if "agents = " in snippet:
        small = Box(-1.0, 1.0, (2,), np.float32)
        spaces = dict.fromkeys(("left", "right"), small), dict.fromkeys(("left", "right"), PUSH)
    with serving(spaces) as address:
        exec(compile(snippet, DOC.name, "exec"), {"address": address})  # noqa: S102


@pytest.mark.slow
def test_the_drone_flies(tmp_path: Path) -> None:
    program = tmp_path / "drone.py"
    program.write_text(DRONE, "utf-8")
    with serving((BOX, PUSH)) as address:
        done = subprocess.run(
            [sys.executable, str(program), address, "4", "2"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "no more training" not in done.stdout
