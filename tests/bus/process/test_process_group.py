from __future__ import annotations

import pytest

from envbus.bus.process import process_group
from envbus.bus.process.process_group import ExitStatus


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (ExitStatus(code=9), "exit code 9"),
        (ExitStatus(code=0), "exit code 0"),
        (ExitStatus(signal=9), "signal SIGKILL"),
        (ExitStatus(signal=11), "signal SIGSEGV"),
        (ExitStatus(signal=63), "signal 63"),
        (ExitStatus(signal=9, note="its server died"), "signal SIGKILL (its server died)"),
    ],
)
def test_an_exit_status_has_words(status: ExitStatus, words: str) -> None:
    assert status.describe() == words


def test_close_adds_less_than_three_seconds_to_its_time_out() -> None:
    assert process_group._KILL_TIMEOUT + process_group._DIRECT_KILL_TIMEOUT < 3.0
