from __future__ import annotations

import inspect
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from envbus.bus import interrupts
from envbus.bus.errors import ClosedError, ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch

pq = pytest.importorskip("pyarrow.parquet")

from envbus.runner.recordings import EpisodeWriter, read_episodes  # noqa: E402  # needs pyarrow


def episode(eps_id: int, length: int, width: int = 4, agent: str = "agent0") -> SampleBatch:
    steps = np.arange(length)
    return SampleBatch(
        {
            "obs": (100 * eps_id + steps[:, None] + np.zeros(width)).astype(np.float32),
            "actions": steps % 2,
            "rewards": np.ones(length, np.float32),
            "terminateds": steps == length - 1,
            "truncateds": np.zeros(length, np.bool_),
            "eps_id": np.full(length, eps_id, np.int64),
            "t": steps.astype(np.int64),
            "agent_id": np.full(length, agent),
        }
    )


def lengths(folder: Path) -> dict[int, int]:
    batches = [one.single() for one in read_episodes(folder)]
    return {int(batch["eps_id"][0]): len(batch) for batch in batches}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write(SampleBatch.concatenate([episode(1, 3), episode(2, 5)]))
        writer.write(episode(3, 1))
        assert (writer.num_episodes, writer.num_rows) == (3, 9)
    assert lengths(tmp_path) == {1: 3, 2: 5, 3: 1}
    (shard,) = tmp_path.glob("*/*")
    assert shard.suffix == ".parquet"
    first = next(read_episodes(tmp_path)).single()
    np.testing.assert_array_equal(first["obs"], episode(1, 3)["obs"])


def test_rows_that_could_not_be_read_back_as_episodes_are_refused(tmp_path: Path) -> None:
    nameless = SampleBatch(
        {name: column for name, column in episode(2, 3).columns.items() if name != "eps_id"}
    )
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode(1, 3))
        with pytest.raises(
            ConfigError, match=r"'default_policy' cannot be recorded without.*'eps_id'"
        ):
            writer.write(nameless)
        with pytest.raises(ConfigError, match="must be SampleBatch or MultiAgentBatch"):
            writer.write(episode(3, 1).columns)  # type: ignore[arg-type]
    assert lengths(tmp_path) == {1: 3}


def test_shards_are_completed_by_rows_and_by_age(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "rows", shard_rows=4) as writer:
        for eps_id in range(5):
            writer.write(episode(eps_id, 2))
        assert len(list((tmp_path / "rows").glob("*/*.parquet"))) == 2
        assert lengths(tmp_path / "rows") == dict.fromkeys(range(5), 2)  # the journal, too
    with EpisodeWriter(tmp_path / "age", shard_seconds=1e-9) as writer:
        writer.write(episode(0, 2))
        assert len(list((tmp_path / "age").glob("*/*.parquet"))) == 1


def test_observations_of_another_form_begin_another_shard(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode(0, 2, width=4))
        writer.write(episode(1, 2, width=6))
    assert lengths(tmp_path) == {0: 2, 1: 2}


def test_episodes_with_several_policies_come_back_whole(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        for eps_id in (7, 8):
            rows = {"left/../x": episode(eps_id, 3, agent="a"), "b": episode(eps_id, 2, agent="b")}
            writer.write(MultiAgentBatch(rows, 3))
    found = list(read_episodes(tmp_path))
    assert [sorted(one.policy_batches) for one in found] == [["b", "left/../x"]] * 2
    assert [one.env_steps for one in found] == [3, 3]
    assert all(path.parent.parent == tmp_path for path in tmp_path.rglob("*.parquet"))


def test_episodes_of_several_policies_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, shard_rows=9) as writer:
        for eps_id in range(20):
            rows = {"a": episode(eps_id, 3, agent="a"), "b": episode(eps_id, 2, agent="b")}
            writer.write(MultiAgentBatch(rows, 3))
            writer.write(episode(100 + eps_id, 2))
            writer.write(MultiAgentBatch({"b": episode(200 + eps_id, 2, agent="b")}, 2))
    found = [one.policy_batches for one in read_episodes(tmp_path)]
    names = {int(rows["eps_id"][0]): "".join(parts) for parts in found for rows in parts.values()}
    assert names == {
        **dict.fromkeys(range(20), "ab"),
        **dict.fromkeys(range(100, 120), "default_policy"),
        **dict.fromkeys(range(200, 220), "b"),
    }
    assert len(found) == len(names)
    max((tmp_path / "a").glob("*")).write_bytes(b"damaged")
    reader = read_episodes(tmp_path)
    for eps_id in range(18):  # those of the shards before, whatever is behind them
        assert all(set(rows["eps_id"]) == {eps_id} for rows in next(reader).policy_batches.values())
    with pytest.raises(ConfigError, match="is damaged"):
        list(reader)


