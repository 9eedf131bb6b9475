"""What `pip install envbus` would bring."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tests.sources import ROOT, source_files

PACKAGES = ("bus", "actors", "runner", "bench")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, since building leaves files beside them."""
    copy = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, copy / package, ignore=shutil.ignore_patterns(".*", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(target)],
        cwd=copy,
        timeout=100,
        check=True,
    )
    (file,) = target.glob("envbus-*.whl")
    return zipfile.ZipFile(file)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_source_file_below_envbus(
    wheel: zipfile.ZipFile, package: str
) -> None:
    expected = {f"envbus/{file.relative_to(ROOT).as_posix()}" for file in source_files(package)}
    assert expected | {f"envbus/{package}/py.typed"} <= set(wheel.namelist())


@pytest.mark.slow
def test_the_wheel_puts_nothing_else_into_site_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = top - {"envbus"}
    assert info.endswith(".dist-info")
    assert "envbus/__init__.py" not in wheel.namelist()
    assert not [
        name
        for name in wheel.namelist()
        if name.endswith((".json", ".md", ".txt")) and name.startswith("envbus/")
    ]


@pytest.mark.slow
def test_the_wheel_names_its_licence_its_command_and_no_heavy_dependency(
    wheel: zipfile.ZipFile,
) -> None:
    (info,) = {n.partition("/")[0] for n in wheel.namelist()} - {"envbus"}
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "MIT"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "envbus = envbus.bench.entry:main" in wheel.read(f"{info}/entry_points.txt").decode()
    required = {
        line.split(">=")[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line
    }
    assert required == {
        *("cloudpickle", "gymnasium", "msgpack", "msgpack-numpy", "msgspec"),
        *("numpy", "psutil", "pyzmq", "rich", "threadpoolctl", "typer"),
        "websockets",
    }


def test_no_folder_of_the_project_lacks_its_package_marker() -> None:
    folders = {file.parent for package in PACKAGES for file in source_files(package)}
    assert [folder.relative_to(ROOT) for folder in folders if not has_marker(folder)] == []


def has_marker(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_this_folder_with_extras_that_there_are() -> None:
    targets = ["run", "test", "fuzz", "bench", "chaos", "examples"]
    done = subprocess.run(
        ["make", "--dry-run", *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    installed = re.findall(r"pip install .*--editable '(.*?)'", done.stdout)
    assert {".", ".[test]", ".[fuzz]"} <= set(installed)
    extras = metadata("envbus").get_all("Provides-Extra") or []
    for what in installed:
        matched = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
        assert matched, what
        assert set((matched[1] or "test").split(",")) <= set(extras)
