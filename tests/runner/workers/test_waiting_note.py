"""When envs that wait are told of, and when not."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from subprocess import PIPE, Popen

import psutil
import pytest

from envbus.runner.workers.waiting_note import WaitingNote, busy_seconds, cpu_seconds


class Cpu:
    """CPU time of processes, as a test sets it."""

    def __init__(self) -> None:
        self.used = {1: 0.5, 2: 7.0}

    def __call__(self, pids: Sequence[int]) -> float:
        return sum(self.used[pid] for pid in pids)


def test_waiting_envs_are_told_of_once_with_the_argument_that_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu = Cpu()
    note = WaitingNote(16, cpu)
    assert not note.look(0.1, [1, 2])
    assert not note.look(1.0, [1, 2])
    cpu.used = {1: 0.7, 2: 7.2}
    assert not caplog.text
    assert note.look(4.1, [1, 2])
    assert "wait for 95 %" in caplog.text
    assert "16 of them wait in 2 actors" in caplog.text
    assert "num_actors=16" in caplog.text


def test_one_that_computes_is_enough_for_silence(caplog: pytest.LogCaptureFixture) -> None:
    cpu = Cpu()
    note = WaitingNote(16, cpu)
    note.look(0.0, [1, 2])
    cpu.used[2] += 0.5
    assert note.look(4.0, [1, 2])
    assert not caplog.text


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptor"), psutil.AccessDenied(1)])
def test_what_cannot_be_read_is_looked_at_later_and_ends_no_run(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = Cpu()
    readable = False

    def busy(pids: Sequence[int]) -> float:
        if not readable:
            raise error
        return cpu(pids)

    note = WaitingNote(16, busy)
    assert not note.look(0.0, [1, 2])
    assert note.due == 3.0
    readable = True
    assert not note.look(4.0, [1, 2])
    readable = False
    assert not note.look(8.0, [1, 2])
    readable = True
    assert not note.look(12.0, [1, 2])
    assert note.look(16.0, [1, 2])
    assert "16 of them wait in 2 actors" in caplog.text


def test_what_happened_while_an_actor_came_back_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu = Cpu()
    note = WaitingNote(16, cpu)
    note.look(0.0, [1, 2])
    cpu.used[3] = 0.0
    assert not note.look(4.0, [1, 3])
    assert not note.look(4.0, [1, 3])
    assert not note.look(6.0, [1, 3])
    assert not caplog.text


def test_cpu_time_is_that_of_a_process_and_0_for_one_that_is_gone() -> None:
    before = time.process_time()
    assert cpu_seconds([os.getpid()]) >= before - 0.05
    assert cpu_seconds([2**22 + 1]) == 0.0


_COMPUTE = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while time.process_time() < 0.2:
    pass
print("done", flush=True)
input()
"""


def test_a_process_that_others_keep_from_a_core_is_busy() -> None:
    command = [sys.executable, "-S", "-c", _COMPUTE]
    children = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "done\n"
        pids = [child.pid for child in children]
        assert busy_seconds(pids) > cpu_seconds(pids)
        assert busy_seconds([2**22 + 1]) == 0.0
    finally:
        for child in children:
            child.communicate("\n")
