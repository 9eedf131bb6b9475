from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from envbus.bus.process.server_process import ServerProcess, module_path


def test_the_module_path_holds_in_other_directories(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/some/where", Path("/not/a/string"), "__hook__"])
    assert module_path() == [str(tmp_path), "/some/where", "__hook__"]


def test_its_last_words_can_be_read_while_another_thread_buries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ServerProcess((), one_thread=False)
    burying = threading.Thread(target=server.bury)
    size_of = os.fstat

    def be_slow(fd: int) -> os.stat_result:
        monkeypatch.undo()
        burying.start()
        burying.join(1.0)  # it waits for the lock; without one it would be through
        return size_of(fd)

    try:
        server.hang_up()
        server.wait(60.0)
        monkeypatch.setattr("envbus.bus.process.server_process.os.fstat", be_slow)
        # By a signal if it was still importing: then another process ends it.
        assert f"(pid {server.pid}) ended with " in server.describe_end()
    finally:
        server.bury()
    burying.join(60.0)
    assert not burying.is_alive()
