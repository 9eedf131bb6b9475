from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbus.bus.errors import TransportError
from envbus.bus.folders import FOLDER_VARIABLE, keep_endpoint, make_folder, name_folder


def test_a_folder_goes_into_the_temporary_one(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    folder = name_folder()
    assert folder.parent == short_tmp_path
    assert not folder.exists()


def test_without_a_temporary_folder_the_error_says_what_to_set() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # nothing is written
        "from envbus.bus.folders import name_folder; name_folder()"
    )
    environ = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    told = done.stderr.splitlines()[-1]
    assert told.startswith("envbus.bus.errors.StartError: set TMPDIR to a folder"), told


def test_a_child_of_a_process_group_makes_its_folders_inside_that_ones(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(short_tmp_path))
    assert name_folder().parent == short_tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(short_tmp_path / "gone"))
    assert name_folder().parent == short_tmp_path / "gone"
    monkeypatch.setenv(FOLDER_VARIABLE, str(short_tmp_path / "file" / "gone"))
    (short_tmp_path / "file").touch()
    other = short_tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    assert name_folder().parent == other


def test_a_folder_that_is_gone_is_made_again_unless_something_else_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for _ in range(2):
        assert make_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not make_folder(tmp_path / "gone" / "folder")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not make_folder(link)
    if os.geteuid() == 0:
        os.chown(folder, 1, -1)
        assert not make_folder(folder)  # somebody else's


def test_folders_of_process_groups_around_one_that_is_gone_are_made_again(tmp_path: Path) -> None:
    outer = tmp_path / "envbus-outer"
    inner = outer / "envbus-middle" / "envbus-inner"
    assert make_folder(inner)
    assert outer.stat().st_mode & 0o777 == 0o700
    inner.rmdir()
    inner.parent.rmdir()
    inner.parent.touch()  # something else is there
    assert not make_folder(inner)


def test_an_endpoint_is_bound_again_when_its_file_is_gone(tmp_path: Path) -> None:
    file, bound = tmp_path / "folder" / "bus", list[str]()
    for _ in range(2):
        keep_endpoint(f"ipc://{file}", bound.append)
        file.touch()
    assert bound == [f"ipc://{file}"]
    with pytest.raises(TransportError, match="cannot be made again"):
        keep_endpoint(f"ipc://{tmp_path}/gone/folder/bus", bound.append)
