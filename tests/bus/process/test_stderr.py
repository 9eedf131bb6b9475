"""Pipes within this process; no child."""

from __future__ import annotations

import os
import resource
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbus.bus.process.stderr import StderrRelay
from tests.descriptors import open_descriptors

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
    with pytest.raises(BlockingIOError):  # noqa: PT012 - until all that is between is full
        while True:
            data = b"%07d\n" % len(sent) * 512
            os.write(scene.relay.child_fd, data)
            sent += data
            scene.relay.pump()
            assert len(sent) < 2**20
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
