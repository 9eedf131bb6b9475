from __future__ import annotations

import subprocess
import sys

import pytest

from envbus.runner.extras import check_version, how_to_install


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
        ("stable_baselines3", "envbus.runner.adapters.sb3", "sb3"),
        ("pytest", "envbus.runner.testing", "testing"),
        ("prometheus_client", "envbus.runner.monitoring.exporter", "monitoring"),
        ("textual", "envbus.runner.cli.top_app", "top"),
    ],
)
def test_modules_that_need_more_say_what(library: str, module: str, extra: str) -> None:
    command = [sys.executable, "-c", WITHOUT, library, module]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = child.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert library in last
    assert f"pip install -e '.[{extra}]' in a clone" in last


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0a1", "3"])
def test_a_library_that_is_new_enough_is_taken(version: str) -> None:
    check_version("BusVecEnv", "sb3", "stable-baselines3", version, (2, 9))


@pytest.mark.parametrize("version", ["2.8.0", "1.10", "2"])
def test_a_library_that_is_too_old_is_named_with_its_extra(version: str) -> None:
    with pytest.raises(ImportError, match=rf"2\.9 or newer, not {version}: pip .*'\.\[sb3\]'"):
        check_version("BusVecEnv", "sb3", "stable-baselines3", version, (2, 9))


OLD = """
import importlib, sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules[sys.argv[1]] = library = types.ModuleType(sys.argv[1])
library.__version__ = sys.argv[2]
importlib.import_module(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("library", "version", "module", "message"),
    [
        ("stable_baselines3", "2.3.2", "sb3", "BusVecEnv needs stable-baselines3 2.9"),
        ("tianshou", "1.1.0", "tianshou", "ActorVectorEnv needs tianshou 2.0"),
        ("torchrl", "0.9.2", "torchrl", "BusEnv needs torchrl 0.10"),
        ("ray", "2.54.0", "rllib", "envbus.runner.adapters.rllib needs ray 2.55"),
    ],
)
def test_an_adapter_looks_at_the_version_of_its_library_first(
    library: str, version: str, module: str, message: str
) -> None:
    module = f"envbus.runner.adapters.{module}"
    command = [sys.executable, "-c", OLD, library, version, module]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = child.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {message} or newer, not {version}")
