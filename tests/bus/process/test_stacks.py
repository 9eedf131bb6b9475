from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from envbus.bus.process.stacks import (
    LEFT_TO_WRITERS,
    STACK_SIGNAL,
    StackFile,
    describe_stacks,
    offer_stacks,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def file() -> Iterator[StackFile]:
    file = StackFile()
    yield file
    file.close()
    file.close()


def test_a_file_can_be_written_and_cleared_again_and_again(file: StackFile) -> None:
    for text in ("one\n", "the second\n", "3\n"):
        file.clear()
        os.write(file.fd, text.encode())
        assert file.read() == text


@pytest.mark.skipif(not LEFT_TO_WRITERS, reason="no memfd or no /proc here")
def test_a_file_that_is_left_to_its_writer_is_read_until_that_has_ended(file: StackFile) -> None:
    fd = os.dup(file.fd)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd]) as writer:
        other = StackFile()
        other.leave_to(writer.pid)
        assert other.fd >= 0, "not what that process has open"
        other.close()
        file.leave_to(writer.pid)
        assert file.fd == -1
        for text in ("one\n", "the second\n"):
            file.clear()
            os.write(fd, text.encode())
            assert file.read() == text
        writer.communicate(b"\n")
    os.close(fd)
    file.clear()
    assert file.read() == ""
    (text,) = describe_stacks([(writer.pid, file)], timeout=0.01)
    assert text == f"no stack of process {writer.pid}: it did not react within 0.01 s"


def test_a_file_of_a_process_that_cannot_be_looked_into_is_kept(file: StackFile) -> None:
    file.leave_to(0)
    os.write(file.fd, b"kept")
    assert file.read() == "kept"


def test_a_process_writes_its_stacks_when_it_gets_the_signal(file: StackFile) -> None:
    before = signal.getsignal(STACK_SIGNAL)
    offer_stacks(file.fd)
    try:
        signal.raise_signal(STACK_SIGNAL)
        (text,) = describe_stacks([(os.getpid(), file)], timeout=10.0)
    finally:
        faulthandler.unregister(STACK_SIGNAL)
    assert signal.getsignal(STACK_SIGNAL) == before
    assert text.startswith("Current thread")
    assert "test_stacks.py" in text
    assert "in test_a_process_writes_its_stacks_when_it_gets_the_signal" in text


def test_why_there_is_no_stack_is_told(file: StackFile) -> None:
    (text,) = describe_stacks([(os.getpid(), file)], timeout=0.01)
    assert text == f"no stack of process {os.getpid()}: it did not react within 0.01 s"


def test_nobody_asked_is_answered_at_once() -> None:
    assert describe_stacks([], timeout=threading.TIMEOUT_MAX) == []


def test_the_signal_is_none_that_programs_use() -> None:
    if hasattr(signal, "SIGRTMIN"):
        assert signal.SIGRTMIN + 4 < STACK_SIGNAL < signal.SIGRTMAX - 4


PROGRAM = """
import faulthandler, sys
from envbus.bus.process.stacks import offer_stacks
if sys.argv[1] == "offers":
    offer_stacks(int(sys.argv[2]))
print("up", flush=True)
input()
"""


@pytest.mark.skipif(not LEFT_TO_WRITERS, reason="no memfd or no /proc here")
@pytest.mark.parametrize(("does", "found"), [("offers", True), ("only has it open", False)])
def test_the_file_is_found_of_a_process_that_writes_to_it_and_of_no_other(
    file: StackFile, does: str, found: bool
) -> None:
    command = [sys.executable, "-c", PROGRAM, does, str(file.fd)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[file.fd], **pipes) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        other = StackFile.of(writer.pid)
        assert (other is not None) == found
        if other is not None:
            other.clear()
            writer.send_signal(STACK_SIGNAL)
            (text,) = describe_stacks([(writer.pid, other)], timeout=10.0)
            assert text.startswith("Current thread")
            other.close()
        writer.communicate(b"\n")
    assert writer.returncode == 0
    assert StackFile.of(writer.pid) is None
