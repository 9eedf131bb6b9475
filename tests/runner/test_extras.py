from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from envbus.runner.extras import how_to_install, needed_for


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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Have a library of some version be found first; returns the folder that has it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(library: str, version: str) -> Path:
        folder = tmp_path / f"{library.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
        return tmp_path

    return install


Install: TypeAlias = Callable[[str, str], Path]


@pytest.mark.parametrize("version", ["2.9", "2.9.0", "2.10.0a1", "2.13.0+cpu", "3"])
def test_a_library_that_is_new_enough_is_taken(version: str, installed: Install) -> None:
    installed("stable-baselines3", version)
    with needed_for("BusVecEnv", "sb3"):
        pass


@pytest.mark.parametrize("version", ["2.8.0", "1.10", "2", "2.8.9rc1"])
def test_a_library_that_is_too_old_is_named_with_its_extra(
    version: str, installed: Install
) -> None:
    installed("stable-baselines3", version)
    message = rf"BusVecEnv needs stable-baselines3 2\.9 or newer, not {version}: pip .*'\.\[sb3\]'"
    with pytest.raises(ImportError, match=message), needed_for("BusVecEnv", "sb3"):
        raise AssertionError("it is not imported")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("library", "version", "module", "message"),
    [
        ("stable-baselines3", "2.3.2", "adapters.sb3", "BusVecEnv needs stable-baselines3 2.9"),
        ("tianshou", "1.1.0", "adapters.tianshou", "ActorVectorEnv needs tianshou 2"),
        ("torchrl", "0.9.2", "adapters.torchrl", "BusEnv needs torchrl 0.10"),
        ("ray", "2.54.0", "adapters.rllib", "envbus.runner.adapters.rllib needs ray 2.55"),
        ("pettingzoo", "1.24.3", "adapters.pettingzoo", "parallel_env needs pettingzoo 1.25"),
        ("onnxruntime", "1.16.3", "adapters.onnx_policy", "OnnxPolicy needs onnxruntime 1.17"),
        ("pyarrow", "14.0.1", "recordings", "envbus.runner.recordings needs pyarrow 17"),
        ("textual", "0.89.1", "cli.top_app", "`envbus top` needs textual 1"),
        (
            "prometheus-client",
            "0.19.0",
            "monitoring.exporter",
            "MetricsServer needs prometheus-client 0.20",
        ),
    ],
)
def test_a_module_looks_at_the_version_of_its_library_first(
    library: str, version: str, module: str, message: str, installed: Install
) -> None:
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import envbus.runner.{module}"
    command = [sys.executable, "-c", program, str(installed(library, version))]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = child.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {message} or newer, not {version}")
