from __future__ import annotations

from pathlib import Path

import pytest

from envbus.bus.folders import FOLDER_VARIABLE, name_folder


def test_a_folder_goes_into_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    folder = name_folder()
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_a_child_of_a_nursery_makes_its_folders_inside_that_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert name_folder().parent == tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    assert name_folder().parent == other
