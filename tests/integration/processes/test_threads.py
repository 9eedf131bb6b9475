"""Threads of libraries in each kind of process; what is asked is in `thread_reports.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envbus.bus.process.threads import GRANT_VARIABLE, THREAD_VARIABLES
from envbus.bus.transport.cores import usable_cores

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[3]
PROGRAM = "from tests.integration.thread_reports import main; main()"


def reports(variables: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    unset = {*THREAD_VARIABLES, GRANT_VARIABLE}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_processes_have_the_threads_that_they_are_given() -> None:
    cores = usable_cores()
    found = reports({}, "the rest")
    half, quarter = str(max(cores // 2, 1)), str(max(min(cores, 4) // 2, 1))
    loaded = str(min(cores, 3))  # a fresh OpenBLAS takes no more than there are cores
    assert found["two actors"] == [[half] * 3] * 2
    assert found["forked, three threads"] == [["3"] * 3]
    assert found["spawned, three threads"] == [[loaded, "3", "3"]]
    assert found["policy worker, five threads"] == ["5"] * 3
    group = found["group, four threads"]
    assert group == {"runner": ["4"] * 3, "actors": [[quarter] * 3] * 2}
    # Nothing is done to these, and each thread that the library would have is there.
    untouched = found["this process"]
    assert untouched[1:] == ["", ""]
    assert found["left alone"] == found["no process"] == [untouched]


@pytest.mark.slow
def test_a_variable_that_the_user_has_set_holds_in_all_processes() -> None:
    found = reports({"OPENBLAS_NUM_THREADS": "1"})
    alone = ["1", "", ""]
    assert found == {
        "two actors": [alone, alone],
        "spawned, three threads": [alone],
        "policy worker, five threads": ["1", "-1", "-1"],
        "group, four threads": {"runner": alone, "actors": [alone, alone]},
    }
