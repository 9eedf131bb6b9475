from __future__ import annotations

from pathlib import Path

import pytest

from envbus.bus.watched_files import FileWatch
from envbus.runner.serving.upkeep import LOOK_EVERY, Upkeep


def test_what_was_changed_is_done_at_the_next_look_and_all_on_demand(tmp_path: Path) -> None:
    file, done = tmp_path / "file", list[str]()
    file.write_text("1")
    upkeep = Upkeep()
    upkeep.add("watched", lambda: done.append("watched"), FileWatch([file]))
    upkeep.add("asked for", lambda: done.append("asked for"))
    upkeep.look(10.0)
    assert done == []
    file.write_text("22")
    upkeep.look(10.0 + LOOK_EVERY / 2)
    assert done == []
    upkeep.look(10.0 + LOOK_EVERY)
    assert done == ["watched"]
    upkeep.look(10.0 + LOOK_EVERY, demanded=True)
    assert done == ["watched", "watched", "asked for"]
    upkeep.look(20.0)
    assert len(done) == 3


def test_what_fails_is_logged_and_keeps_nothing_else_from_being_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, upkeep = [], Upkeep()
    upkeep.add("model.onnx", lambda: 1 // 0)
    upkeep.add("tokens", lambda: done.append(1))
    upkeep.look(0.0, demanded=True)
    assert done == [1]
    assert "model.onnx: not loaded anew" in caplog.text
