from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from envbus.bus.memory import usage as memory
from envbus.bus.memory.usage import memory_left, memory_limit, oom_kills

SCRIPT = """
import subprocess, sys
block = bytearray(64 * 2**20)
inner = subprocess.Popen([sys.executable, "-c", "b = bytearray(32 * 2**20); input()"])
print(inner.pid, flush=True)
input()
inner.kill()
"""
MB = 2**20


@pytest.mark.parametrize("reader", ["direct", "psutil"])
def test_a_tree_is_a_process_and_all_below_it(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    if reader == "psutil":
        monkeypatch.setattr(memory, "_HAS_CHILDREN", False)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe) as child:
        try:
            assert child.stdout is not None
            inner = int(child.stdout.readline())
            wait = psutil.Process(inner)
            while wait.memory_info().rss < 32 * MB:
                assert wait.is_running()
            sizes = memory.tree_memory([child.pid, inner])
            assert 32 * MB < sizes[inner] < 64 * MB
            assert 64 * MB + sizes[inner] < sizes[child.pid] < 128 * MB + sizes[inner]
        finally:
            child.kill()
            psutil.Process(inner).kill()


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait(60)
        assert memory.tree_memory([child.pid]) == {child.pid: 0}


# --- what the kernel gives -------------------------------------------------------------------


EVENTS = "low 0\nhigh 0\nmax 17\noom 3\noom_kill {}\noom_group_kill 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_own_cgroup_is_asked_and_the_smallest_limit_above_it_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/job\n")
    write(root / "sys/fs/cgroup/slice/job/memory.events", EVENTS.format(2))
    write(root / "sys/fs/cgroup/slice/job/memory.max", "max\n")
    write(root / "sys/fs/cgroup/slice/memory.events", EVENTS.format(9))
    write(root / "sys/fs/cgroup/slice/memory.max", "4096\n")
    assert oom_kills(str(root)) == 2
    assert memory_limit(str(root)) == 4096


def test_what_is_in_use_is_not_left_but_for_what_the_kernel_gives_back(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/job\n")
    for folder, limit, used, cached in (("slice/job", 9000, 1000, 0), ("slice", 8192, 5000, 1000)):
        path = root / "sys/fs/cgroup" / folder
        write(path / "memory.events", EVENTS.format(0))
        write(path / "memory.max", f"{limit}\n")
        write(path / "memory.current", f"{used}\n")
        write(path / "memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 7\n")
    assert memory_left(str(root)) == 8192 - 5000 + 1000 + 7
    write(root / "sys/fs/cgroup/slice/memory.current", "99999\n")
    assert memory_left(str(root)) == 0


def test_in_a_container_the_path_of_the_host_is_not_there(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/../../docker/abc\n")
    write(root / "sys/fs/cgroup/memory.events", EVENTS.format(1))
    write(root / "sys/fs/cgroup/memory.max", "8192\n")
    assert oom_kills(str(root)) == 1
    assert memory_limit(str(root)) == 8192


def test_version_one_has_other_names(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/job"
    write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    assert oom_kills(str(root)) == 3
    assert memory_limit(str(root)) is None


def test_without_a_cgroup_the_machine_is_asked(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "proc/vmstat", "nr_free_pages 5\noom_kill 4\n")
    assert oom_kills(str(root)) == 4
    assert memory_limit(str(root)) is None


def test_elsewhere_nothing_is_known(tmp_path: Path) -> None:
    assert oom_kills(str(tmp_path)) is None
    assert memory_limit(str(tmp_path)) is None
    assert memory_left(str(tmp_path)) is None


def test_here_it_can_be_asked() -> None:
    kills, limit = oom_kills(), memory_limit()
    assert kills is None or kills >= 0
    assert limit is None or limit > 0
