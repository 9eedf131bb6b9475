"""The asking side of policy workers: a lane to each, requests, and what became of them.

Leaves out what is asked (`remote_policy.py`). Each asker has a broker of its own, so that a message
goes to the worker and back without passing anybody: no process has to poll for another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from envbus.actors.protocol import MapBlocks
from envbus.bus.broker import Broker, failure_to_error
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import BrokerConfig, Complete, FailLocal, PeerReady
from envbus.bus.codec import decode, encode
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    DecodeError,
    NoPeerError,
    OverloadedError,
    RestartLimitError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.lane import LANES_EXIST, LaneEnd, LaneRouter
from envbus.bus.messages import Failed, FailureCode, Payload, Reply, Request
from envbus.bus.spinning import CHILD_SPIN_SECONDS
from envbus.bus.transport import Frames
from envbus.runner.links import usable_cores
from envbus.runner.policy_board import BoardEntry, door_of, read_board
from envbus.runner.policy_door import knock
from envbus.runner.policy_protocol import OpenLane, ShareRows

__all__ = ["Asking", "PolicyLanes"]

logger = logging.getLogger("envbus.runner.policy_workers")

R = TypeVar("R", bound=Reply)

#: Seconds between looks for workers that are not there, while one is missing.
_LOOK_INTERVAL: Final = 0.02
#: Seconds that a first request waits for any worker's hello, so that it is under way when `ask`
#: returns, and for those of all. A worker that computes says it later.
_HELLO_TIMEOUT: Final = 1.0
_ALL_HELLOS_TIMEOUT: Final = 0.05
#: Seconds to wait for the reason of a worker's end, once a request has failed for good.
_REASON_TIMEOUT: Final = 0.5
#: How likely an asker leaves a crowded worker for another one.
_CHANGE_CHANCE: Final = 0.5
#: How often a request is asked whose worker was lost. The broker may send it to a second worker
#: each time, so that one that kills whoever computes it ends five lives at most. Not fewer, as
#: workers that died together are noticed one by one.
_MAX_ASKS: Final = 3


class Asking:
    """A request, from `ask` until its end was taken."""

    __slots__ = ("asks", "deadline", "end", "frames", "timeout", "to", "type_name", "wire_id")

    def __init__(self, to: str, type_name: str, frames: Frames, timeout: float) -> None:
        self.to = to
        self.type_name = type_name
        self.frames = frames
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.asks = 0
        self.wire_id = 0
        #: None until it ends: its reply, or what is to be raised.
        self.end: Complete | Exception | None = None

    def is_over(self) -> bool:
        """Return whether its time has passed."""
        return time.monotonic() >= self.deadline


class _Worker:
    """A worker that this asker has a lane to."""

    def __init__(self, entry: BoardEntry, identity: bytes) -> None:
        self.entry = entry
        self.identity = identity
        #: What it offers; it is not ready before it has said so.
        self.services: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether it may be asked."""
        return bool(self.services)


