from __future__ import annotations

import os
from pathlib import Path

from envbus.bus.watched_files import FileWatch


def test_a_file_that_was_written_or_replaced_is_told_once(tmp_path: Path) -> None:
    file, other = tmp_path / "model", tmp_path / "other"
    file.write_text("1")
    other.write_text("1")
    watch = FileWatch([file, other])
    assert watch.changed() == []
    file.write_text("22")
    assert watch.changed() == [file]
    assert watch.changed() == []
    new = tmp_path / "new"
    new.write_text("22")
    os.utime(new, ns=(0, file.stat().st_mtime_ns))
    new.replace(file)
    assert watch.changed() == [file]


def test_a_file_that_is_missing_counts_when_another_one_is_there(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("1")
    watch = FileWatch([file])
    file.unlink()
    assert watch.changed() == []
    file.write_text("2")
    assert watch.changed() == [file]


def test_a_file_that_was_never_there_counts_when_it_comes(tmp_path: Path) -> None:
    watch = FileWatch([tmp_path / "model"])
    assert watch.changed() == []
    (tmp_path / "model").write_text("1")
    assert watch.changed() == [tmp_path / "model"]
