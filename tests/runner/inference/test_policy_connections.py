from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbus.actors.protocol import MapBlocks
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import PeerReady
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import ClosedError, RequestTimeoutError, RestartLimitError
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.wire.messages import Hello, Tree
from envbus.runner.inference.policy_connections import (
    LOOK_INTERVAL,
    PolicyConnections,
    WorkerDiscovery,
)
from envbus.runner.inference.policy_protocol import DescribePolicy, OpenLocalLink, ShareRows
from envbus.runner.inference.worker_discovery import (
    Handover,
    HandoverSocket,
    OwnerSign,
    StatusFile,
    WorkerStatus,
    close_all,
    handover_path,
    write_status,
)
from tests.waiting import wait_until

LAYOUT = MapBlocks(observation_space=Tree(None), action_space=Tree(None), num_envs=1, first_row=0)
SERVICE = "policy/default_policy"


class Folder:
    """The workers' folder, and handover sockets in it that nobody answers at but the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handovers: dict[str, HandoverSocket] = {}

    def write(self, reason: str = "", **states: str) -> None:
        """Put workers in the status file, by name."""
        workers = [
            WorkerStatus(name=name, incarnation=0, state=state, reason=reason)
            for name, state in states.items()
        ]
        write_status(self.path, StatusFile(workers=workers))

    def open(self, *names: str) -> None:
        """Open the handover sockets of workers."""
        for name in names:
            self.handovers[name] = HandoverSocket(handover_path(self.path, name, 0))

    def receive(self, name: str) -> list[Handover]:
        """Return what was handed over there; its descriptors are closed."""
        found = self.handovers[name].receive()
        for one in found:
            close_all(one.fds)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for handover_socket in folder.handovers.values():
        handover_socket.close()


@pytest.fixture
def router() -> LocalRouter:
    return LocalRouter()


@pytest.fixture
def discovery(folder: Folder, router: LocalRouter) -> Iterator[WorkerDiscovery]:
    broker = Broker(router, BrokerCore())
    yield WorkerDiscovery(folder.path, "asker", 8, router, broker)
    broker.close()


def hello(name: str) -> PeerReady:
    """Return the hello of a worker."""
    return PeerReady(f"asker.{name}.0".encode(), Hello(name=name, services=[SERVICE]), 0, "")


def test_a_local_link_is_handed_over_to_each_worker_that_is_up(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.open("a", "b", "c")
    folder.write(a="up", b="starting", c="up")
    assert discovery.look() is None
    assert discovery.somebody_is_missing  # b
    assert (discovery.silent, discovery.names) == (2, [])
    ((notice, fds),) = folder.receive("a")
    assert isinstance(notice, OpenLocalLink)
    assert (notice.identity, notice.name, notice.capacity) == (b"asker", "a", 8)
    assert len(fds) == 1
    assert not folder.receive("b")


def test_a_worker_that_does_not_listen_yet_is_tried_again(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.write(a="up")
    discovery.look()
    assert discovery.somebody_is_missing
    assert not discovery.silent


def test_a_worker_that_turns_all_away_is_not_tried_again_at_once(
    folder: Folder, router: LocalRouter, discovery: WorkerDiscovery
) -> None:
    folder.open("a")
    folder.write(a="up")
    begun, handovers = time.monotonic(), 0
    while handovers < 4:
        discovery.look()
        handovers += len(folder.receive("a"))
        router.wait(0.0)
        assert router.receive() is None
        discovery.drop_hung_up()
    assert handovers <= (time.monotonic() - begun) / LOOK_INTERVAL + 1


def test_one_is_ready_once_it_has_said_hello_and_is_asked_first(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.open("a", "b")
    folder.write(a="up", b="up")
    discovery.look()
    assert discovery.sticky_for(SERVICE) is None
    discovery.on_hello(hello("b"))
    assert (discovery.silent, discovery.names) == (1, ["b"])
    assert discovery.sticky_for(SERVICE) == b"asker.b.0"
    assert discovery.sticky_for("policy/other") is None
    discovery.on_hello(hello("a"))
    assert not discovery.somebody_is_missing
    assert discovery.sticky_for(SERVICE) == b"asker.b.0"


def test_one_that_was_late_is_not_sticky(folder: Folder, discovery: WorkerDiscovery) -> None:
    folder.open("a", "b")
    folder.write(a="up", b="up")
    discovery.look()
    discovery.on_hello(hello("a"))
    discovery.on_hello(hello("b"))
    discovery.avoid("b")
    assert discovery.sticky_for(SERVICE) == b"asker.a.0"
    discovery.avoid("a")
    assert discovery.sticky_for(SERVICE) == b"asker.b.0"


def test_the_only_one_stays_reachable_though_it_was_late(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.open("a")
    folder.write(a="up")
    discovery.look()
    discovery.on_hello(hello("a"))
    discovery.avoid("a")
    assert discovery.names == ["a"]
    assert discovery.sticky_for(SERVICE) is None  # by load then


def test_that_nobody_will_come_is_told_with_why(folder: Folder, discovery: WorkerDiscovery) -> None:
    folder.write("signal SIGKILL", a="lost", b="lost")
    error = discovery.look()
    assert isinstance(error, RestartLimitError)
    assert "a: signal SIGKILL" in str(error)
    assert not discovery.somebody_is_missing
    assert "b: signal SIGKILL" in discovery.describe_status()


def test_that_the_workers_were_closed_is_told(folder: Folder, discovery: WorkerDiscovery) -> None:
    assert isinstance(discovery.look(), ClosedError)
    assert discovery.describe_status() == ""
    assert folder.path.exists()


def test_an_owner_whose_files_were_removed_is_waited_for(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    sign = OwnerSign(folder.path)
    sign.show()
    assert discovery.look() is None
    assert "was cleaned up" in discovery.describe_status()
    folder.open("a")
    folder.write(a="up")
    wait_until(lambda: discovery.look() is None and discovery.silent, "the worker")
    sign.hide()


def test_rows_whose_layout_is_larger_than_a_worker_reads_are_not_shared(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.open("a")
    folder.write(a="up")
    discovery.look()
    folder.receive("a")
    bounds = Tree(bytes(64 * 2**20))
    arena = create_memfd("test")
    large = MapBlocks(observation_space=bounds, action_space=Tree(None), num_envs=1, first_row=0)
    assert discovery.share(arena, 0, large) == ""
    assert discovery.share(arena, 0, LAYOUT) != ""
    close_all([arena])
    assert [type(one.notice) for one in folder.receive("a")] == [ShareRows]
    discovery.unshare()


def test_rows_that_cannot_be_handed_over_are_once_the_socket_is_there_again(
    folder: Folder, discovery: WorkerDiscovery
) -> None:
    folder.open("a")
    folder.write(a="up")
    discovery.look()
    discovery.on_hello(hello("a"))
    handover_path(folder.path, "a", 0).unlink()
    arena = create_memfd("test")
    name = discovery.share(arena, 0, LAYOUT)
    close_all([arena])
    assert discovery.names == []  # it does not know these rows
    assert discovery.somebody_is_missing
    folder.receive("a")  # makes the socket again
    wait_until(lambda: discovery.look() is None and discovery.silent, "the worker")
    link, shared = (one.notice for one in folder.receive("a"))
    assert isinstance(link, OpenLocalLink)
    assert isinstance(shared, ShareRows)
    assert shared.name == name
    discovery.unshare()


def test_a_first_request_waits_for_hellos_no_longer_than_it_may(folder: Folder) -> None:
    folder.open("a")
    folder.write(a="up")
    connections = PolicyConnections(folder.path, 8)
    request = DescribePolicy(policy_id="default", with_weights=False)
    asking = connections.ask(SERVICE, request, 0.01)
    assert isinstance(asking.end, RequestTimeoutError)
    connections.close()