@pytest.mark.slow
def test_however_many_sets_of_policies_play_together_few_files_stay_open(tmp_path: Path) -> None:
    def num_open() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum(link.startswith(str(tmp_path.resolve())) for link in links)

    with EpisodeWriter(tmp_path) as writer:
        for eps_id in range(100):
            pair = {"all": episode(eps_id, 2), f"p{eps_id}": episode(eps_id, 2, agent="other")}
            writer.write(MultiAgentBatch(pair, 2))
        assert 0 < num_open() <= 64
    assert len(list(read_episodes(tmp_path))) == 100


def test_an_episode_of_which_a_policy_is_not_written_yet_is_not_read(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, shard_rows=9) as writer:
        rows = [episode(eps_id, 2, agent="a") for eps_id in range(5)]
        # Of one policy, of both, of one, ...: in one call.
        both = [episode(eps_id, 3, agent="b") for eps_id in (1, 3)]
        parts = {"a": SampleBatch.concatenate(rows), "b": SampleBatch.concatenate(both)}
        writer.write(MultiAgentBatch(parts, 15))
        for eps_id in (5, 6):
            pair = {"a": episode(eps_id, 2, agent="a"), "b": episode(eps_id, 3, agent="b")}
            writer.write(MultiAgentBatch(pair, 3))

        def found() -> dict[int, list[str]]:
            return {
                int(one["a"]["eps_id"][0]): sorted(one.policy_batches)
                for one in read_episodes(tmp_path)
            }

        whole = {n: ["a", "b"] if n in (1, 3, 5, 6) else ["a"] for n in range(7)}
        assert found() == whole
        # As a reader finds it that comes in between, or that a kill leaves behind.
        late = max((tmp_path / "b").glob("*.arrows"))
        content = late.read_bytes()
        late.write_bytes(content[:-10])
        assert found() == {n: names for n, names in whole.items() if n != 6}
        late.rename(tmp_path / "aside")
        assert found().keys() == whole.keys() - {6}
        (tmp_path / "aside").rename(late)
        late.write_bytes(content)
    assert found() == whole
    shutil.rmtree(tmp_path / "b")  # on purpose: the rows of one policy are read alone
    assert found() == {number: ["a"] for number in range(7)}


def test_equal_ids_of_two_writers_are_two_episodes(tmp_path: Path) -> None:
    for _ in range(2):
        with EpisodeWriter(tmp_path) as writer:
            rows = {"a": episode(1, 3, agent="a"), "b": episode(1, 3, agent="b")}
            writer.write(MultiAgentBatch(rows, 3))
    assert [one.agent_steps for one in read_episodes(tmp_path)] == [6, 6]


def test_ids_that_come_again_are_other_episodes(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "one") as writer:  # of several runners that all begin with 0
        for length in (3, 5, 4):
            writer.write(SampleBatch.concatenate([episode(0, length), episode(1, 1)]))
        assert (writer.num_episodes, writer.num_rows) == (6, 15)
        found = [len(one.single()) for one in read_episodes(tmp_path / "one")]
        assert sorted(found) == [1, 1, 1, 3, 4, 5]
    with EpisodeWriter(tmp_path / "two") as writer:
        for length in (3, 5):
            rows = {"a": episode(0, length, agent="a"), "b": episode(0, 2, agent="b")}
            writer.write(MultiAgentBatch(rows, length))
    found = sorted(one.agent_steps for one in read_episodes(tmp_path / "two"))
    assert found == [5, 7]


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_writer import episode
from envbus.runner.recordings import EpisodeWriter
writer = EpisodeWriter(sys.argv[1], shard_rows=300)
for eps_id in range(10**6):
    writer.write(episode(eps_id, 10))
    print(eps_id, flush=True)
