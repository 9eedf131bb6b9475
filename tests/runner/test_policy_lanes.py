from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import PeerReady
from envbus.bus.errors import ClosedError, RestartLimitError
from envbus.bus.lane_router import LaneRouter
from envbus.bus.messages import Hello
from envbus.runner.policy_door import (
    Board,
    BoardEntry,
    Door,
    Knock,
    close_all,
    door_of,
    write_board,
)
from envbus.runner.policy_lanes import LOOK_INTERVAL, PolicyRoster
from envbus.runner.policy_protocol import OpenLane

SERVICE = "policy/default"


class Folder:
    """The workers' folder, and doors in it that nobody answers at but the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.doors: dict[str, Door] = {}

    def write(self, reason: str = "", **states: str) -> None:
        """Put workers on the board, by name."""
        workers = [
            BoardEntry(name=name, incarnation=0, state=state, reason=reason)
            for name, state in states.items()
        ]
        write_board(self.path, Board(workers=workers))

    def open(self, *names: str) -> None:
        """Open the doors of workers."""
        for name in names:
            self.doors[name] = Door(door_of(self.path, name, 0))

    def knocks(self, name: str) -> list[Knock]:
        """Return who has knocked there; what was left is closed."""
        found = self.doors[name].knocks()
        for one in found:
            close_all(one.fds)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for door in folder.doors.values():
        door.close()


@pytest.fixture
def router() -> LaneRouter:
    return LaneRouter()


@pytest.fixture
def roster(folder: Folder, router: LaneRouter) -> Iterator[PolicyRoster]:
    broker = Broker(router, BrokerCore())
    yield PolicyRoster(folder.path, "asker", 8, router, broker)
    broker.close()


def hello(name: str) -> PeerReady:
    """Return the hello of a worker."""
    return PeerReady(f"asker.{name}.0".encode(), Hello(name=name, services=[SERVICE]), 0, "")


def test_a_lane_is_left_at_the_door_of_each_worker_that_is_up(
    folder: Folder, roster: PolicyRoster
) -> None:
    folder.open("a", "b", "c")
    folder.write(a="up", b="starting", c="up")
    assert roster.look() is None
    assert roster.somebody_is_missing  # b
    assert (roster.silent, roster.names) == (2, [])
    ((notice, fds),) = folder.knocks("a")
    assert isinstance(notice, OpenLane)
    assert (notice.identity, notice.name, notice.capacity) == (b"asker", "a", 8)
    assert len(fds) == 1
    assert not folder.knocks("b")


def test_a_worker_that_does_not_listen_yet_is_tried_again(
    folder: Folder, roster: PolicyRoster
) -> None:
    folder.write(a="up")
    roster.look()
    assert roster.somebody_is_missing
    assert not roster.silent


def test_a_door_that_turns_all_away_is_not_knocked_at_again_at_once(
    folder: Folder, router: LaneRouter, roster: PolicyRoster
) -> None:
    folder.open("a")
    folder.write(a="up")
    give_up, knocks = time.monotonic() + 0.5, 0
    while time.monotonic() < give_up:
        roster.look()
        knocks += len(folder.knocks("a"))
        router.wait(0.0)
        assert router.receive() is None
        roster.drop_hung_up()
    assert 1 < knocks <= 0.5 / LOOK_INTERVAL + 1


def test_one_is_ready_once_it_has_said_hello_and_is_asked_first(
    folder: Folder, roster: PolicyRoster
) -> None:
    folder.open("a", "b")
    folder.write(a="up", b="up")
    roster.look()
    assert roster.favourite_for(SERVICE) is None
    roster.on_hello(hello("b"))
    assert (roster.silent, roster.names) == (1, ["b"])
    assert roster.favourite_for(SERVICE) == b"asker.b.0"
    assert roster.favourite_for("policy/other") is None
    roster.on_hello(hello("a"))
    assert not roster.somebody_is_missing
    assert roster.favourite_for(SERVICE) == b"asker.b.0"


def test_one_that_was_late_is_nobody_s_favourite(folder: Folder, roster: PolicyRoster) -> None:
    folder.open("a", "b")
    folder.write(a="up", b="up")
    roster.look()
    roster.on_hello(hello("a"))
    roster.on_hello(hello("b"))
    roster.avoid("b")
    assert roster.favourite_for(SERVICE) == b"asker.a.0"
    roster.avoid("a")
    assert roster.favourite_for(SERVICE) == b"asker.b.0"


def test_the_only_one_stays_reachable_though_it_was_late(
    folder: Folder, roster: PolicyRoster
) -> None:
    folder.open("a")
    folder.write(a="up")
    roster.look()
    roster.on_hello(hello("a"))
    roster.avoid("a")
    assert roster.names == ["a"]
    assert roster.favourite_for(SERVICE) is None  # by load then


def test_that_nobody_will_come_is_told_with_why(folder: Folder, roster: PolicyRoster) -> None:
    folder.write("signal SIGKILL", a="lost", b="lost")
    error = roster.look()
    assert isinstance(error, RestartLimitError)
    assert "a: signal SIGKILL" in str(error)
    assert not roster.somebody_is_missing
    assert "b: signal SIGKILL" in roster.describe_board()


def test_that_the_workers_were_closed_is_told(folder: Folder, roster: PolicyRoster) -> None:
    assert isinstance(roster.look(), ClosedError)
    assert roster.describe_board() == ""
    assert folder.path.exists()
