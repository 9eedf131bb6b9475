from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envbus.bus.lane import LANES_EXIST
from envbus.runner.policy_door import (
    Board,
    BoardEntry,
    Door,
    close_all,
    knock,
    read_board,
    write_board,
)
from envbus.runner.policy_protocol import OpenLane
from tests.descriptors import no_more_files

pytestmark = pytest.mark.skipif(not LANES_EXIST, reason="no SOCK_SEQPACKET or epoll here")

LANE = OpenLane(identity=b"asker", name="asker", capacity=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "door"


@pytest.fixture
def door(path: Path) -> Iterator[Door]:
    door = Door(path)
    yield door
    door.close()


@contextmanager
def caller(path: Path) -> Iterator[socket.socket]:
    """Who has come and has not said anything yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.settimeout(30.0)
        made.connect(str(path))
        yield made


def test_who_comes_when_no_file_may_be_opened_is_sent_away_and_the_next_one_is_heard(
    door: Door, path: Path
) -> None:
    with caller(path) as first, caller(path) as second:
        for one in (first, second):
            with no_more_files():
                assert door.knocks() == []
            assert one.recv(1) == b""
    assert knock(path, LANE, [0])
    ((notice, fds),) = door.knocks()
    close_all(fds)
    assert notice == LANE


def test_nonsense_is_logged_within_a_rate(
    door: Door, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with caller(path) as one:
                one.send(b"nonsense")
                assert door.knocks() == []
    assert len(caplog.records) == 1


def entry(state: str, reason: str = "") -> BoardEntry:
    return BoardEntry(name=f"w-{state}", incarnation=1, state=state, reason=reason)


def test_a_board_that_was_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    assert read_board(tmp_path / "gone") is None
    for board in (Board(workers=[entry("up")]), Board(workers=[entry("down", "it ended")])):
        write_board(tmp_path, board)
        assert read_board(tmp_path) == board
    assert len(list(tmp_path.iterdir())) == 1


def test_it_says_who_is_missing_and_why() -> None:
    board = Board(workers=[entry("up"), entry("lost", "signal SIGKILL"), entry("starting")])
    assert not board.is_hopeless()
    assert board.describe() == "w-lost: signal SIGKILL; w-starting: starting"
    assert Board(workers=[entry("lost"), entry("lost")]).is_hopeless()
