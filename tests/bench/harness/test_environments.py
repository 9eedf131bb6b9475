from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbus.bench.harness.environments import (
    DEFAULT_FOLDER,
    Environments,
    Library,
    home_of,
    without_paths,
)


def test_paths_do_not_get_into_results() -> None:
    text = "FileNotFoundError: '/some/where/file.txt' and /usr/lib/x.so, see http://a/b/c"
    assert without_paths(text) == "FileNotFoundError: 'file.txt' and x.so, see http://a/b/c"


def test_from_a_wheel_nothing_goes_into_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "bench"
    package.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert home_of(package) == tmp_path / "envbus-bench"
    (package.parent / "pyproject.toml").touch()
    assert home_of(package) == package


@pytest.mark.slow
def test_nothing_is_installed_before_somebody_has_agreed_who_knows_where_and_how_much(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "envbus.runner.cli.main", "bench", "install", "gymnasium"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    for part in ("gymnasium", str(DEFAULT_FOLDER), "14 GB", "--yes"):
        assert part in told
    environments = Environments(tmp_path / "envs")
    assert environments.missing(["sb3", "gymnasium"]) == ["sb3", "gymnasium"]
    assert not environments.folder.exists()


@pytest.mark.slow
def test_a_library_that_cannot_be_installed_keeps_its_reason(tmp_path: Path) -> None:
    environments = Environments(tmp_path / "envs")
    library = Library("broken", steps=(), probe="raise RuntimeError('no luck here')")
    assert environments.status("broken") is None
    outcome = environments.install(library)
    assert outcome.failure == "RuntimeError: no luck here"
    assert environments.status("broken") == outcome


def test_peers_see_the_benchmark_and_nothing_else_of_envbus(tmp_path: Path) -> None:
    variables = Environments(tmp_path).variables("sb3")
    (folder,) = Path(variables["PYTHONPATH"]).iterdir()
    assert folder.name == "envbus"
    assert [path.name for path in folder.iterdir()] == ["bench"]


def test_who_computes_on_one_thread_is_told_so_and_this_process_is_not(tmp_path: Path) -> None:
    before = dict(os.environ)
    variables = Environments(tmp_path).on_one_thread().variables("sb3")
    assert variables["OPENBLAS_NUM_THREADS"] == variables["OMP_NUM_THREADS"] == "1"
    assert os.environ == before
    assert Environments(tmp_path).variables("sb3").get("OMP_NUM_THREADS") == before.get(
        "OMP_NUM_THREADS"
    )
