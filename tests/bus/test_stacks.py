from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from envbus.bus.stacks import (
    STACK_SIGNAL,
    StackFile,
    describe_stacks,
    is_complete,
    offer_stacks,
    tidy,
)

pytestmark = pytest.mark.timeout(60)

WATCHDOG = """\
Thread 0x00007f01 (most recent call first):
  File "/site/envbus/bus/child.py", line 228 in _watch
  File "/lib/threading.py", line 982 in run
"""
OTHER = """\
Thread 0x00007f02 (most recent call first):
  File "/user/physics.py", line 7 in solve
"""
MAIN = """\
Current thread 0x00007f03 (most recent call first):
  File "/user/env.py", line 12 in step
  File "/site/envbus/actors/slots.py", line 100 in step
"""


@pytest.fixture
def file() -> Iterator[StackFile]:
    file = StackFile()
    yield file
    file.close()
    file.close()


def test_the_main_thread_comes_first_and_the_watchdog_is_left_out() -> None:
    assert tidy(f"{WATCHDOG}\n{OTHER}\n{MAIN}") == (MAIN + OTHER).rstrip("\n")


def test_a_text_of_no_known_form_is_no_error() -> None:
    assert tidy("") == tidy("Segmentation fault\n") == ""
    assert len(tidy(MAIN + '  File "x", line 1 in f\n' * 10_000)) < 9000


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", False),
        (OTHER, False),
        (f"{OTHER}\nCurrent thread 0x00007f03 (most recent call first):\n", False),
        (f"{OTHER}\n{MAIN}"[:-1], False),
        (f"{OTHER}\n{MAIN}", True),
    ],
)
def test_the_main_thread_is_the_last_to_be_written(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


def test_a_file_can_be_written_and_cleared_again_and_again(file: StackFile) -> None:
    for text in ("one\n", "the second\n", "3\n"):
        file.clear()
        os.write(file.fd, text.encode())
        assert file.read() == text


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
