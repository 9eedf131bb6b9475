from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner.inference.policy_protocol import OpenLocalLink
from envbus.runner.inference.worker_discovery import (
    HandoverSocket,
    OwnerSign,
    StatusFile,
    WorkerStatus,
    close_all,
    hand_over,
    has_owner,
    read_status,
    write_status,
)

pytestmark = pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")

LOCAL_LINK = OpenLocalLink(identity=b"asker", name="asker", capacity=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.0"


@pytest.fixture
def handover_socket(path: Path) -> Iterator[HandoverSocket]:
    handover_socket = HandoverSocket(path)
    yield handover_socket
    handover_socket.close()


@contextmanager
def caller(path: Path) -> Iterator[socket.socket]:
    """Who has come and has not said anything yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.settimeout(30.0)
        made.connect(str(path))
        yield made


#: In a process of its own: elsewhere what tests before have left gives descriptors back.
CROWDED = """
import os, resource, select, socket, sys
from pathlib import Path
from envbus.runner.inference.worker_discovery import HandoverSocket

path = sys.argv[1]
allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
handover_socket = HandoverSocket(Path(path))
callers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
for caller in callers:
    caller.settimeout(30.0)
    caller.connect(path)
for caller in callers:
    lowest = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, most))
    assert handover_socket.receive() == []
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    os.close(lowest)
    assert caller.recv(1) == b"", "not sent away"
print("ready", flush=True)
while not (found := handover_socket.receive()):
    assert select.select([handover_socket], [], [], 30.0)[0], "nobody has come"
print(found[0][0].name)
"""


@pytest.mark.slow
def test_who_comes_when_no_file_may_be_opened_is_sent_away_and_the_next_one_is_heard(
    path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert hand_over(path, LOCAL_LINK, [0])
            assert process.communicate(timeout=30.0)[0] == "asker\n"
        finally:
            process.kill()


def test_nonsense_is_logged_within_a_rate(
    handover_socket: HandoverSocket, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with caller(path) as one:
                one.send(b"nonsense")
                assert handover_socket.receive() == []
    assert len(caplog.records) == 1


def test_a_socket_that_was_removed_is_made_again_and_who_came_before_is_heard(
    handover_socket: HandoverSocket, path: Path
) -> None:
    assert hand_over(path, LOCAL_LINK, [0])
    path.unlink()
    assert not hand_over(path, LOCAL_LINK, [0])
    heard = handover_socket.receive()
    assert hand_over(path, LOCAL_LINK, [0])
    heard += handover_socket.receive()
    for notice, fds in heard:
        close_all(fds)
        assert notice == LOCAL_LINK
    assert len(heard) == 2


def test_a_socket_in_a_folder_that_is_gone_is_made_once_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "worker.0"
    handover_socket = HandoverSocket(path)
    assert handover_socket.receive() == []
    path.parent.mkdir()
    assert handover_socket.receive() == []
    assert path.exists()
    handover_socket.close()


def test_the_sign_of_an_owner_is_no_file_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    assert not has_owner(tmp_path)
    sign = OwnerSign(tmp_path)
    assert not has_owner(tmp_path)
    sign.show()
    for _ in range(300):  # nobody has to look at it
        assert has_owner(tmp_path)
    assert not list(tmp_path.iterdir())
    sign.hide()
    assert not has_owner(tmp_path)
    sign.show()
    sign.show()
    assert has_owner(tmp_path)
    sign.hide()
    assert not has_owner(tmp_path)


def entry(state: str, reason: str = "") -> WorkerStatus:
    return WorkerStatus(name=f"w-{state}", incarnation=1, state=state, reason=reason)


def test_a_status_file_that_was_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    assert read_status(tmp_path / "gone") is None
    for status in (
        StatusFile(workers=[entry("up")]),
        StatusFile(workers=[entry("down", "it ended")]),
    ):
        write_status(tmp_path, status)
        assert read_status(tmp_path) == status
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_status_file_in_somebody_elses_folder_counts_for_nothing(tmp_path: Path) -> None:
    write_status(tmp_path, StatusFile(workers=[entry("up")]))
    os.chown(tmp_path, 1, -1)
    assert read_status(tmp_path) is None


def test_it_says_who_is_missing_and_why() -> None:
    status = StatusFile(workers=[entry("up"), entry("lost", "signal SIGKILL"), entry("starting")])
    assert not status.is_hopeless()
    assert status.describe() == "w-lost: signal SIGKILL; w-starting: starting"
    assert StatusFile(workers=[entry("lost"), entry("lost")]).is_hopeless()