"""


def test_a_kill_loses_no_written_episode(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(100)]
        child.send_signal(signal.SIGKILL)
        told += [int(line) for line in child.stdout.read().splitlines() if line]
    assert set(told) <= lengths(folder).keys()
    assert set(lengths(folder).values()) == {10}
    with EpisodeWriter(folder):  # completes what was left
        pass
    assert not list(folder.glob("*/*.arrows"))
    assert set(told) <= lengths(folder).keys()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_shards_are_completed_leaves_no_file_half_written(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table = pq.write_table

    def interrupted(*args: Any, **kwargs: Any) -> None:
        write_table(*args, **kwargs)
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    writer = EpisodeWriter(tmp_path)
    writer.write(episode(0, 3))
    monkeypatch.setattr(pq, "write_table", interrupted)
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)  # the second one is not kept
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    (left,) = (tmp_path / "default_policy").iterdir()
    assert left.suffix == {1: ".parquet", 2: ".arrows"}[times]
    assert lengths(tmp_path) == {0: 3}


SCARCE = """
import contextlib, itertools, os, resource, signal, sys
from pathlib import Path
folder, tests, how, end = sys.argv[1:]
sys.path.insert(0, tests)
from test_writer import episode
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.recordings import EpisodeWriter

@contextlib.contextmanager
def room_for(size):
    # A disk on which so many bytes more can be written, to each file or in all.
    if how == "limit":
        largest = max([path.stat().st_size for path in Path(folder).glob("*/*.arrows")], default=0)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        # Where an open file may grow by a part of the rows only, another one takes them.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + largest * (size >= 5000), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        filler = Path(folder) / "filler"
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            os.ftruncate(file.fileno(), max(file.tell() - size, 0))
        try:
            yield
        finally:
            filler.unlink()

writer = EpisodeWriter(folder, shard_rows=70)
sizes = itertools.cycle([0, 1, 9, 500, 4096, 5000, 9000, 20000, 40000])
for eps_id in range(60):
    rows = {"a": episode(eps_id, 10, width=200, agent="a"), "b": episode(eps_id, 9, agent="b")}
    try:
        if eps_id % 3:
            with room_for(next(sizes)):
                writer.write(MultiAgentBatch(rows, 10))
        else:
            writer.write(MultiAgentBatch(rows, 10))
    except OSError as exc:
        print("refused", eps_id, exc.errno, flush=True)
    else:
        print("confirmed", eps_id, flush=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "scarce":
    with room_for(0):
        writer.close()
else:
    writer.close()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """Return a folder that is a disk of its own; None: this user cannot make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "end"),
    [("limit", "close"), ("limit", "kill"), ("disk", "scarce"), ("disk", "kill")],
)
def test_what_was_confirmed_is_read_back_and_nothing_else_though_the_disk_was_full_for_a_moment(
    tmp_path: Path, small_disk: Path | None, how: str, end: str
) -> None:
    folder = tmp_path / "episodes"
    if how == "disk" and small_disk is not None:
        folder = small_disk / "episodes"
    how = "limit" if folder.parent == tmp_path else how
    folder.mkdir()
    child = subprocess.run(
        [sys.executable, "-c", SCARCE, str(folder), str(Path(__file__).parent), how, end],
        capture_output=True,
        text=True,
    )
    assert child.returncode == (-signal.SIGKILL if end == "kill" else 0), child.stderr
    told = [line.split() for line in child.stdout.splitlines()]
    confirmed = {int(line[1]) for line in told if line[0] == "confirmed"}
    assert len(told) == 60
    assert 20 < len(confirmed) < 55

    def check() -> None:
        found = {
            int(one["a"]["eps_id"][0]): (len(one["a"]), len(one["b"]))
            for one in read_episodes(folder)
        }
        assert found == dict.fromkeys(confirmed, (10, 9))

    check()
    with EpisodeWriter(folder):  # completes what was left
        pass
    assert not list(folder.glob("*/*.arrows*"))
    assert not list(folder.glob("*/.*"))
    check()


FAILING = """
import ctypes, os, resource, signal, struct, sys
folder, tests, number = sys.argv[1:]
sys.path.insert(0, tests)
from test_writer import episode
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.recordings import EpisodeWriter

def fail_system_calls(number):
    # From now on this one fails with EIO: a filter of <linux/seccomp.h>.
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50005), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
"""
BROKEN = (
    FAILING
    + """
