from __future__ import annotations

import logging

import pytest

from envbus.bus.complaints import Complaints, Lines


def test_each_is_counted_and_the_log_has_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complaints = Complaints(logging.getLogger("envbus.test"), every=5.0, clock=lambda: now)
    for _ in range(1000):
        complaints.add("a", "wrong\nline")
    complaints.add("b", "another kind")
    assert caplog.messages == ["wrong\\nline", "another kind"]
    now += 5.0
    complaints.add("a", "again")
    complaints.add("a", "again")
    assert caplog.messages[2:] == ["again (and 999 more like it)"]
    assert complaints.counts == {"a": 1002, "b": 1}


def test_what_is_told_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("envbus.test"))
    complaints.add("a", "x" * 10**6, ValueError("told with its traceback"))
    assert len(caplog.messages[0]) < 3000
    assert "told with its traceback" in caplog.text


def test_a_minute_has_so_many_lines_whatever_they_are_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    lines = Lines(logging.getLogger("envbus.test"), clock=lambda: now)
    for number in range(1000):
        lines.add(logging.WARNING, f"{number}\n" + "x" * 10**4)
    assert len(caplog.messages) == 100
    assert max(map(len, caplog.messages)) < 2100
    assert caplog.messages[-1].endswith("(more is left out for 60 s)")
    now += 60.0
    lines.add(logging.WARNING, "again")
    assert caplog.messages[100:] == ["again"]
