from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from envbus.bus.stacks import STACK_SIGNAL, StackFile, describe_stacks, offer_stacks

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
