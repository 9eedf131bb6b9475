from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from envbus.bus import memory

SCRIPT = """
import subprocess, sys
block = bytearray(64 * 2**20)
inner = subprocess.Popen([sys.executable, "-c", "b = bytearray(32 * 2**20); input()"])
print(inner.pid, flush=True)
input()
inner.kill()
"""
MB = 2**20


@pytest.mark.parametrize("reader", ["direct", "psutil"])
def test_a_tree_is_a_process_and_all_below_it(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    if reader == "psutil":
        monkeypatch.setattr(memory, "_HAS_CHILDREN", False)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe) as child:
        try:
            assert child.stdout is not None
            inner = int(child.stdout.readline())
            wait = psutil.Process(inner)
            while wait.memory_info().rss < 32 * MB:
                assert wait.is_running()
            sizes = memory.tree_memory([child.pid, inner])
            assert 32 * MB < sizes[inner] < 64 * MB
            assert 64 * MB + sizes[inner] < sizes[child.pid] < 128 * MB + sizes[inner]
        finally:
            child.kill()
            psutil.Process(inner).kill()


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait(60)
        assert memory.tree_memory([child.pid]) == {child.pid: 0}
