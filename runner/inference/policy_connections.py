"""The asking side of policy workers: who is there, a link to each, requests, and their ends.

Leaves out what is asked (`remote_policy.py`). Each asker has a broker of its own, so that a message
goes to the worker and back without passing anybody: no process has to poll for another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from envbus.actors.protocol import MapBlocks
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, Complete, FailLocal, PeerReady
from envbus.bus.broker.loop import Broker, failure_to_error
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    DecodeError,
    EnvbusError,
    NoPeerError,
    OverloadedError,
    RestartLimitError,
    TransportError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST, LocalLinkEnd
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.transport.spinning import CHILD_SPIN_SECONDS
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Failed, FailureCode, Payload, R, Request
from envbus.runner.inference.policy_protocol import (
    MAX_LAYOUT_BYTES,
    OpenLocalLink,
    ShareRows,
)
from envbus.runner.inference.worker_discovery import (
    WorkerStatus,
    hand_over,
    handover_path,
    has_owner,
    read_status,
)

__all__ = ["Asking", "PolicyConnections", "WorkerDiscovery"]

#: Seconds between looks for workers that are not there, while one is missing.
LOOK_INTERVAL: Final = 0.02
#: Seconds until a thread that waits sees that another one has closed its connections.
_LONGEST_POLL: Final = 0.5
#: Seconds to wait for the reason of a worker's end, once a request has failed for good.
_REASON_TIMEOUT: Final = 0.5
#: How likely an asker leaves a crowded worker for another one.
_CHANGE_CHANCE: Final = 0.5
#: Seconds that a first request waits for any worker's hello, so that it is under way when `ask`
#: returns, and for those of all. A worker that computes says it later.
_HELLO_TIMEOUT: Final = 1.0
_ALL_HELLOS_TIMEOUT: Final = 0.05
#: How often a request is asked whose worker was lost: one that kills whoever computes it ends as
#: many lives. Not fewer, as workers that died together are noticed one by one.
_MAX_ASKS: Final = 5


class _Worker:
    """A worker that this asker has a local link to."""

    def __init__(self, entry: WorkerStatus, identity: bytes) -> None:
        self.entry = entry
        self.identity = identity
        #: What it offers; it is not ready before it has said so.
        self.services: frozenset[str] = frozenset()


class WorkerDiscovery:
    """The workers of one asker.

    Args:
        identity: The asker's own.
        capacity: Requests that it may have in flight.

    Attributes:
        silent: How many have a local link and have not said hello.
        somebody_is_missing: Whether there are, or will be, workers that this asker has no local
        link to.
    """

    def __init__(
        self, directory: Path, identity: str, capacity: int, router: LocalRouter, broker: Broker
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
        #: Of workers whose local links hung up, which life that was.
        self._ended: dict[str, int] = {}
        #: The worker that is asked while nothing is in flight; "": any.
        self._sticky = ""
        #: Descriptor and bytes of the arena, and descriptor of its layout, by name; one or none.
        self._shared: dict[str, tuple[int, int, int]] = {}
        self._num_shared = 0

    @property
    def names(self) -> list[str]:
        """The workers that are ready."""
        return [name for name, worker in self._workers.items() if worker.services]

    # --- who is there ------------------------------------------------------------------------

    def look(self) -> EnvbusError | None:
        """Open local links to workers that are up, at times.

        Returns:
            Why there will be no worker any more, as an exception, if that is so.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_INTERVAL
        status = read_status(self._directory)
        if status is None:
            if has_owner(self._directory):  # which makes again what was removed
                return None
            return ClosedError(
                "the policy workers were closed, or the process that had them ended, or their "
                f"folder was removed and cannot be made again: {self._directory}"
            )
        self._num_expected = sum(worker.state != "lost" for worker in status.workers)
        for entry in status.workers:
            if entry.state == "up" and entry.name not in self._workers:
                self._open_local_link(entry)
        self._count()
        if status.is_hopeless():
            return RestartLimitError(f"no policy worker is left: {status.describe()}")
        return None

    def on_hello(self, outcome: PeerReady) -> None:
        """A worker said hello: it is ready."""
        for worker in self._workers.values():
            if worker.identity == outcome.peer:
                worker.services = frozenset(outcome.hello.services)
        self._count()
        if not self._sticky:
            self._stick_to_one_of(self.names)

    def drop_hung_up(self) -> None:
        """Forget workers that have ended: what they held goes to another one, or fails."""
        for identity in self._router.hung_up():
            self._router.drop_local_link(identity)
            for name, worker in list(self._workers.items()):
                if worker.identity == identity:
                    if worker.services:  # else it turns all away: not at once again
                        self._next_look = 0.0
                    self._ended[name] = worker.entry.incarnation
                    self._forget(worker, "ended")
            self._count()

    def why_it_ended(self, name: str) -> str:
        """Return how a worker ended, which its owner knows a moment after its link hung up."""
        incarnation = self._ended.get(name, 0)
        give_up = time.monotonic() + _REASON_TIMEOUT
        while (status := read_status(self._directory)) and time.monotonic() < give_up:
            for entry in status.workers:
                if entry.name == name and (entry.incarnation > incarnation or entry.state != "up"):
                    return entry.reason
            time.sleep(LOOK_INTERVAL)
        return ""

    def describe_status(self) -> str:
        """Return what the owner says of the workers; "" if there is none."""
        status = read_status(self._directory)
        if status is not None:
            return status.describe()
        if has_owner(self._directory):
            return f"{self._directory} was cleaned up, and their owner has not written there since"
        return ""

    # --- who is asked ------------------------------------------------------------------------

    def sticky_for(self, service: str) -> bytes | None:
        """Return the identity of the sticky worker, if it is ready and offers that service."""
        worker = self._workers.get(self._sticky)
        return worker.identity if worker is not None and service in worker.services else None

    def change_sticky(self) -> None:
        """The sticky worker is crowded: take another one, by chance, so that not all change."""
        names = self.names
        if len(names) > 1 and random.random() < _CHANGE_CHANCE:  # noqa: S311 - no secret
            self._stick_to_one_of(names)

    def avoid(self, name: str) -> None:
        """A worker did not answer in time: it is not the sticky one of anybody."""
        if name == self._sticky:
            self._stick_to_one_of([other for other in self.names if other != name])

    def _stick_to_one_of(self, names: list[str]) -> None:
        self._sticky = random.choice(names) if names else ""  # noqa: S311 - no secret

    # --- shared rows -------------------------------------------------------------------------

    def share(self, arena_fd: int, size: int, layout: MapBlocks) -> str:
        """Let all workers, also later ones, read an arena; return what requests call it.

        Empty if they cannot, as its layout (bounds of each element) is larger than any worker
        reads. What was shared before is shared no more. The descriptor stays the caller's.
        """
        self.unshare()
        plain = msgspec.msgpack.encode([bytes(frame) for frame in encode(layout)])
        if len(plain) > MAX_LAYOUT_BYTES:
            return ""
        self._num_shared += 1
        name = f"{self._identity}:{self._num_shared}"
        layout_fd = create_memfd("envbus-layout")
        try:
            with open(layout_fd, "wb", closefd=False) as file:
                file.write(plain)
            self._shared[name] = (os.dup(arena_fd), size, layout_fd)
        except BaseException:
            os.close(layout_fd)
            raise
        for worker in list(self._workers.values()):
            if not self._share(worker.entry, name):  # its socket was removed: until it is there
                self._router.drop_local_link(worker.identity)
                self._forget(worker, "cannot be handed anything")
        self._count()
        return name

    def unshare(self) -> None:
        """Share nothing with workers that come later. Idempotent."""
        for arena, _, layout in self._shared.values():
            os.close(arena)
            os.close(layout)
        self._shared.clear()

    # --- private -----------------------------------------------------------------------------

    def _open_local_link(self, entry: WorkerStatus) -> None:
        handover_socket = handover_path(self._directory, entry.name, entry.incarnation)
        # The worker's own name on our bus is its identity; on its side, ours is.
        identity = f"{self._identity}.{entry.name}.{entry.incarnation}".encode()
        notice = OpenLocalLink(
            identity=self._identity.encode(), name=entry.name, capacity=self._capacity
        )
        ours, theirs = LocalLinkEnd.pair()
        try:
            has_come = hand_over(handover_socket, notice, [theirs.fileno()])
            if not has_come or not all(self._share(entry, name) for name in self._shared):
                ours.close()
                return
        finally:
            theirs.close()
        self._broker.expect(identity, entry.name, entry.incarnation)
        self._router.add_local_link(identity, ours)
        self._workers[entry.name] = _Worker(entry, identity)

    def _count(self) -> None:
        self.silent = sum(not worker.services for worker in self._workers.values())
        self.somebody_is_missing = len(self._workers) < self._num_expected

    def _forget(self, worker: _Worker, why: str) -> None:
        """Its local link was dropped: what it held goes to another one, or fails."""
        entry = worker.entry
        del self._workers[entry.name]
        reason = f"{entry.name} (incarnation {entry.incarnation}) {why}"
        self._broker.peer_gone(worker.identity, reason)

    def _share(self, entry: WorkerStatus, name: str) -> bool:
        arena, size, layout = self._shared[name]
        handover_socket = handover_path(self._directory, entry.name, entry.incarnation)
        return hand_over(handover_socket, ShareRows(name=name, size=size), (arena, layout))