class PolicyLanes:
    """One asker. Used by one thread, in the process that made it.

    Args:
        directory: The workers'.
        max_in_flight: Most requests that may be unsettled at one time.

    Raises:
        ConfigError: This platform has no lanes.
    """

    def __init__(self, directory: Path, max_in_flight: int) -> None:
        if not LANES_EXIST:
            raise ConfigError("policy workers need Unix sockets that keep messages apart: Linux")
        self._directory = directory
        self._max_in_flight = max_in_flight
        self._identity = f"asker.{os.getpid()}.{secrets.token_hex(6)}"
        # It waits for one worker, not for many who need the cores: as long as a child may.
        self._router = LaneRouter(spin=usable_cores() > 1, spin_seconds=CHILD_SPIN_SECONDS)
        limits = BrokerConfig(max_in_flight_per_peer=max_in_flight + 16)
        self._broker = Broker(self._router, BrokerCore(limits))
        #: By name.
        self._workers: dict[str, _Worker] = {}
        #: How many of them have not said hello.
        self._silent = 0
        self._num_workers = 1
        self._next_look = 0.0
        self._asked: dict[int, Asking] = {}
        #: Those that wait for a worker.
        self._held: list[Asking] = []
        #: Descriptor and bytes of the arena, and descriptor of its layout, by name; one or none.
        self._shared: dict[str, tuple[int, int, int]] = {}
        self._num_shared = 0
        #: Of workers whose lanes hung up, which life that was.
        self._ended: dict[str, int] = {}
        #: Whether the first hellos have been waited for.
        self._greeted = False
        #: The worker that is asked while nothing is in flight; "": any.
        self._favourite = ""
        self._closed = False
        disown_in_forks(self)

    @property
    def names(self) -> list[str]:
        """The workers that are ready."""
        return [name for name, worker in self._workers.items() if worker.ready]

    def ask(self, to: str, request: Request[Any], timeout: float) -> Asking:
        """Send a request to a worker or service; `wait_for` returns its reply.

        While nobody is there to take it, it waits until somebody is.

        Raises:
            OverloadedError: Too many are unsettled. Nothing was sent.
            EncodeError: It cannot be sent.
            ClosedError: This was closed.
        """
        self._check_usable()
        unsettled = len(self._asked) + len(self._held)
        if unsettled >= self._max_in_flight:
            raise OverloadedError(
                f"{unsettled} requests are in flight, which is the limit; collect some, or raise "
                "max_in_flight",
                request_id=0,
                peer=to,
            )
        asking = Asking(to, type(request).__name__, encode(request), timeout)
        if len(self._workers) < self._num_workers:
            self._look_for_workers()
        if self._silent:
            self._hear_hellos(asking)
        self._send(asking)
        return asking

    def change_favourite(self) -> None:
        """The favourite worker is crowded: take another one, by chance, so that not all change."""
        names = self.names
        if len(names) > 1 and random.random() < _CHANGE_CHANCE:  # noqa: S311 - no secret
            self._favourite = random.choice(names)  # noqa: S311

    def wait_for(self, asking: Asking) -> Reply:
        """Return the reply to a request.

        Raises:
            RequestError: There is none: time-out, lost worker, error in the policy, ...
            RestartLimitError: No worker is left, nor will be.
            ClosedError: This, or the workers, were closed.
        """
        while asking.end is None:
            self._check_usable()
            self._poll(max(asking.deadline - time.monotonic(), 0.0) + 1.0)
        if isinstance(asking.end, Exception):
            raise asking.end
        reply_type = Payload.registry.get(asking.end.header.payload_type)
        if reply_type is None or not issubclass(reply_type, Reply):
            raise DecodeError(f"{asking.to} answered with {asking.end.header.payload_type}")
        return decode(reply_type, asking.end.frames, writable=True)

    def ask_again(self, asking: Asking, to: str) -> None:
        """Ask somebody else what was answered, for what it is worth, within the same time."""
        asking.end = None
        asking.to = to
        self._send(asking)

    def pause(self, asking: Asking, seconds: float) -> None:
        """Let some time pass, within that of a request."""
        until = min(time.monotonic() + seconds, asking.deadline)
        while (left := until - time.monotonic()) > 0:
            self._poll(left)

    def forget(self, asking: Asking) -> None:
        """Give a request up. Idempotent."""
        if asking.wire_id and self._asked.pop(asking.wire_id, None) is not None:
            self._broker.cancel(asking.wire_id)
        with contextlib.suppress(ValueError):
            self._held.remove(asking)
        asking.end = asking.end or ClosedError("this request was given up")

    def share(self, arena_fd: int, size: int, layout: MapBlocks) -> str:
        """Let all workers, also later ones, read an arena; return what requests call it.

        What was shared before is shared no more.

        Args:
            arena_fd: Its descriptor; the caller keeps it.
            size: Its bytes.
            layout: What is where.
        """
        self._check_usable()
        self._num_shared += 1
        name = f"{self._identity}:{self._num_shared}"
        self._unshare()
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.msgpack.encode([bytes(frame) for frame in encode(layout)]))
            file.flush()
            self._shared[name] = (os.dup(arena_fd), size, os.dup(file.fileno()))
        for worker in self._workers.values():
            self._share(worker.entry, name)
        return name

    def close(self) -> None:
        """Let go of all lanes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._broker.close()
        self._unshare()

    def disown(self) -> None:
        """In a forked copy: be closed."""
        self._closed = True

    def _unshare(self) -> None:
        for arena, _, layout in self._shared.values():
            os.close(arena)
            os.close(layout)
        self._shared.clear()

    # --- requests ----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this was closed, or belongs to the process this was forked from")

    def _send(self, asking: Asking) -> None:
        left = asking.deadline - time.monotonic()
        if left <= 0:
            asking.end = self._too_late(asking)
            return
        to: bytes | str = asking.to
        if not self._asked and not asking.asks:
            # Brokers do not know of each other's requests: by load alone, all askers would begin
            # with the same worker. And who was busy just now is awake.
            favourite = self._workers.get(self._favourite)
            if favourite is not None and favourite.ready and to in favourite.services:
                to = favourite.identity
        try:
            asking.wire_id = self._broker.ask(
                to, asking.type_name, asking.frames, timeout=left, idempotent=True
            )
        except NoPeerError:
            self._held.append(asking)
        else:
            asking.asks += 1
            self._asked[asking.wire_id] = asking

    def _hear_hellos(self, asking: Asking) -> None:
        """Wait a little for those whose lanes were opened, so that a request is under way."""
        begun = time.monotonic()
        while not self.names or not self._greeted:
            waited = time.monotonic() - begun
            if waited >= (_ALL_HELLOS_TIMEOUT if self.names else _HELLO_TIMEOUT):
                break
            self._poll(min(_LOOK_INTERVAL, asking.timeout))
            if not self._silent:
                break
        self._greeted = bool(self.names)
        self._poll(0.0)

    def _poll(self, timeout: float) -> None:
        """Take in what comes within `timeout` seconds; returns earlier if something does."""
        if len(self._workers) < self._num_workers or self._held:
            self._look_for_workers()
            timeout = min(timeout, _LOOK_INTERVAL)
        somebody_is_ready = False
        for outcome in self._broker.poll(timeout):
            if type(outcome) is Complete:
                asking = self._asked.pop(outcome.wire_id, None)
                if asking is not None:
                    asking.end = outcome
            elif type(outcome) is FailLocal:
                self._on_failure(outcome)
            elif type(outcome) is PeerReady:
                for worker in self._workers.values():
                    if worker.identity == outcome.peer:
                        worker.services = frozenset(outcome.hello.services)
                self._count_silent()
                somebody_is_ready = True
                self._favourite = self._favourite or random.choice(self.names)  # noqa: S311
        for identity in self._router.hung_up():
            self._on_hang_up(identity)
        if self._held and (somebody_is_ready or self._held[0].deadline <= time.monotonic()):
            held, self._held = self._held, []
            for asking in held:
                self._send(asking)

    def _on_failure(self, outcome: FailLocal) -> None:
        asking = self._asked.pop(outcome.wire_id, None)
        if asking is None:
            return
        failed = outcome.failed
        if failed.code is FailureCode.PEER_LOST and asking.asks < _MAX_ASKS:
            self._send(asking)
            return
        if failed.code is FailureCode.TIMEOUT and failed.peer == self._favourite:
            others = [name for name in self.names if name != failed.peer]
            self._favourite = random.choice(others) if others else ""  # noqa: S311
        if failed.code is FailureCode.PEER_LOST and (why := self._why_it_ended(failed.peer)):
            text = f"{asking.type_name} failed {asking.asks} times; at last, {why}"
            failed = msgspec.structs.replace(failed, message=text)
        asking.end = failure_to_error(failed, outcome.wire_id)

    def _too_late(self, asking: Asking) -> Exception:
        board = read_board(self._directory)
        why = board.describe() if board is not None else ""
        text = f"no worker was ready within {asking.timeout:g} s{'; ' if why else ''}{why}"
        return failure_to_error(
            Failed(code=FailureCode.TIMEOUT, message=text, peer=asking.to), asking.wire_id
        )

    # --- workers -----------------------------------------------------------------------------

    def _look_for_workers(self) -> None:
        """Open lanes to workers that are up, at times; end what waits for some that never come."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_INTERVAL
        board = read_board(self._directory)
        if board is None:
            self._fail_held(
                ClosedError("the policy workers were closed, or the process that had them ended")
            )
            return
        self._num_workers = sum(worker.state != "lost" for worker in board.workers)
        if board.is_hopeless():
            self._fail_held(RestartLimitError(f"no policy worker is left: {board.describe()}"))
        for entry in board.workers:
            if entry.state == "up" and entry.name not in self._workers:
                self._open_lane(entry)

    def _fail_held(self, error: Exception) -> None:
        for asking in self._held:
            asking.end = error
        self._held.clear()

    def _open_lane(self, entry: BoardEntry) -> None:
        door = door_of(self._directory, entry.name, entry.incarnation)
        # The worker's own name on our bus is its identity; on its side, ours is.
        identity = f"{self._identity}.{entry.name}.{entry.incarnation}".encode()
        notice = OpenLane(
            identity=self._identity.encode(), name=entry.name, capacity=self._max_in_flight
        )
        ours, theirs = LaneEnd.pair()
        try:
            if not knock(door, notice, theirs.fds()):
                ours.close()
                return
        finally:
            theirs.close()
        self._broker.expect(identity, entry.name, entry.incarnation)
        self._router.add_lane(identity, ours)
        self._workers[entry.name] = _Worker(entry, identity)
        self._count_silent()
        for name in self._shared:
            self._share(entry, name)

    def _count_silent(self) -> None:
        self._silent = sum(not worker.ready for worker in self._workers.values())

    def _share(self, entry: BoardEntry, name: str) -> None:
        arena, size, layout = self._shared[name]
        door = door_of(self._directory, entry.name, entry.incarnation)
        knock(door, ShareRows(name=name, size=size), (arena, layout))

    def _on_hang_up(self, identity: bytes) -> None:
        """A worker has ended: what it held goes to another one, or fails."""
        self._router.drop_lane(identity)
        for name, worker in list(self._workers.items()):
            if worker.identity == identity:
                del self._workers[name]
                self._count_silent()
                self._next_look = 0.0
                self._ended[name] = worker.entry.incarnation
                reason = f"{name} (incarnation {worker.entry.incarnation}) ended"
                self._broker.peer_gone(identity, reason)

    def _why_it_ended(self, name: str) -> str:
        """Return how a worker ended, which its owner knows a moment after its lane hung up."""
        incarnation = self._ended.get(name, 0)
        give_up = time.monotonic() + _REASON_TIMEOUT
        while (board := read_board(self._directory)) and time.monotonic() < give_up:
            for entry in board.workers:
                if entry.name == name and (entry.incarnation > incarnation or entry.state != "up"):
                    return entry.reason
            time.sleep(_LOOK_INTERVAL)
        return ""
