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
    for folder in (*PACKAGES, "src"):
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    target = tmp_path_factory.mktemp("wheel")
    # By way of the sdist, as an index gets both.
    sdist = (
        "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", sdist, str(target)], cwd=copy, timeout=60, check=True)
    (archive,) = target.glob("envbus-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", str(archive), "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(target)],
        cwd=target,
        timeout=280,
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
def test_the_wheel_holds_the_page_of_the_dashboard_with_the_licence_of_its_plots(
    wheel: zipfile.ZipFile,
) -> None:
    folder = ROOT / "runner" / "dashboard" / "page"
    page = {f"envbus/runner/dashboard/page/{file.name}" for file in folder.iterdir()}
    assert page <= set(wheel.namelist())
    assert "envbus/runner/dashboard/page/uPlot.LICENSE" in page


@pytest.mark.slow
def test_the_wheel_puts_nothing_else_into_site_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = top - {"envbus"}
    assert info.endswith(".dist-info")
    assert {"envbus/__init__.py", "envbus/py.typed"} <= set(wheel.namelist())
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
    assert "msgpack>=1.2" in metadata.get_all("Requires-Dist")  # see pyproject.toml
    assert required == {
        *("cloudpickle", "gymnasium", "msgpack", "msgpack-numpy", "msgspec"),
        *("numpy", "psutil", "pyzmq", "rich", "threadpoolctl", "typer"),
        "typing-extensions",
        "websockets",
    }


def test_no_folder_of_the_project_lacks_its_package_marker() -> None:
    folders = {file.parent for package in PACKAGES for file in source_files(package)}
    assert [folder.relative_to(ROOT) for folder in folders if not has_marker(folder)] == []


def has_marker(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_this_folder_with_extras_that_there_are() -> None:
    targets = ["run", "test", "docs", "fuzz", "bench", "chaos", "examples"]
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_type_checkers_see_the_package_in_a_project_of_its_user(tmp_path: Path) -> None:
    program = tmp_path / "training.py"
    program.write_text(
        "import envbus\n"
        "from envbus.runner.batches import SampleBatch\n"
        "envs: envbus.BusVectorEnv = envbus.make_vec('CartPole-v1', 4)\n"
        "batch: SampleBatch = envs\n"
        "print(envbus.__version__.upper())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert [line.partition(": error: ")[2] for line in done.stdout.splitlines()] == [
        'Incompatible types in assignment (expression has type "BusVectorEnv", variable has type '
        '"SampleBatch")  [assignment]'
    ]


def test_the_front_door_offers_what_it_names_and_imports_it_when_it_is_used() -> None:
    program = (
        "import sys, envbus\n"
        "assert not {'numpy', 'zmq', 'envbus.runner'} & set(sys.modules)\n"
        "offered = {name for name in dir(envbus) if not name.startswith('__')}\n"
        "assert offered | {'__version__'} == set(envbus.__all__)\n"
        "print(*(getattr(envbus, name) for name in envbus.__all__), sep='\\n')\n"
        "assert not hasattr(envbus, 'nothing')\n"
        "assert envbus.runner.Timeouts and envbus.actors\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stdout.splitlines()) == 11
    assert f"\n{metadata('envbus')['Version']}\n" in done.stdout
