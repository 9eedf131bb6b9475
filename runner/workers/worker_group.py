"""The processes of one owner: start, ask, watch, start again, stop.

What pools of env actors (`fleet.py`), groups of runners and the like share. Leaves out what they
are asked: it carries requests to them and returns what became of each. How they are reached is in
`connections.py`, what follows from their ends in `lifecycle.py`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic

import msgspec
from gymnasium.error import AlreadyPendingCallError

from envbus.bus.broker.deadlines import NO_DEADLINE
from envbus.bus.broker.events import Complete, FailLocal, Notify, PeerLeft, PeerReady
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import ClosedError, DecodeError, NoPeerError, StartError, TransportError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call, without_interrupts
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.transport.unix_sockets import wait_for
from envbus.bus.wire.messages import Failed, FailureCode, Payload, Reply, Request
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import FaultFigures
from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.connections import Connections
from envbus.runner.workers.lifecycle import Lifecycle, why_it_ended
from envbus.runner.workers.recycling import Recycling
from envbus.runner.workers.worker import (
    ActorState,
    Gone,
    Lost,
    M,
    Replied,
    WorkerEvent,
    taken_from,
)

__all__ = [
    "Requests",
    "Stage",
    "WorkerGroup",
    "WorkerGroupStatistics",
    "raise_if_failed",
]

logger = logging.getLogger("envbus.runner.workers.fleet")

#: Seconds between looks for exited processes while messages keep coming.
_EXIT_CHECK_INTERVAL = 0.05
#: Seconds for the exit of a process to be told whose socket has hung up.
_EXIT_TIMEOUT = 1.0


class Requests(Generic[M]):
    """The requests of one worker group. Each that was asked and not cancelled ends once.

    Args:
        connections: Where the actors are.
    """

    def __init__(self, connections: Connections[M]) -> None:
        self._connections = connections
        self._broker = connections.broker
        #: By request id: who was asked, the caller's tag, and what, if the reply is checked.
        self._calls: dict[int, tuple[M, Any, Request[Any] | None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def ask(self, actor: M, request: Request[Any], *, timeout: float | None, tag: object) -> int:
        """Encode and send a request; return its id.

        Raises:
            EncodeError: Something in it cannot be sent; nothing was.
            NoPeerError: The actor is not running.
        """
        assert actor.codec is not None
        try:
            request_id = self._broker.ask(
                actor.identity,
                type(request).__name__,
                actor.codec.encode(request),
                timeout=NO_DEADLINE if timeout is None else timeout,
            )
        except NoPeerError:
            self._connections.end(actor)
            raise
        except ClosedError as exc:  # its pipe hangs up before anybody is told of its end
            self._connections.end(actor)
            raise NoPeerError(str(exc), request_id=0, peer=actor.name) from exc
        self._calls[request_id] = (actor, tag, None if actor.check is None else request)
        return request_id

    def is_asked(self, request_id: int) -> bool:
        """Return whether a request has neither ended nor been cancelled."""
        return request_id in self._calls and self._broker.is_pending(request_id)

    def cancel(self, request_id: int) -> None:
        """Forget a request; its reply will be dropped."""
        call = self._calls.pop(request_id, None)
        if call is not None:
            call[0].abandoned = request_id
            self._broker.cancel(request_id)

    def on_reply(self, outcome: Complete) -> Replied[M] | Lost[M] | None:
        """Return how a request ended; None: it was cancelled."""
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return None
        actor, tag, request = call
        assert actor.codec is not None
        reply_type = Payload.registry.get(outcome.header.payload_type, Reply)
        try:
            reply: Payload | Exception = actor.codec.decode(reply_type, outcome.frames)
        except ClosedError as exc:  # it died between the message and what belongs to it
            self._connections.end(actor)
            failed = Failed(code=FailureCode.PEER_LOST, message=f"{actor.describe()}: {exc}")
            return Lost(actor, tag, failed, actor.incarnation, actor.cause)
        except (DecodeError, TransportError) as exc:
            # E.g. an object whose class cannot be imported here; other requests' ends follow.
            reply = exc
        misfit = self._judge(actor, request, reply)
        if actor.abandoned < outcome.wire_id:
            actor.abandoned = 0
        if misfit is not None:
            return Lost(actor, tag, misfit, actor.incarnation, actor.cause)
        if isinstance(reply, Exception):
            failed = Failed(code=FailureCode.PROTOCOL, message=f"{actor.describe()}: {reply}")
            return Lost(actor, tag, failed, actor.incarnation, actor.cause)
        return Replied(actor, tag, reply)

    def on_failure(self, outcome: FailLocal) -> Lost[M] | None:
        """Return how a request failed; None: it was cancelled."""
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return None
        actor, tag, request = call
        failed = outcome.failed
        if failed.code is FailureCode.PEER_LOST:
            self._connections.end(actor)
            if actor.remote:  # the broker knows neither its envs nor its number
                told = f"{actor.describe()} left: {failed.message}"
                failed = msgspec.structs.replace(failed, message=told)
        elif failed.code is FailureCode.TIMEOUT:
            actor.abandoned = outcome.wire_id
        else:
            if failed.code is FailureCode.NO_PEER:
                # Said by the actor itself: the broker says so before anything is sent. Taken for
                # the broker's word, the end of the actor would be waited for.
                failed = msgspec.structs.replace(failed, code=FailureCode.PROTOCOL)
            failed = self._judge(actor, request, failed) or failed
        return Lost(actor, tag, failed, actor.incarnation, actor.cause)

    def _judge(
        self, actor: M, request: Request[Any] | None, answer: Payload | Exception
    ) -> Failed | None:
        """Let an actor go that has answered what it cannot; None: it has not."""
        if actor.check is None or request is None:
            return None
        wrong = actor.check(request, answer)
        if wrong is None:
            return None
        text = f"{actor.describe()} is let go, as it has answered {wrong}"
        self._connections.kill(actor, reason=text)
        return Failed(code=FailureCode.PEER_LOST, message=text)


class Stage(enum.Enum):
    """Tags of the requests by which processes come up; see `WorkerGroup._on_stage`."""

    BUILD = "build"
    MAP = "map"


class WorkerGroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    actors: int = 0
    actors_ready: int = 0
    #: Actor processes started again after they ended.
    restarts: int = 0
    #: Actor processes that were exchanged for fresh ones while they worked (`RecycleAfter`).
    recycled: int = 0
    #: Requests to actors that wait for their end now.
    in_flight: int = 0
    #: Replies dropped because their request had ended already.
    late_replies: int = 0


class WorkerGroup(ABC, Generic[M]):
    """The processes of one owner. One thread creates, uses and closes it.

    A subclass says how a process comes up, from its start to READY, at the first start and at each
    later one.

    Args:
        actors: All of them, not started yet.
        config: How they are started and watched.
        entry: What each runs, `"module:function"`; it calls `actors.hosting.host`.
    """

    def __init__(self, actors: Sequence[M], config: FleetConfig, entry: str) -> None:
        self.config = config
        self.actors = actors
        #: What happened and nobody has taken.
        self._events: deque[WorkerEvent[M]] = deque()
        #: Requests that have passed their deadline and are told with the next events.
        self._late: list[Lost[M]] = []
        self._next_exit_check = 0.0
        #: Seconds for which `poll` has waited.
        self.waited = 0.0
        #: The thread that is in `poll`.
        self._polled_by: int | None = None
        self._closed = False
        #: Whether all was let go of, too.
        self._finished = False
        #: Whether the first start is over: until then what fails is the caller's.
        self._is_up = False
        self._connections: Connections[M] = Connections(self.actors, config, entry)
        self._requests: Requests[M] = Requests(self._connections)
        try:
            self._lifecycle: Lifecycle[M] = Lifecycle(
                self.actors, self._connections, self._start, config, self._events
            )
        except BaseException:
            self._connections.close(0.0, terminate=True)
            raise
        disown_in_forks(self)

    # --- how a process comes up --------------------------------------------------------------

    @abstractmethod
    def _start(self, actor: M) -> None:
        """Start one; raises `StartError` if there is no process or no memory for it."""

    @abstractmethod
    def _on_hello(self, outcome: PeerReady) -> None:
        """A peer is there; raises `NoPeerError` if it is not any more."""

    @abstractmethod
    def _on_stage(self, answer: Replied[M]) -> bool:
        """A request with a `Stage` was answered; return whether the process is READY now.

        Raises:
            NoPeerError: The process has ended.
        """

    @contextlib.contextmanager
    def _telling(self, actor: M) -> Iterator[None]:
        """Tell a process within what it is to come up with.

        One that is started again ends where it cannot be told: else nobody would hear of it again.

        Raises:
            NoPeerError: It has ended.
            Exception: At the first start, whatever is raised within.
        """
        try:
            yield
        except NoPeerError:
            raise
        except BaseException as exc:  # what it is made of may have any code, and do what it likes
            if not self._is_up:
                raise
            reason = f"it cannot be told what it is to do: {exc}"
            logger.error("%s: %s", actor.describe(), reason)
            self._connections.kill(actor, reason=reason)
            if not isinstance(exc, Exception):
                raise

    def _on_notice(self, outcome: Notify) -> None:
        """A peer tells something."""

    def _let_go(self) -> None:
        """Let go of what was made for all of them."""

    def start_all(self, until: ActorState) -> None:
        """Start all, side by side, and wait until each has got to the state `until`.

        Raises:
            StartError: A process ended, or was not there within `timeouts.start`.
            Exception: What brings it up raises.
        """
        self._connections.process_group.check_room(sum(not actor.remote for actor in self.actors))
        for actor in self.actors:
            self._start(actor)
        self.wait_for_all(until)

    def wait_for_all(self, state: ActorState) -> None:
        """Wait, at the first start, until each has got to `state`; raises as `start_all`."""
        timeout = self.config.timeouts.start
        deadline = time.monotonic() + (NO_DEADLINE if timeout is None else timeout)
        while late := [a for a in self.actors if a.state is not state]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartError(
                    f"not started within {timeout} s: {', '.join(a.describe() for a in late)}; "
                    "raise Timeouts.start if what they make needs longer\n"
                    + "\n".join(self.stacks(late))
                )
            for event in self.poll(left):
                # A request's time is over with that of the start, which tells all that are late.
                if not (isinstance(event, Lost) and event.failed.code is FailureCode.TIMEOUT):
                    raise_if_failed(event)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What remote ones join at; a `*` port is replaced by the real one."""
        return self._connections.endpoints

    # --- ask ---------------------------------------------------------------------------------

    def ask(self, actor: M, request: Request[Any], *, timeout: float | None, tag: object) -> int:
        """Send a request; `poll` returns its end, with `tag`.

        Returns:
            An id for `cancel`.

        Raises:
            ClosedError, AlreadyPendingCallError: As `poll`.
            EncodeError: Something in it cannot be sent; nothing was.
            NoPeerError: The actor is not running.
        """
        self._check_usable()
        return self._requests.ask(actor, request, timeout=timeout, tag=tag)

    def cancel(self, request_id: int) -> None:
        """Forget a request; its reply will be dropped."""
        if not self._closed:
            self._requests.cancel(request_id)

    def fileno(self) -> int:
        """Return a descriptor to wait for, beside others, as `Broker.fileno`."""
        self._check_usable()
        return self._connections.broker.fileno()

    def poll(self, timeout: float) -> Iterator[WorkerEvent[M]]:
        """Wait up to `timeout` seconds for events, and return them; may return nothing before.

        What is not taken out of the iterator comes again with the next call. The driver may stay
        away between calls for as long as it likes: what came meanwhile is taken before anything
        is judged late.

        Raises:
            ClosedError: It was closed, or belongs to the process that this one was forked from.
            AlreadyPendingCallError: Another thread waits for events, and would miss them.
        """
        self._check_usable()
        self._polled_by = threading.get_ident()
        try:
            began = time.monotonic()
            taken = self._take_outcomes(self._lifecycle.until_due(timeout))
            now = time.monotonic()
            self.waited += now - began
            if not taken or now >= self._next_exit_check:
                self._next_exit_check = now + _EXIT_CHECK_INTERVAL
                self._look_after_children(now)
                self._connections.drain_pipes(everyone=not taken)
            self._lifecycle.look_at_memory(now)
            return taken_from(self._events)
        finally:
            self._polled_by = None

    def is_asked(self, request_id: int) -> bool:
        """Return whether the end of a request will be an event: none is under way now."""
        return self._requests.is_asked(request_id)

    def why_gone(self, actor: M) -> str:
        """Return how an actor ended that could not be asked; waits up to a second for its exit."""
        who, child = actor.describe(), actor.child
        if actor.kill_reason is not None and actor.kill_reason[1]:
            return f"{who} was killed: {actor.kill_reason[1]}"
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while child is not None and child.exit_status is None:
            if not wait_for(self._connections.process_group, select.POLLIN, deadline):
                break
            self._look_after_children(time.monotonic())
        if child is None or child.exit_status is None:
            return f"{who} has ended"
        return f"{who} ended: {child.exit_status.report()}"

    def stacks(self, actors: Sequence[M]) -> list[str]:
        """Return what the threads of actors are doing that do not answer, for people.

        `Lost` says it by itself when a request has passed its deadline. Takes 0.3 s at most.
        """
        return self._lifecycle.stacks(actors)

    def statistics(self) -> WorkerGroupStatistics:
        """Return counts since the start."""
        return WorkerGroupStatistics(
            actors=len(self.actors),
            actors_ready=sum(actor.state is ActorState.READY for actor in self.actors),
            restarts=self._lifecycle.restarts,
            recycled=self._lifecycle.recycled,
            in_flight=len(self._requests),
            late_replies=self._connections.broker.statistics().late_replies,
        )

    def recent_ends(self) -> list[FaultFigures]:
        """Return the latest processes that have ended by themselves or were killed."""
        return list(self._lifecycle.ends)

    # --- end ---------------------------------------------------------------------------------

    @property
    def recycling(self) -> Recycling | None:
        """Whose turn it is to be exchanged for a fresh one; None: never anybody's."""
        return self._lifecycle.recycling

    def recycle(self, actor: M) -> None:
        """Ask an actor that works to close its envs and leave; `Ready` tells of the fresh one.

        Nothing may be in flight to it. If it does not leave within `timeouts.close` it is killed.
        No restart is counted, and its end is no event.
        """
        self._lifecycle.recycle(actor)

    def kill(self, actor: M, cause: FaultCause = FaultCause.CRASH, reason: str = "") -> None:
        """Kill an actor's process tree; `poll` reports its end, with `cause` and `reason`."""
        self._connections.kill(actor, cause, reason)

    def kill_late(self, lost: Lost[M], cause: FaultCause = FaultCause.TIMEOUT) -> None:
        """Kill an actor that passed the deadline of a request, if that life of it still runs.

        Args:
            lost: The request.
            cause: What it failed of, if that was no deadline.
        """
        if lost.actor.incarnation == lost.incarnation:
            self._connections.kill(lost.actor, cause, lost.failed.message)

    @uninterrupted_call
    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask all actors to close their envs and leave; kill those that do not. Idempotent.

        Called again after Ctrl-C it kills who is left.

        Args:
            timeout: Seconds that they have; None: `timeouts.close`.
            terminate: Do not ask, kill.
        """
        if self._finished:
            return
        terminate = terminate or self._closed  # a call before was broken off
        self._closed = True
        allowed = 0.0
        if not terminate:
            allowed = self.config.timeouts.close if timeout is None else max(timeout, 0.0)
        try:
            hears = self._polled_by is None  # not so in a signal's handler, or another thread
            self._connections.close(allowed, terminate=terminate, hears=hears)
        finally:  # also after Ctrl-C
            self._let_go()
        self._finished = True

    @without_interrupts()
    def abandon(self) -> None:
        """Kill all actors; what finalizers call. Not broken off by Ctrl-C."""
        self.close(terminate=True)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed

    def disown(self) -> None:
        """In a forked copy: be closed. Sockets and actors are the owner's, which goes on."""
        self._closed = self._finished = True

    # --- what came ---------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(
                "these actors were stopped, or belong to the process that this one was forked "
                "from; make new ones here"
            )
        if self._polled_by is not None and self._polled_by != threading.get_ident():
            raise AlreadyPendingCallError(
                "another thread uses these actors at this moment: one thread uses them, or a lock",
                "poll",
            )

    def _take_outcomes(self, timeout: float) -> bool:
        """Take what the broker has; return whether it had anything."""
        outcomes = self._connections.broker.poll(timeout)
        for outcome in outcomes:
            if type(outcome) is Complete:
                self._settle(self._requests.on_reply(outcome))
            elif type(outcome) is FailLocal:
                self._on_failure(outcome)
            elif type(outcome) is Notify:
                self._on_notice(outcome)
        if self._late:
            self._tell_late({it.peer: it.reason for it in outcomes if type(it) is PeerLeft})
        for outcome in outcomes:  # last: what a peer held ends in its life, not in the next one
            if type(outcome) is PeerLeft:
                self._on_left(outcome)
            elif type(outcome) is PeerReady:
                with contextlib.suppress(NoPeerError):  # it said hello and died
                    self._on_hello(outcome)
        return bool(outcomes)

    def _settle(self, end: Replied[M] | Lost[M] | None) -> None:
        """Tell how a request ended, or have what brings an actor up go on."""
        if end is None:
            return
        if type(end.tag) is not Stage:
            self._events.append(end)
        elif isinstance(end, Lost):
            if self._is_up:
                logger.error("%s did not come up: %s", end.actor.describe(), end.failed.message)
                self._connections.kill(end.actor)
            else:
                self._events.append(end)
        else:
            with contextlib.suppress(NoPeerError):  # it answered and died
                if self._on_stage(end):
                    self._lifecycle.on_ready(end.actor)

    def _on_failure(self, outcome: FailLocal) -> None:
        lost = self._requests.on_failure(outcome)
        if lost is not None and lost.failed.code is FailureCode.TIMEOUT:
            self._late.append(lost)
        else:
            self._settle(lost)

    def _tell_late(self, left: Mapping[bytes, str]) -> None:
        late, self._late = self._late, []
        self._next_exit_check = 0.0
        for lost in self._lifecycle.explain(late, left):
            self._settle(lost)

    def _on_left(self, outcome: PeerLeft) -> None:
        actor = self._connections.leave(outcome.peer)
        if actor is not None:
            reason = f"{actor.describe()} left: {outcome.reason}"
            self._lifecycle.on_end(actor, reason, outcome.reason, time.monotonic())

    def _look_after_children(self, now: float) -> None:
        for child, status in self._connections.process_group.exits():
            for actor in self.actors:
                if actor.child is child:
                    self._on_exit(actor, status, now)
        self._lifecycle.tick(now)

    def _on_exit(self, actor: M, status: ExitStatus, now: float) -> None:
        self._take_outcomes(0.0)  # what it sent before it ended counts
        reason = why_it_ended(actor, status)
        self._connections.cut(actor, reason)
        self._take_outcomes(0.0)
        self._connections.drop_local_link(actor)
        self._lifecycle.on_exit(actor, reason, status, now)


def raise_if_failed(event: WorkerEvent[M]) -> None:
    """Raise for what keeps a process from its first start."""
    if isinstance(event, Gone):
        raise StartError(f"while starting, {event.reason}")
    # What a process held when it ended is told before its end, which says more.
    if isinstance(event, Lost) and event.failed.code is not FailureCode.PEER_LOST:
        raise failure_to_error(event.failed, 0)
