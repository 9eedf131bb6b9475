"""Children of this very process; none of its other children is reaped by mistake here."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
#: Reaps only its own children, and tells of them.
REAPER = """
import os, time
from envbus.bus.process.forkserver import kill, reap_one

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


#: In a process of its own: the watchdog is for processes with one thread.
STOPPED_WATCHDOG = """
import os, signal
from pathlib import Path
from envbus.bus.process.forkserver import _watchdog

own = os.getpid()
with _watchdog({}, lambda: None):
    (pid,) = map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
print("went on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the watchdog in /proc")
def test_a_watchdog_that_was_stopped_does_not_hold_up_its_process() -> None:
    process = subprocess.run(
        [sys.executable, "-c", STOPPED_WATCHDOG],
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    )
    assert process.stdout == "went on\n"
