from __future__ import annotations

import os
from pathlib import Path

import pytest

from envbus.bus.folders import FOLDER_VARIABLE, make_folder, name_folder


def test_a_folder_goes_into_the_temporary_one(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    folder = name_folder()
    assert folder.parent == short_tmp_path
    assert not folder.exists()


def test_a_child_of_a_process_group_makes_its_folders_inside_that_ones(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(short_tmp_path))
    assert name_folder().parent == short_tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(short_tmp_path / "gone"))
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
