from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.skips import read_allowed
from tests.sources import ROOT

FILES = {
    "listed": """
        @pytest.mark.skip(reason="could not import 'torch': No module named 'torch'")
        def test_it(): ...
    """,
    "known": """
        @pytest.mark.xfail(reason="known")
        def test_it(): assert False
    """,
    "skipped": """
        def test_it(): pytest.skip("no StringDType")
    """,
    "missing": """
        pytest.importorskip("nowhere_at_all")
        def test_it(): ...
    """,
}


def run(folder: Path, ci: str, *more: str) -> str:
    """Return what pytest says of each of the files, and its exit code."""
    for name, source in FILES.items():
        text = f"import pytest\n{textwrap.dedent(source)}"
        (folder / f"test_{name}.py").write_text(text)
    options = ["-q", "-rA", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.skips", *options, *more],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CI": ci,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"{done.stdout}{done.stderr}exit code {done.returncode}"


def test_a_skip_that_is_not_listed_fails_in_ci(tmp_path: Path) -> None:
    said = run(tmp_path, "true")
    assert "not listed in skips_in_ci.txt: no StringDType" in said
    assert "not listed in skips_in_ci.txt: could not import 'nowhere_at_all'" in said
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in said
    assert said.endswith("exit code 1")


@pytest.mark.slow
def test_it_fails_in_a_worker_too(tmp_path: Path) -> None:
    said = run(tmp_path, "true", "-p", "xdist", "-n", "1")
    assert "not listed in skips_in_ci.txt: no StringDType" in said
    assert "not listed in skips_in_ci.txt: could not import 'nowhere_at_all'" in said
    assert said.endswith("exit code 1")


def test_elsewhere_a_skip_is_no_failure(tmp_path: Path) -> None:
    said = run(tmp_path, "")
    assert "3 skipped, 1 xfailed" in said
    assert said.endswith("exit code 0")


@pytest.mark.parametrize("line", ["torch", "torch | ", " | anything"])
def test_each_line_says_what_and_why(line: str) -> None:
    with pytest.raises(AssertionError):
        read_allowed(f"# a list\n{line}\n")


@pytest.mark.slow
def test_what_needs_pytorch_is_left_to_the_command_that_installs_it() -> None:
    needs = re.compile(r'importorskip\("(torch|onnxscript|matplotlib)')
    found, wrong = 0, []
    for file in (ROOT / "tests").rglob("test_*.py"):
        source = file.read_text("utf-8")
        marked = (
            "\npytestmark = pytest.mark.slow" in source
            or "\npytestmark = [pytest.mark.slow" in source
        )
        lines = source.splitlines()
        for part in ast.parse(source).body:
            if needs.search("\n".join(lines[part.lineno - 1 : part.end_lineno])):
                found += 1
                decorators = getattr(part, "decorator_list", [])
                if not marked and "pytest.mark.slow" not in map(ast.unparse, decorators):
                    wrong.append(f"{file.name}:{part.lineno}")
    assert found > 5
    assert wrong == []
