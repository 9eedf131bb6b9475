from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envbus.bus.process.server_process import module_path


def test_the_module_path_holds_in_other_directories(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/some/where", Path("/not/a/string"), "__hook__"])
    assert module_path() == [str(tmp_path), "/some/where", "__hook__"]