class Asking(msgspec.Struct, eq=False):
    """A request, from `ask` until its end was taken."""

    to: str
    type_name: str
    frames: Frames
    timeout: float
    deadline: float
    asks: int = 0
    wire_id: int = 0
    #: None until it ends: its reply, or what is to be raised.
    end: Complete | Exception | None = None


class PolicyConnections:
    """One asker. Used by one thread, in the process that made it.

    Args:
        max_in_flight: Most requests that may be unsettled at one time.

    Raises:
        ConfigError: This platform has no local links.
    """

    def __init__(self, directory: Path, max_in_flight: int) -> None:
        if not LOCAL_LINKS_EXIST:
            raise ConfigError("policy workers need Unix sockets that keep messages apart: Linux")
        self._max_in_flight = max_in_flight
        identity = f"asker.{os.getpid()}.{secrets.token_hex(6)}"
        # It waits for one worker, not for many who need the cores: as long as a child may.
        router = LocalRouter(spin=usable_cores() > 1, spin_seconds=CHILD_SPIN_SECONDS)
        limits = BrokerConfig(max_in_flight_per_peer=max_in_flight + 16)
        self._broker = Broker(router, BrokerCore(limits))
        self.discovery = WorkerDiscovery(directory, identity, max_in_flight, router, self._broker)
        self._asked: dict[int, Asking] = {}
        #: Those that wait for a worker.
        self._held: list[Asking] = []
        #: Whether the first hellos have been waited for.
        self._greeted = False
        self._closed = False
        #: The thread that waits for the workers; 0: none does.
        self._polling = 0
        disown_in_forks(self)

    def ask(self, to: str, request: Request[Any], timeout: float) -> Asking:
        """Send a request to a worker or service; `wait_for` returns its reply.

        While nobody is there to take it, it waits until somebody is.

        Raises:
            OverloadedError: Too many are unsettled. Nothing was sent.
            EncodeError: It cannot be sent.
            ClosedError: This was closed.
        """
        return hand_out(lambda: self._ask(to, request, timeout), self.forget)

    def wait_for(self, asking: Asking, *kinds: type[R]) -> R:
        """Return the reply to a request, which is of one of these kinds.

        Raises:
            DecodeError: It is of another kind, or cannot be read.
            RequestError: There is none: time-out, lost worker, error in the policy, ...
            TransportError: There was no memory or descriptor left to send it.
            RestartLimitError: No worker is left, nor will be.
            ClosedError: This, or the workers, were closed; or another process has asked.
        """
        while (end := asking.end) is None:
            self._check_usable()
            if self._asked.get(asking.wire_id) is not asking and asking not in self._held:
                raise ClosedError("this was asked by the process that this one was forked from")
            self._poll(asking.timeout)
        if isinstance(end, Exception):
            raise end
        reply_type = Payload.registry.get(end.header.payload_type)
        if reply_type is None or not issubclass(reply_type, kinds):
            raise DecodeError(f"{asking.to} answered with {end.header.payload_type}")
        return decode(reply_type, end.frames, writable=True)

    @uninterrupted_call
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

    @uninterrupted_call
    def forget(self, asking: Asking) -> None:
        """Give a request up. Idempotent."""
        if asking.wire_id and self._asked.pop(asking.wire_id, None) is not None:
            self._broker.cancel(asking.wire_id)
        with contextlib.suppress(ValueError):
            self._held.remove(asking)
        asking.end = asking.end or ClosedError("this request was given up")

    @uninterrupted_call
    def share(self, arena_fd: int, size: int, layout: MapBlocks) -> str:
        """Let workers read an arena: see `WorkerDiscovery.share`."""
        self._check_usable()
        return self.discovery.share(arena_fd, size, layout)

    @uninterrupted_call
    def close(self) -> None:
        """Let go of all local links; a thread that waits does so itself, soon. Idempotent."""
        self._closed = True
        # Closed under a thread that waits for them, they would wake it no more.
        if self._polling in (0, threading.get_ident()):
            self._let_go()

    def disown(self) -> None:
        """In a forked copy: be closed."""
        self._closed = True

    # --- requests ----------------------------------------------------------------------------

    def _let_go(self) -> None:
        self._broker.close()
        self.discovery.unshare()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this was closed, or belongs to the process this was forked from")

    def _unsettled(self) -> int:
        return len(self._asked) + len(self._held)

    def _ask(self, to: str, request: Request[Any], timeout: float) -> Asking:
        self._check_usable()
        if self._unsettled() >= self._max_in_flight:
            self._poll(0.0)  # some may have ended that nobody waits for
        if (unsettled := self._unsettled()) >= self._max_in_flight:
            raise OverloadedError(
                f"{unsettled} requests are in flight, which is the limit; collect some, or raise "
                "max_in_flight",
                request_id=0,
                peer=to,
            )
        deadline = time.monotonic() + timeout
        asking = Asking(to, type(request).__name__, encode(request), timeout, deadline)
        if self.discovery.somebody_is_missing:
            self._look_for_workers()
        if self.discovery.silent:
            self._hear_hellos(asking)
        self._send(asking)
        return asking

    def _send(self, asking: Asking) -> None:
        left = asking.deadline - time.monotonic()
        if left <= 0:
            asking.end = self._too_late(asking)
            return
        to: bytes | str = asking.to
        if not self._asked and not asking.asks:
            # Brokers do not know of each other's requests: by load alone, all askers would begin
            # with the same worker. And who was busy just now is awake.
            to = self.discovery.sticky_for(asking.to) or to
        try:
            asking.wire_id = self._broker.ask(to, asking.type_name, asking.frames, timeout=left)
        except NoPeerError:
            self._held.append(asking)
            return
        except TransportError as exc:  # no memory or descriptor for it; others go on
            asking.end = exc
            return
        if self._broker.is_pending(asking.wire_id):
            asking.asks += 1
            self._asked[asking.wire_id] = asking
        else:  # there is no room for it on the way to a worker that is busy
            self._held.append(asking)

    def _hear_hellos(self, asking: Asking) -> None:
        """Wait a little for those whose local links were opened, so that a request is under way."""
        begun = time.monotonic()
        while not self.discovery.names or not self._greeted:
            wait = _ALL_HELLOS_TIMEOUT if self.discovery.names else _HELLO_TIMEOUT
            left = min(begun + wait, asking.deadline) - time.monotonic()
            if left <= 0:
                break
            self._poll(min(LOOK_INTERVAL, left))
            if not self.discovery.silent:
                break
        self._greeted = bool(self.discovery.names)
        self._poll(0.0)

    @uninterrupted_call
    def _poll(self, timeout: float) -> None:
        """Take in what comes within `timeout` seconds; returns earlier, also if nothing does."""
        before, self._polling = self._polling, threading.get_ident()  # a signal's handler may poll
        try:
            self._check_usable()  # not before: who closes this looks who waits
            self._take_in(min(timeout, _LONGEST_POLL))
        finally:
            self._polling = before
            if self._closed and not before:
                self._let_go()

    def _take_in(self, timeout: float) -> None:
        if self._held or self.discovery.somebody_is_missing:
            self._look_for_workers()
            timeout = min(timeout, LOOK_INTERVAL)
        for outcome in self._broker.poll(timeout):
            if type(outcome) is Complete:
                asking = self._asked.pop(outcome.wire_id, None)
                if asking is not None:
                    asking.end = outcome
            elif type(outcome) is FailLocal:
                self._on_failure(outcome)
            elif type(outcome) is PeerReady:
                self.discovery.on_hello(outcome)
        self.discovery.drop_hung_up()
        if self._held:
            self._send_held()

    def _send_held(self) -> None:
        """Send what waits, if somebody is there now who takes it, and end what is too late."""
        held, self._held = self._held, []
        absent: set[str] = set()
        for asking in held:
            if asking.to in absent and asking.deadline > time.monotonic():
                self._held.append(asking)
                continue
            self._send(asking)
            if self._held and self._held[-1] is asking:
                absent.add(asking.to)

    def _on_failure(self, outcome: FailLocal) -> None:
        asking = self._asked.pop(outcome.wire_id, None)
        if asking is None:
            return
        failed = outcome.failed
        if failed.code is FailureCode.PEER_LOST and asking.asks < _MAX_ASKS:
            self._send(asking)
            return
        if failed.code is FailureCode.TIMEOUT:
            self.discovery.avoid(failed.peer)
        if failed.code is FailureCode.PEER_LOST and (
            why := self.discovery.why_it_ended(failed.peer)
        ):
            text = f"{asking.type_name} failed {asking.asks} times; at last, {why}"
            failed = msgspec.structs.replace(failed, message=text)
        asking.end = failure_to_error(failed, outcome.wire_id)

    def _too_late(self, asking: Asking) -> Exception:
        why = self.discovery.describe_status()
        text = f"no worker was ready within {asking.timeout:g} s{'; ' if why else ''}{why}"
        return failure_to_error(
            Failed(code=FailureCode.TIMEOUT, message=text, peer=asking.to), asking.wire_id
        )

    def _look_for_workers(self) -> None:
        """Find workers that are up; end what waits for some that never come."""
        error = self.discovery.look()
        if error is not None:
            for asking in self._held:
                asking.end = error
            self._held.clear()
