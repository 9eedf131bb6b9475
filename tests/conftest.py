"""What holds for all tests."""

from __future__ import annotations

import signal

from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C, which
# tests send to programs that they start, would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
