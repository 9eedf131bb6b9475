"""Pipes within this process, and files of tails; children only sleep."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.memory.memfd import FOUND_BY_LABEL, create_memfd
from envbus.bus.process.stderr import TAIL_BYTES, StderrRelay, StderrTails, read_tail
from tests.descriptors import no_more_files, open_descriptors

pytestmark = pytest.mark.timeout(60)


class Scene:
    """A relay, and both ends of the pipe that stands for the driver's stderr."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        self.relay = StderrRelay(self.into)

    def read(self) -> bytes:
        try:
            return os.read(self.out, 2**20)
        except BlockingIOError:
            return b""

    def has_work(self) -> bool:
        poller = select.poll()
        self.relay.register(poller)
        return bool(poller.poll(0))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.relay.close()
    for fd in (scene.out, scene.into):
        if fd >= 0:
            os.close(fd)


def test_what_is_written_is_passed_on_and_kept(scene: Scene) -> None:
    assert not scene.has_work()
    os.write(scene.relay.child_fd, b"a warning\n")
    assert scene.has_work()
    scene.relay.pump()
    assert scene.read() == bytes(scene.relay.tail) == b"a warning\n"
    assert not scene.has_work()
    assert not scene.relay.is_done


def test_the_end_is_passed_on_after_the_child_is_gone(scene: Scene) -> None:
    os.write(scene.relay.child_fd, b"last words\n")
    scene.relay.close_child_fd()
    scene.relay.finish()
    assert scene.relay.is_done
    assert scene.read() == b"last words\n"


def test_somebody_who_holds_the_pipe_open_does_not_hold_up_the_end(scene: Scene) -> None:
    os.write(scene.relay.child_fd, b"last words\n")
    scene.relay.finish()
    assert scene.relay.is_done
    assert scene.read() == b"last words\n"


def test_a_stream_that_nobody_reads_is_held_back_and_complete_later(scene: Scene) -> None:
    os.set_blocking(scene.relay.child_fd, False)
    sent = got = b""
    with contextlib.suppress(BlockingIOError):  # all that is between is full
        while len(sent) < 2**20:
            data = b"%07d\n" % len(sent) * 512
            os.write(scene.relay.child_fd, data)
            sent += data
            scene.relay.pump()
    assert len(sent) < 2**20, "it is held back"
    assert not scene.has_work()
    while len(got) < len(sent):
        got += scene.read()
        scene.relay.pump()
    assert got == sent


def test_what_waits_at_the_end_has_a_moment_to_find_room(scene: Scene) -> None:
    os.set_blocking(scene.into, False)
    filling = b"x" * os.write(scene.into, b"x" * 2**20)
    os.write(scene.relay.child_fd, b"last words\n")
    scene.relay.finish()
    assert not scene.relay.is_done
    scene.relay.flush(deadline=0.0)
    assert not scene.relay.is_done
    assert scene.read() == filling
    scene.relay.flush(deadline=time.monotonic() + 30.0)
    assert scene.relay.is_done
    assert scene.read() == b"last words\n"


def test_a_reader_that_is_gone_disturbs_nobody(scene: Scene) -> None:
    os.close(scene.out)
    scene.out = -1
    for _ in range(100):
        os.write(scene.relay.child_fd, b"x" * 60_000 + b"\n")
        scene.relay.pump()
    assert bytes(scene.relay.tail).endswith(b"x\n")
    assert len(scene.relay.tail) == 16 * 1024
    assert not scene.has_work()


def test_closing_twice_is_closing_once() -> None:
    before = open_descriptors()
    out, into = os.pipe()
    relay = StderrRelay(into)
    relay.close()
    relay.close()
    left = open_descriptors() - before
    os.close(out)
    os.close(into)
    assert {number for number, *_ in left} == {out, into}


def test_a_write_never_waits_for_room_that_another_writer_has_taken(scene: Scene) -> None:
    """The relay has the pipe open by itself: the driver's own end still waits."""
    assert os.get_blocking(scene.into)
    assert not os.get_blocking(scene.relay._target)
    os.write(scene.relay.child_fd, b"words\n")
    scene.relay.pump()
    assert scene.read() == b"words\n"


