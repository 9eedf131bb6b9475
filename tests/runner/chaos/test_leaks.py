from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from envbus.runner.chaos.envs import SLEEPER
from envbus.runner.chaos.leaks import growth_of, marked_processes, sample
from tests.runner.chaos.test_result import MB, a_sample

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the folder is what is looked at


def test_growth_is_the_slope_after_the_warm_up() -> None:
    warm = [a_sample(s, driver_memory=(50 + s) * MB) for s in range(30)]
    flat = [a_sample(s, driver_memory=80 * MB + s * 1000) for s in range(30, 121)]
    growth = growth_of([*warm, *flat], "driver_memory")
    assert growth.per_minute == pytest.approx(60_000)
    assert (growth.first, growth.last) == (80 * MB + 30_000, 80 * MB + 120_000)


def test_a_sample_tells_actors_from_what_their_envs_started() -> None:
    mark = str(os.getpid())  # not of another run of the tests beside this one
    script = (
        "import subprocess, sys\n"
        f"subprocess.Popen({list(SLEEPER)!r})\n"
        "subprocess.Popen([sys.executable, '-c', 'input()'])\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CHAOS_TEST_MARK": mark},
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = sample(child.pid, 1.0)
        assert found is not None
        assert found.processes == 1
        marked = marked_processes("CHAOS_TEST_MARK", mark)
        assert len(marked) == 3
        for process in marked:
            process.kill()
        psutil.wait_procs(marked, timeout=20)  # two are orphans, which the system reaps
    assert marked_processes("CHAOS_TEST_MARK", mark) == []


def test_of_a_process_that_is_gone_there_is_no_sample() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert sample(child.pid, 0.0) is None


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no folder of shared memory")
def test_a_sample_names_the_shared_memory_that_is_mapped() -> None:
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            found = sample(os.getpid(), 0.0)
    assert found is not None
    assert Path(file.name).name in found.shared_files
