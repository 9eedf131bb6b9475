from __future__ import annotations

import stat
from pathlib import Path

import pytest

from envbus.bus.folders import FOLDER_VARIABLE, make_folder


def test_a_folder_is_private_and_goes_into_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    folder = make_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_child_of_a_nursery_makes_its_folders_inside_that_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert make_folder().parent == tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    assert make_folder().parent == other
