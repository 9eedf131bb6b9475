"""The command `top` where there is no screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

import envbus
from envbus.runner.cli.main import main
from envbus.runner.cli.top import fault_line, style_of
from envbus.runner.monitoring.figures import FaultFigures, fault_figures
from envbus.runner.monitoring.overview import overview_of
from tests.runner.monitoring_scenes import actor, hanging_envs, observed
from tests.waiting import wait_until

COMMAND = [sys.executable, "-W", "error", "-m", "envbus.runner.cli.main", "top"]


@pytest.fixture
def envs() -> Iterator[envbus.BusVectorEnv]:
    """Two actors; the second one hangs."""
    with hanging_envs() as envs:
        yield envs


def top(*arguments: str) -> str:
    """Return what the command prints."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_once_prints_a_table_with_who_hangs_and_where(envs: envbus.BusVectorEnv) -> None:
    lines = top("--once", str(os.getpid())).splitlines()
    assert lines[0].startswith("runs 1   processes 2 (1 hung)   env steps/s 0   faults 0")
    (row,) = [line for line in lines if " actor-1 " in line]
    assert "hung at tests/envs.py:" in row
    assert "in _go_wrong" in row
    assert str(envs.actor_pids()[1]) in row.split()


@pytest.mark.slow
def test_json_is_one_object(envs: envbus.BusVectorEnv) -> None:
    told = json.loads(top("--json", str(os.getpid())))
    (run,) = told["runs"]
    assert run["pid"] == run["owner"] == os.getpid()
    (part,) = run["parts"]
    assert part["counts"]["env_steps"] == 8
    assert [process["hung"] for process in part["processes"]] == [False, True]
    assert "in _go_wrong" in part["processes"][1]["at"]
    assert all(process["memory_bytes"] > 2**20 for process in part["processes"])


def test_a_run_that_is_not_there_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with envbus.make_vec("CartPole-v1", 1, num_actors=0):
        wait_until(lambda: main(["top", "1", "--once"]) == 2, "it is refused")
        told = capsys.readouterr().err
    assert "process 1 is no run of envbus" in told
    assert str(os.getpid()) in told


def test_without_a_terminal_it_says_what_else_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "--once prints a table" in capsys.readouterr().err


WITHOUT = """
import os, pty, sys
sys.modules["textual"] = None
from envbus.runner.cli.main import main
sys.exit(main(["top"]))
"""


@pytest.mark.slow
def test_without_textual_it_says_how_to_install_it() -> None:
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert "pip install -e '.[top]' in a clone" in done.stderr
    assert "--once prints a table without it" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_hangs_is_red_and_what_is_not_ready_yellow() -> None:
    run = observed(actor(0), actor(1), actor(2, state="down"), stalled={1: 3.0})
    styles = {row.name: style_of(row) for row in overview_of([run]).rows}
    assert styles == {
        "python train.py": "bold",
        "ActorPool-1": "yellow",
        "actor-1": "bold red",
        "actor-2": "yellow",
        "actor-0": "",
    }


def test_no_words_of_a_run_reach_the_terminal_as_its_own() -> None:
    hostile = "\x1b]0;title\x07\r\N{RIGHT-TO-LEFT OVERRIDE}"
    fault = FaultFigures(at=0.0, cause=hostile, process=hostile, env=0, message=hostile)
    assert fault_line(7, hostile, fault).plain.isprintable()
    run = observed(actor(0, name=hostile, state=hostile))
    run.figures = msgspec.structs.replace(run.figures, command=hostile)
    for row in overview_of([run], {1000: hostile}).rows:
        assert "".join(row.cells()).isprintable()


@pytest.mark.parametrize(("env", "whose"), [(-1, "actor-0"), (5, "actor-0 env 5")])
def test_a_fault_is_told_in_one_line(env: int, whose: str) -> None:
    fault = fault_figures(0.0, "crash", "actor-0", "it ended [b]here[/b]\nand more", env)
    line = fault_line(7, "ActorPool-1", fault).plain
    assert line.endswith(f"crash   7 ActorPool-1 {whose}: it ended [b]here[/b]")