def write(eps_id):
    rows = {"a": episode(eps_id, 10, agent="a"), "b": episode(eps_id, 10, width=999, agent="b")}
    try:
        writer.write(MultiAgentBatch(rows, 10))
    except OSError as exc:
        print("refused", exc, flush=True)
    else:
        print("confirmed", flush=True)

writer = EpisodeWriter(folder)
write(1)
fail_system_calls(int(number))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
write(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
write(2)
os.kill(os.getpid(), signal.SIGKILL)
"""
)
UNSYNCED = (
    FAILING
    + """
writer = EpisodeWriter(folder, durable=True)
writer.write(episode(1, 10))
fail_system_calls(int(number))
try:
    writer.write(episode(2, 10))
except OSError as exc:
    print("refused", exc, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
)
#: The numbers of ftruncate(2) and fsync(2).
FTRUNCATE = {"x86_64": 77, "aarch64": 46}
FSYNC = {"x86_64": 74, "aarch64": 82}
CALLS_ARE_KNOWN = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in FTRUNCATE, reason="no such system call"
)


@pytest.mark.slow
@CALLS_ARE_KNOWN
def test_what_the_disk_did_not_take_for_good_was_refused_and_is_not_read(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(Path(__file__).parent), str(FSYNC[platform.machine()])]
    child = subprocess.run(
        [sys.executable, "-c", UNSYNCED, *arguments], capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout.startswith("refused")
    assert lengths(tmp_path) == {1: 10}


@pytest.mark.slow
@CALLS_ARE_KNOWN
def test_what_was_refused_and_cannot_be_cut_off_is_not_written_once_more(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(Path(__file__).parent), str(FTRUNCATE[platform.machine()])]
    child = subprocess.run(
        [sys.executable, "-c", BROKEN, *arguments], capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    first, second, third = child.stdout.splitlines()
    assert (first, second[:7]) == ("confirmed", "refused")
    assert "until the rows that were refused can be cut off" in third
    (found,) = read_episodes(tmp_path)
    assert {name: found[name]["eps_id"].tolist() for name in "ab"} == {"a": [1] * 10, "b": [1] * 10}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_a_journal_that_cannot_be_closed_refuses_nothing_that_was_written(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path, shard_rows=6)
    writer.write(episode(1, 3))
    (journal,) = tmp_path.glob("*/*.arrows")
    assert lengths(tmp_path) == {1: 3}
    closed_by_disk(journal)
    writer.close()
    assert lengths(tmp_path) == {1: 3}
    (shard,) = tmp_path.glob("*/*")
    assert shard.suffix == ".parquet"


def closed_by_disk(path: Path) -> None:
    """Have the next close of a file fail, as it does where a network's disk tells late of a write.

    Nothing is written to it before.
    """
    for handle in Path("/proc/self/fd").iterdir():
        if handle.is_symlink() and handle.readlink() == path:
            os.close(int(handle.name))
            return
    raise AssertionError(f"{path} is not open")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc")
def test_a_journal_that_the_disk_fails_to_read_is_left_as_it_is(tmp_path: Path) -> None:
    journal = tmp_path / "default_policy" / "1-x.arrows"
    journal.parent.mkdir()
    journal.symlink_to("/proc/self/mem")  # nothing is mapped at 0: EIO
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode(1, 3))
    assert [path for path in journal.parent.iterdir() if path.suffix != ".parquet"] == [journal]
    with pytest.raises(ConfigError, match=r"1-x\.arrows cannot be read"):
        list(read_episodes(tmp_path))


def test_a_journal_stays_whose_shard_cannot_be_read_back(tmp_path: Path) -> None:
    source = inspect.getfile(EpisodeWriter)

    def damage(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename != source:
            return None
        for shard in tmp_path.glob("*/.*.parquet"):
            os.truncate(shard, shard.stat().st_size // 2)  # as a disk that lost a part of it
        return damage

    writer = EpisodeWriter(tmp_path)
    writer.write(episode(1, 3))
    before = sys.gettrace()
    sys.settrace(damage)
    try:
        writer.close()
    finally:
        sys.settrace(before)
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".arrows"]
    assert lengths(tmp_path) == {1: 3}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_shards_that_cannot_be_completed_cost_no_descriptors(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, shard_rows=4) as writer:
        writer.write(episode(0, 2))
        (journal,) = tmp_path.glob("*/*.arrows")
        in_the_way = journal.with_name(f".{journal.stem}.parquet")
        in_the_way.mkdir()
        for eps_id in range(1, 20):
            writer.write(episode(eps_id, 4))
        open_files = [handle for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
        links = [handle.readlink() for handle in open_files if handle.is_symlink()]
        assert not [link for link in links if tmp_path in link.parents]
        assert len(list(tmp_path.glob("*/*.arrows"))) == 19
        assert lengths(tmp_path) == {0: 2} | dict.fromkeys(range(1, 20), 4)
        in_the_way.rmdir()
        writer.write(episode(20, 4))
        assert not list(tmp_path.glob("*/*.arrows"))
    assert lengths(tmp_path) == {0: 2} | dict.fromkeys(range(1, 21), 4)


def test_where_a_file_may_not_be_larger_rows_go_to_another_one(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with EpisodeWriter(tmp_path) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        try:
            for eps_id in range(10):
                rows = {"a": episode(eps_id, 9, width=500), "b": episode(eps_id, 2)}
                writer.write(MultiAgentBatch(rows, 9))
            with pytest.raises(OSError, match="File too large"):
                writer.write(episode(10, 9, width=5000))  # no file takes so much
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    found = {
        int(one["a"]["eps_id"][0]): (len(one["a"]), len(one["b"]))
        for one in read_episodes(tmp_path)
    }
    assert found == dict.fromkeys(range(10), (9, 2))


def test_an_episode_that_cannot_be_written_is_refused_whole_and_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    with EpisodeWriter(tmp_path) as writer:
        rows = {"a": episode(1, 3, agent="a"), "b": episode(1, 2, agent="b")}
        writer.write(MultiAgentBatch(rows, 3))
        (tmp_path / "c").write_text("in the way")  # where a third policy's folder would be
        rows = {"a": episode(2, 3, agent="a"), "c": episode(2, 2, agent="c")}
        with pytest.raises(FileExistsError):
            writer.write(MultiAgentBatch(rows, 3))
        assert (writer.num_episodes, writer.num_rows) == (1, 5)
        (tmp_path / "c").unlink()
        rows = {"a": episode(3, 3, agent="a"), "c": episode(3, 2, agent="c")}
        writer.write(MultiAgentBatch(rows, 3))
    found = [sorted(one.policy_batches) for one in read_episodes(tmp_path)]
    assert found == [["a", "b"], ["a", "c"]]


def test_a_journal_that_is_damaged_within_is_kept_beside_what_could_be_read(
    tmp_path: Path,
) -> None:
    writer = EpisodeWriter(tmp_path)
    ends = []
    for eps_id in range(3):
        writer.write(episode(eps_id, 4))
        (journal,) = tmp_path.glob("*/*.arrows")
        ends.append(journal.stat().st_size)
    whole = bytearray(journal.read_bytes())
    whole[ends[0] : ends[0] + 300] = bytes(300)  # as a power cut leaves it
    damaged = tmp_path / "damaged" / "default_policy"
    damaged.mkdir(parents=True)
    (damaged / journal.name).write_bytes(whole)
    assert lengths(tmp_path / "damaged") == {0: 4}
    with EpisodeWriter(tmp_path / "damaged"):
        pass
    assert sorted(path.suffix for path in damaged.iterdir()) == [".damaged", ".parquet"]
    assert (damaged / f"{journal.name}.damaged").read_bytes() == whole
    assert lengths(tmp_path / "damaged") == {0: 4}
    writer.close()


def test_a_reader_finds_all_while_shards_are_completed_beside_it(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, shard_rows=4) as writer:
        for eps_id in range(5):
            writer.write(episode(eps_id, 2))
        reading = read_episodes(tmp_path)
        found = [next(reading)]  # it has seen which files there are
        writer.write(episode(5, 2))
        assert not list(tmp_path.glob("*/*.arrows"))
        found += list(reading)
    assert {int(one.single()["eps_id"][0]) for one in found} == set(range(6))


def test_a_journal_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path)
    for eps_id in range(3):
        writer.write(episode(eps_id, 4))
    (journal,) = tmp_path.glob("*/*.arrows")
    whole = journal.read_bytes()
    cut = tmp_path / "cut" / "default_policy"
    cut.mkdir(parents=True)
    (cut / journal.name).write_bytes(whole[:-50])
    assert lengths(tmp_path / "cut") == {0: 4, 1: 4}
    (cut / journal.name).write_bytes(whole[:20])
    assert lengths(tmp_path / "cut") == {}
    with EpisodeWriter(tmp_path / "cut"):
        assert not list(cut.iterdir())
    writer.close()


def test_a_second_writer_leaves_a_journal_alone_that_is_written_to(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as one:
        one.write(episode(1, 2))
        with EpisodeWriter(tmp_path) as other:
            other.write(episode(2, 2))
        one.write(episode(3, 2))
    assert lengths(tmp_path) == {1: 2, 2: 2, 3: 2}


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard_rows"):
        EpisodeWriter(tmp_path, shard_rows=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot record in"):
        EpisodeWriter(tmp_path / "file")
    with pytest.raises(ConfigError, match="no episodes are recorded"):
        next(read_episodes(tmp_path))
    writer = EpisodeWriter(tmp_path / "closed")
    writer.close()
    writer.close()
    with pytest.raises(ClosedError, match="was closed"):
        writer.write(episode(0, 1))
    (tmp_path / "closed" / "default_policy").mkdir()
    (tmp_path / "closed" / "default_policy" / "0-x.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="damaged"):
        next(read_episodes(tmp_path / "closed"))


def test_other_programs_read_the_shards(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode(1, 3))
    (shard,) = tmp_path.glob("*/*.parquet")
    plain = pq.ParquetFile(shard).read(columns=["rewards", "t"]).to_pydict()
    assert plain == {"rewards": [1.0] * 3, "t": [0, 1, 2]}


@pytest.mark.parametrize("folder", [None, 5])
def test_a_folder_that_is_no_path_is_refused(folder: object) -> None:
    with pytest.raises(ConfigError, match="takes the path of a folder, not"):
        next(read_episodes(folder))  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_copy_writes_nothing_and_keeps_no_shard_from_completion(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path)
    writer.write(episode(1, 3))
    until_closed, closed = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.close(closed)
            writer.write(episode(2, 5))
        except ClosedError:
            writer.close()
            os.read(until_closed, 1)
            status = 0
        finally:
            os._exit(status)
    writer.write(episode(3, 2))
    writer.close()
    (shard,) = tmp_path.glob("*/*")
    os.close(closed)
    os.close(until_closed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shard.suffix == ".parquet"
    assert lengths(tmp_path) == {1: 3, 3: 2}
