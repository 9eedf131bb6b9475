from __future__ import annotations

import subprocess
import sys

import pytest

from envbus.runner.extras import how_to_install


@pytest.mark.parametrize(
    ("extra", "package"), [("parquet", "pyarrow"), ("video", "imageio-ffmpeg")]
)
def test_what_is_missing_is_named_as_it_can_be_installed(extra: str, package: str) -> None:
    told = how_to_install(extra)
    assert f"'{package}>=" in told
    assert f"pip install -e '.[{extra}]' in a clone" in told


WITHOUT = """
import importlib, sys
sys.modules[sys.argv[1]] = None
importlib.import_module(sys.argv[2])
"""


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("library", "module", "extra"),
    [
        ("pyarrow", "envbus.runner.recordings", "parquet"),
        ("onnxruntime", "envbus.runner.adapters.onnx_policy", "onnx"),
        ("pettingzoo", "envbus.runner.adapters.pettingzoo", "pettingzoo"),
        ("ray", "envbus.runner.adapters.rllib", "rllib"),
        ("tianshou", "envbus.runner.adapters.tianshou", "tianshou"),
        ("torchrl", "envbus.runner.adapters.torchrl", "torchrl"),
        ("pytest", "envbus.runner.testing", "testing"),
    ],
)
def test_modules_that_need_more_say_what(library: str, module: str, extra: str) -> None:
    command = [sys.executable, "-c", WITHOUT, library, module]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = child.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert library in last
    assert f"pip install -e '.[{extra}]' in a clone" in last
