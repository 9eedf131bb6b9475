"""The examples and commands that README.md and some other pages print work as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, page: str = README) -> list[str]:
    return [text for found, text in BLOCK.findall(page) if found == language]


def whole_examples(name: str) -> list[str]:
    """Return the examples of a page that need nothing but themselves."""
    page = (ROOT / "docs" / name).read_text("utf-8")
    return [text for text in blocks("python", page) if "pool = ActorPool(" in text]


def commands(program: str) -> list[list[str]]:
    """Return the arguments of each `$ program ...` that is printed."""
    lines = [line for text in blocks("console") for line in text.splitlines()]
    split = [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]
    return [words[1:] for words in split if words and words[0] == program]


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(text, id=f"example {n}") for n, text in enumerate(blocks("python"), 1)]
    + [
        pytest.param(text, id=f"{name} {n}")
        for name in ("recovery.md", "sampling.md")
        for n, text in enumerate(whole_examples(name), 1)
    ],
)
def test_an_example_runs_as_a_script_of_its_own(example: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example, "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", commands("envbus"), ids=" ".join)
def test_a_command_and_its_options_exist(arguments: list[str]) -> None:
    depth = 2 if arguments[0] in ("bench", "keys") else 1  # they have commands of their own
    command = [word for word in arguments[:depth] if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-m", "envbus.runner.cli", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    offered = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
    assert {word for word in arguments if word.startswith("--")} <= offered


@pytest.mark.parametrize("arguments", commands("make"), ids=" ".join)
def test_a_make_target_exists(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {word for word in arguments if "=" not in word} <= set(targets)


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_the_links_to_files_of_the_project_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []
