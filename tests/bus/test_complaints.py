from __future__ import annotations

import logging

import pytest

from envbus.bus.complaints import Complaints


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
