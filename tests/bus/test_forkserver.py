"""Children of this very process; none of its other children is reaped by mistake here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from envbus.bus.forkserver import KillExplainer, Reaped

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
#: Reaps only its own children, and tells of them.
REAPER = """
import os, time
from envbus.bus.forkserver import kill, reap_one

def child(act):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        act()
        os._exit(5)
    return pid

def wait():
    while (ended := reap_one([leader])) is None:
        time.sleep(0.01)
    return ended

assert reap_one([]) is None
def grow():
    data = bytearray(200 * 2**20)
    os._exit(7)
leader = child(grow)
ended = wait()
assert (ended.pid, ended.status) == (leader, 7), ended
assert ended.peak > 190 * 2**20, ended
leader = child(lambda: time.sleep(600))
kill(leader)
assert wait()[:2] == (leader, -9)
"""


def test_an_end_is_told_with_status_and_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAPER], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_kill_is_explained_by_the_counter() -> None:
    counts = iter([3, 3, 3, 4, 4])
    kills = KillExplainer(lambda: next(counts), lambda: 4 * GIB)
    kills.look()
    kills.look()  # not again within a second
    killed = Reaped(os.getpid(), -signal.SIGKILL, 2 * GIB)
    assert kills.explain(killed._replace(status=-signal.SIGSEGV)) == ""
    assert kills.explain(killed) == ""
    for _ in range(2):  # two may be killed at once
        assert kills.explain(killed) == (
            "out of memory, by the kernel's counter; its memory reached 2.0 GiB of 4.0 GiB"
        )
