"""A pytest plugin: where `CI=true` is set, a skipped test fails, unless its reason is listed.

Leaves out what is listed and why: `skips_in_ci.txt`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport", "read_allowed"]

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

LIST = Path(__file__).parent / "skips_in_ci.txt"


def read_allowed(text: str) -> list[str]:
    """Return the beginnings of reasons that a list allows; each must say why."""
    allowed = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            reason, separator, why = line.partition(" | ")
            assert separator, f"no ' | ' in {line!r}"
            assert reason.strip(), f"{line!r} would allow every skip"
            assert why.strip(), f"{line!r} does not say why"
            allowed.append(reason.strip())
    return allowed


def _judge(report: _Report) -> _Report:
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return report
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(tuple(read_allowed(LIST.read_text("utf-8")))):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped where CI=true is set, and not listed in {LIST.name}: {reason}\n"
            "Install what is missing, or list the reason, and why it is no loss."
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judge((yield))
