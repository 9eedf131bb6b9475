"""Which policy workers an asker has lanes to, which of them may be asked, and how the others ended.

Leaves out requests (`policy_lanes.py`).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Final

import msgspec

from envbus.actors.protocol import MapBlocks
from envbus.bus.anonymous import anonymous_file
from envbus.bus.broker import Broker
from envbus.bus.broker_vocabulary import PeerReady
from envbus.bus.codec import encode
from envbus.bus.errors import ClosedError, EnvbusError, RestartLimitError
from envbus.bus.lane import LaneEnd
from envbus.bus.lane_router import LaneRouter
from envbus.runner.policy_board import BoardEntry, door_of, read_board
from envbus.runner.policy_door import knock
from envbus.runner.policy_protocol import OpenLane, ShareRows

__all__ = ["LOOK_INTERVAL", "PolicyRoster"]

#: Seconds between looks for workers that are not there, while one is missing.
LOOK_INTERVAL: Final = 0.02
#: Seconds to wait for the reason of a worker's end, once a request has failed for good.
_REASON_TIMEOUT: Final = 0.5
#: How likely an asker leaves a crowded worker for another one.
_CHANGE_CHANCE: Final = 0.5


class _Worker:
    """A worker that this asker has a lane to."""

    def __init__(self, entry: BoardEntry, identity: bytes) -> None:
        self.entry = entry
        self.identity = identity
        #: What it offers; it is not ready before it has said so.
        self.services: frozenset[str] = frozenset()


class PolicyRoster:
    """The workers of one asker.

    Args:
        directory: The workers'.
        identity: The asker's own.
        capacity: Requests that it may have in flight.
        router: Gets a lane to each worker.
        broker: Over that router; is told who is there.

    Attributes:
        silent: How many have a lane and have not said hello.
        somebody_is_missing: Whether there are, or will be, workers that this asker has no lane to.
    """

    def __init__(
        self, directory: Path, identity: str, capacity: int, router: LaneRouter, broker: Broker
    ) -> None:
        self.silent = 0
        self.somebody_is_missing = True
        self._directory = directory
        self._identity = identity
        self._capacity = capacity
        self._router = router
        self._broker = broker
        #: By name.
        self._workers: dict[str, _Worker] = {}
        self._num_expected = 1
        self._next_look = 0.0
        #: Of workers whose lanes hung up, which life that was.
        self._ended: dict[str, int] = {}
        #: The worker that is asked while nothing is in flight; "": any.
        self._favourite = ""
        #: Descriptor and bytes of the arena, and descriptor of its layout, by name; one or none.
        self._shared: dict[str, tuple[int, int, int]] = {}
        self._num_shared = 0

    @property
    def names(self) -> list[str]:
        """The workers that are ready."""
        return [name for name, worker in self._workers.items() if worker.services]

    # --- who is there ------------------------------------------------------------------------

    def look(self) -> EnvbusError | None:
        """Open lanes to workers that are up, at times.

        Returns:
            Why there will be no worker any more, as an exception, if that is so.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_INTERVAL
        board = read_board(self._directory)
        if board is None:
            return ClosedError(
                "the policy workers were closed, or the process that had them ended, or their "
                f"folder was removed: {self._directory}"
            )
        self._num_expected = sum(worker.state != "lost" for worker in board.workers)
        for entry in board.workers:
            if entry.state == "up" and entry.name not in self._workers:
                self._open_lane(entry)
        self._count()
        if board.is_hopeless():
            return RestartLimitError(f"no policy worker is left: {board.describe()}")
        return None

    def on_hello(self, outcome: PeerReady) -> None:
        """A worker said hello: it is ready."""
        for worker in self._workers.values():
            if worker.identity == outcome.peer:
                worker.services = frozenset(outcome.hello.services)
        self._count()
        self._favourite = self._favourite or random.choice(self.names)  # noqa: S311 - no secret

    def drop_hung_up(self) -> None:
        """Forget workers that have ended: what they held goes to another one, or fails."""
        for identity in self._router.hung_up():
            self._router.drop_lane(identity)
            for name, worker in list(self._workers.items()):
                if worker.identity == identity:
                    del self._workers[name]
                    self._next_look = 0.0
                    self._ended[name] = worker.entry.incarnation
                    reason = f"{name} (incarnation {worker.entry.incarnation}) ended"
                    self._broker.peer_gone(identity, reason)
            self._count()

    def why_it_ended(self, name: str) -> str:
        """Return how a worker ended, which its owner knows a moment after its lane hung up."""
        incarnation = self._ended.get(name, 0)
        give_up = time.monotonic() + _REASON_TIMEOUT
        while (board := read_board(self._directory)) and time.monotonic() < give_up:
            for entry in board.workers:
                if entry.name == name and (entry.incarnation > incarnation or entry.state != "up"):
                    return entry.reason
            time.sleep(LOOK_INTERVAL)
        return ""

    def describe_board(self) -> str:
        """Return what the owner says of the workers; "" if it says nothing."""
        board = read_board(self._directory)
        return "" if board is None else board.describe()

    # --- who is asked ------------------------------------------------------------------------

    def favourite_for(self, service: str) -> bytes | None:
        """Return the identity of the favourite worker, if it is ready and offers that service."""
        worker = self._workers.get(self._favourite)
        return worker.identity if worker is not None and service in worker.services else None

    def change_favourite(self) -> None:
        """The favourite worker is crowded: take another one, by chance, so that not all change."""
        names = self.names
        if len(names) > 1 and random.random() < _CHANGE_CHANCE:  # noqa: S311 - no secret
            self._favourite = random.choice(names)  # noqa: S311

    def avoid(self, name: str) -> None:
        """A worker did not answer in time: it is nobody's favourite."""
        if name == self._favourite:
            others = [other for other in self.names if other != name]
            self._favourite = random.choice(others) if others else ""  # noqa: S311 - no secret

    # --- shared rows -------------------------------------------------------------------------

    def share(self, arena_fd: int, size: int, layout: MapBlocks) -> str:
        """Let all workers, also later ones, read an arena; return what requests call it.

        What was shared before is shared no more.

        Args:
            arena_fd: Its descriptor; the caller keeps it.
            size: Its bytes.
            layout: What is where.
        """
        self._num_shared += 1
        name = f"{self._identity}:{self._num_shared}"
        self.unshare()
        layout_fd = anonymous_file("envbus-layout")
        try:
            with open(layout_fd, "wb", closefd=False) as file:
                file.write(msgspec.msgpack.encode([bytes(frame) for frame in encode(layout)]))
            self._shared[name] = (os.dup(arena_fd), size, layout_fd)
        except BaseException:
            os.close(layout_fd)
            raise
        for worker in self._workers.values():
            self._share(worker.entry, name)
        return name

    def unshare(self) -> None:
        """Share nothing with workers that come later. Idempotent."""
        for arena, _, layout in self._shared.values():
            os.close(arena)
            os.close(layout)
        self._shared.clear()

    # --- private -----------------------------------------------------------------------------

    def _open_lane(self, entry: BoardEntry) -> None:
        door = door_of(self._directory, entry.name, entry.incarnation)
        # The worker's own name on our bus is its identity; on its side, ours is.
        identity = f"{self._identity}.{entry.name}.{entry.incarnation}".encode()
        notice = OpenLane(
            identity=self._identity.encode(), name=entry.name, capacity=self._capacity
        )
        ours, theirs = LaneEnd.pair()
        try:
            if not knock(door, notice, [theirs.fileno()]):
                ours.close()
                return
        finally:
            theirs.close()
        self._broker.expect(identity, entry.name, entry.incarnation)
        self._router.add_lane(identity, ours)
        self._workers[entry.name] = _Worker(entry, identity)
        for name in self._shared:
            self._share(entry, name)

    def _count(self) -> None:
        self.silent = sum(not worker.services for worker in self._workers.values())
        self.somebody_is_missing = len(self._workers) < self._num_expected

    def _share(self, entry: BoardEntry, name: str) -> None:
        arena, size, layout = self._shared[name]
        door = door_of(self._directory, entry.name, entry.incarnation)
        knock(door, ShareRows(name=name, size=size), (arena, layout))