def test_a_file_that_is_written_to_by_others_is_not_overwritten(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as file:
        relay = StderrRelay(file.fileno())
        try:
            for text in (b"one\n", b"two\n"):
                os.write(relay.child_fd, text)
                relay.pump()
                file.write(b"other\n")
        finally:
            relay.close()
    assert (tmp_path / "log").read_bytes() == b"one\nother\ntwo\nother\n"


def test_a_log_without_room_is_written_to_again_once_there_is(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with (tmp_path / "log").open("wb") as log:
        relay = StderrRelay(log.fileno())
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            os.write(relay.child_fd, b"lost\n")
            relay.pump()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        os.write(relay.child_fd, b"a warning\n")
        relay.pump()
        relay.close()
    assert (tmp_path / "log").read_bytes() == b"a warning\n"
    assert bytes(relay.tail) == b"lost\na warning\n"


# --- what others may see of it ------------------------------------------------------------------

of_linux = pytest.mark.skipif(not FOUND_BY_LABEL, reason="no memfd or no /proc here")


@pytest.fixture(scope="module")
def child() -> Iterator[int]:
    """A process whose parent is this one, which keeps its tail as a fork server does."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def tails() -> Iterator[StderrTails]:
    tails = StderrTails()
    yield tails
    tails.close()
    tails.close()


def content(tails: StderrTails) -> bytes:
    return os.pread(tails._fd, 2**20, 0)


@of_linux
def test_others_see_the_end_of_what_was_taken_in_until_the_child_has_ended(
    scene: Scene, tails: StderrTails, child: int
) -> None:
    scene.relay.show_as(child, tails)
    scene.relay.pump()
    assert (read_tail(child), content(tails)) == (b"", b""), "a silent child takes no memory"
    os.write(scene.relay.child_fd, b"one\n")
    assert read_tail(child) == b""
    scene.relay.pump()
    assert read_tail(child) == b"one\n"
    for number in range(3):
        os.write(scene.relay.child_fd, b"%05d\n" % number * 3000)
        scene.relay.pump()
        scene.read()
    tail = read_tail(child)
    assert tail == bytes(scene.relay.tail)
    assert len(tail) == TAIL_BYTES
    assert tail.endswith(b"00002\n00002\n")
    scene.relay.close_child_fd()
    scene.relay.pump()
    assert read_tail(child) == tail, "a child that has closed its stderr has still written it"
    scene.relay.finish()
    assert read_tail(child) == b""


@of_linux
def test_what_a_child_writes_at_its_end_takes_no_slot(
    scene: Scene, tails: StderrTails, child: int
) -> None:
    scene.relay.show_as(child, tails)
    os.write(scene.relay.child_fd, b"last words\n")
    scene.relay.finish()
    assert content(tails) == b""


@of_linux
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=40)), max_size=30))
def test_each_child_has_a_slot_of_its_own_and_those_of_ended_ones_are_used_again(
    child: int, steps: list[tuple[int, bytes]]
) -> None:
    tails = StderrTails()
    slots: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    most = 0
    # Others than 0 are no children: what they write must not be seen.
    pids = [child, *range(10**9, 10**9 + 4)]
    try:
        for who, text in steps:
            if not text and who in slots:
                tails.free_slot(slots.pop(who))
                del texts[who]
                continue
            if who not in slots:
                slots[who] = tails.take_slot()
            tails.write(slots[who], pids[who], text)
            texts[who] = text
            most = max(most, len(slots))
            assert len(set(slots.values())) == len(slots)
            assert max(slots.values()) < most
            assert read_tail(child) == texts.get(0, b"")
    finally:
        tails.close()


@of_linux
@given(
    data=st.binary(max_size=60), place=st.integers(0, 3), size=st.sampled_from([0, 2**16, 2**20])
)
def test_whatever_stands_in_the_file_no_more_than_a_tail_is_read(
    child: int, data: bytes, place: int, size: int
) -> None:
    fd = create_memfd("envbus-stderr")
    try:
        os.pwrite(fd, data, place * (8 + TAIL_BYTES))
        os.pwrite(fd, struct.pack("=II", child, 2**32 - 1) + data, 0)
        if size:
            os.ftruncate(fd, size)
        tail = read_tail(child)
        assert tail is not None
        assert tail.startswith(data)
        assert len(tail) <= TAIL_BYTES
        os.pwrite(fd, data.ljust(8, b"\0"), 0)  # and without that process, or a part of it
        os.ftruncate(fd, size or len(data))
        tail = read_tail(child)
        assert tail is not None
        assert len(tail) <= TAIL_BYTES
    finally:
        os.close(fd)


@of_linux
def test_a_file_without_an_end_is_not_read_for_ever(child: int) -> None:
    fd = create_memfd("envbus-stderr")
    try:
        os.ftruncate(fd, 2**44)
        assert read_tail(child) == b""
    finally:
        os.close(fd)


@of_linux
def test_of_other_processes_nothing_is_read(child: int) -> None:
    assert read_tail(child) is None, "its parent keeps no such file"
    tails = StderrTails()
    try:
        assert read_tail(child) == b""
        for pid in (os.getpid(), os.getppid(), 1, 0, -1, 2**22 + 1, 2**70):
            assert read_tail(pid) is None
    finally:
        tails.close()
    fd = create_memfd("envbus-other")
    assert read_tail(child) is None
    os.close(fd)


@of_linux
def test_where_there_is_no_room_for_the_file_nothing_is_kept(scene: Scene, child: int) -> None:
    with no_more_files():
        tails = StderrTails()
    scene.relay.show_as(child, tails)
    os.write(scene.relay.child_fd, b"words\n")
    scene.relay.pump()
    assert scene.read() == b"words\n"
    assert read_tail(child) is None


@of_linux
def test_a_file_that_may_not_grow_disturbs_nobody(
    scene: Scene, tails: StderrTails, child: int
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    scene.relay.show_as(child, tails)
    os.write(scene.relay.child_fd, b"words\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        scene.relay.pump()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert scene.read() == b"words\n"
    assert read_tail(child) == b""
