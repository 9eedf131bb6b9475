"""A client's connection to a bridge, shared by its threads.

Leaves out the protocol (`conversation.py`) and what the verbs mean (`verbs.py`).

There is no thread between a caller and the socket: of the callers that wait, one *leads*, which
means that it sends and receives for all. When it has its answer another one takes over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from envbus.actors.external.conversation import GRACE, BridgeCall, Conversation, Outcome
from envbus.bus.complaints import PROGRESS_AFTER
from envbus.bus.errors import (
    ClosedError,
    EnvbusError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.interrupts import uninterrupted
from envbus.bus.peer.worker import Heartbeats
from envbus.bus.transport.interface import AT_ONE_GO
from envbus.bus.transport.local_first import LocalFirstPeer
from envbus.bus.transport.unix_sockets import Bell
from envbus.bus.wire.messages import Request

__all__ = ["SLICE", "Link", "Waiter", "flush", "not_joined", "told_if_slow", "warn_not_joined"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds between looks at the clock and the connection, at most.
SLICE = 0.5
#: Seconds between looks at the connection while messages keep coming: one may have been lost with
#: the connection before, and the bridge remembers the last thousand answers.
_LOOK_INTERVAL = 0.05


@contextlib.contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Log, once, that the context takes longer than `PROGRESS_AFTER`."""
    text = "%s, for %g s until now: the bridge does not take what is to be sent"
    timer = threading.Timer(PROGRESS_AFTER, logger.warning, (text, what, PROGRESS_AFTER))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started, at a program's end e.g.
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def not_joined(
    timeout: float, address: str, transport: LocalFirstPeer, talk: Conversation
) -> RequestTimeoutError:
    """Return what is raised if no bridge was joined in time."""
    why = transport.trouble() or talk.state()
    text = f"no bridge was joined at {address} within {timeout:g} s; {why}"
    return RequestTimeoutError(text, request_id=0, peer="bridge")


def warn_not_joined(
    timeout: float, address: str, transport: LocalFirstPeer, talk: Conversation
) -> None:
    """Log that no bridge was joined for `PROGRESS_AFTER`."""
    text = "no bridge was joined at %s for %g s, and is waited for until %g s are over; %s"
    why = transport.trouble() or talk.state()
    logger.warning(text, address, PROGRESS_AFTER, timeout, why)


def flush(transport: LocalFirstPeer, talk: Conversation) -> None:
    """Send what is to be sent, as far as there is room for it."""
    outgoing = talk.outgoing
    while outgoing:
        try:
            transport.send(outgoing[0])
        except QueueFullError:
            return  # tried again with the next turn; each request has its time
        del outgoing[0]


class Waiter:
    """A caller and what it waits for."""

    __slots__ = ("bell", "call", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.call: BridgeCall | None = None
        #: Locked while it waits for another thread; None: it never did.
        self.bell: threading.Lock | None = None

    def settle(self, outcome: Outcome) -> None:
        """Its request has ended."""
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        """Have it look at its outcome, or lead. May be called twice."""
        if self.bell is not None:
            with contextlib.suppress(RuntimeError):  # it is awake, maybe by another thread just now
                self.bell.release()


class Link:
    """The socket, and who leads."""

    def __init__(
        self,
        address: str,
        transport: LocalFirstPeer,
        conversation: Conversation,
        heartbeats: Heartbeats,
    ) -> None:
        self._address = address
        self._transport = transport
        self._conversation = conversation
        self._heartbeats = heartbeats
        self._owner = os.getpid()
        #: Guards what follows. Transport and conversation belong to who leads. Taken twice where a
        #: garbage collection, which may come anywhere, closes the client.
        self._mutex = threading.RLock()
        #: Who leads. Handed over by one assignment, so that Ctrl-C cannot come in between.
        self._leader: Waiter | None = None
        self._commands: deque[tuple[Waiter, BridgeCall]] = deque()
        #: What Ctrl-C broke off in threads that did not lead: who leads is to send no more of it.
        self._broken_off: deque[BridgeCall] = deque()
        self._waiters: dict[Waiter, None] = {}
        self._closed = False
        #: Whether somebody closes, or has closed, the socket.
        self._ended = False
        self._unknown = False
        self._bell = Bell()
        #: When to look at the connection, also while messages keep coming.
        self._look_at = 0.0
        transport.watch(self._bell.fileno())

    def connect(self, timeout: float) -> None:
        """Join the bridge; raises `RequestTimeoutError`, or why it refuses."""
        talk, nobody = self._conversation, Waiter()  # who does not lead: no other knows of this yet
        self._heartbeats.start()
        begun = time.monotonic()
        deadline, told = begun + timeout, False
        while not talk.ready:
            if talk.refused is not None:
                raise talk.refused
            now = time.monotonic()
            if now >= deadline:
                raise not_joined(timeout, self._address, self._transport, talk)
            if not told and now - begun >= PROGRESS_AFTER:
                told = True
                warn_not_joined(timeout, self._address, self._transport, talk)
            self._turn(min(deadline - now, SLICE / 5), nobody)

    def request(
        self, payload: Request[Any], frames: Any, timeout: float, waiter: Waiter | None = None
    ) -> tuple[Outcome, int]:
        """Return how a request has ended, and its id; `waiter` is a new one."""
        now = time.monotonic()
        waiter = waiter or Waiter()
        call = waiter.call = BridgeCall(
            payload, frames, payload.reply_type, now, now + timeout, waiter.settle
        )
        try:
            try:
                self._wait_for(waiter, call, timeout, now)
            finally:
                self._hand_over(waiter)
        except BaseException:  # Ctrl-C, which may have come while the lead was handed over
            self._hand_over(waiter)
            # Not where it was refused: nobody may come to take it away, and the bell of a forked
            # copy rings at its owner's, who would not silence it.
            is_under_way = waiter.bell is not None or call.request_id
            self._conversation.number(call)  # one that was not sent can be told of, too
            if is_under_way:
                with self._mutex:
                    self._broken_off.append(call)
                    self._bell.ring()
            raise
        finally:
            # They would keep each other, and what was sent, until the next garbage collection.
            call.settle = _tell_nobody
        assert waiter.outcome is not None
        return waiter.outcome, call.request_id

    def _wait_for(self, waiter: Waiter, call: BridgeCall, timeout: float, now: float) -> None:
        """Lead, or wait until who leads has the answer, or leaves the lead to this one."""
        self.check_owner()
        with self._mutex:
            if self._closed:
                raise ClosedError("this client was closed")
            if self._leader is None:
                self._leader = waiter
            else:
                # Who leads sends it, maybe after Ctrl-C here, when its arrays are used again.
                call.frames = [bytes(frame) for frame in call.frames]
                waiter.bell = threading.Lock()
                waiter.bell.acquire()
                self._commands.append((waiter, call))
                self._waiters[waiter] = None
                self._bell.ring()
        # Whoever leads judges the deadline; beyond it only a bug keeps one waiting. Where the
        # process was stopped beyond it, as by Ctrl-Z, who leads is to look at the clock first.
        if waiter.bell is not None and not any(
            waiter.bell.acquire(timeout=left) for left in (timeout + 10 * GRACE, 10 * GRACE)
        ):
            raise AssertionError("nobody leads")
        if self._leader is waiter:
            self._lead(waiter, call, now)

    @property
    def is_here(self) -> bool:
        """Whether this process made it. In a forked copy, locks may be held for ever."""
        return self._owner == os.getpid()

    def check_owner(self) -> None:
        """Raise ClosedError in a forked copy."""
        if not self.is_here:
            raise ClosedError(f"this client belongs to process {self._owner}; make a new one here")

    def on_unknown(self) -> None:
        """The broker does not know this client any more; called in the heartbeats' thread."""
        self._unknown = True
        with self._mutex:
            self._bell.ring()

    def close(self) -> None:
        """Wake everybody up, and close when nobody leads any more. Idempotent."""
        if not self.is_here:
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._bell.ring()
            alone = self._ended = self._leader is None
        with told_if_slow(f"the client of {self._address} is being closed"):
            self._heartbeats.stop()  # a sign of life after the goodbye would be a stranger's
            if alone:
                self._end()

    def _lead(self, waiter: Waiter, call: BridgeCall, now: float) -> None:
        """Send and receive for all, until this one's answer is there."""
        try:
            if self._broken_off:
                self._take_commands(now)  # first: sent again behind this one, they would be news
            if waiter.bell is None:  # else it was submitted by who led before
                self._conversation.submit(call, now)
            flush(self._transport, self._conversation)
            while waiter.outcome is None:
                self._turn(SLICE, waiter)
        except BaseException:  # Ctrl-C: nobody waits for that answer any more
            self._conversation.abandon(call)
            self._conversation.send_again(time.monotonic())  # others' answers may be lost by it
            raise

    def _hand_over(self, waiter: Waiter) -> None:
        """Leave the lead, if it is this one's, to the next that waits. May be done twice."""
        with self._mutex:
            self._waiters.pop(waiter, None)
            if self._leader is waiter:
                self._leader = next((one for one in self._waiters if one.outcome is None), None)
            if self._leader is not None:
                self._leader.wake()  # maybe once more, in vain
                return
            ending = self._closed and not self._ended
            self._ended = self._closed
        if ending:
            self._end()

    def _turn(self, timeout: float, waiter: Waiter) -> None:
        """Wait for a message, a bell or the time, and do what follows.

        What comes behind this one's answer is left to who leads next.
        """
        transport, talk = self._transport, self._conversation
        now = time.monotonic()
        patience = min(timeout, max(talk.wake_at() - now, 0.0))
        silent = not transport.wait(patience)
        now = time.monotonic()
        with uninterrupted():  # what a handler raises while ZeroMQ frees a frame is swallowed
            self._receive(waiter, now)
        if self._bell.rung:
            self._take_commands(now)
        if self._unknown:
            self._unknown = False
            talk.forgotten()
        if silent or not patience or not talk.ready or now >= self._look_at:
            self._look_at = now + _LOOK_INTERVAL
            lost_for = transport.lost_for()
            talk.tick(now, lost_for, transport.trouble())
        flush(transport, talk)

    def _receive(self, waiter: Waiter, now: float) -> None:
        """Take messages that are there, up to this one's answer."""
        for _ in range(AT_ONE_GO):
            if waiter.outcome is not None or (frames := self._transport.receive(0.0)) is None:
                return
            try:
                self._conversation.received(frames, now)
            except ProtocolError as exc:
                logger.warning("%s sent what cannot be read: %s", self._address, exc)
            del frames

    def _take_commands(self, now: float) -> None:
        with self._mutex:
            self._bell.silence()
            closed = self._closed
        while self._broken_off:
            self._conversation.abandon(self._broken_off[0])
            self._broken_off.popleft()
        while self._commands:  # who submits leaves them there until it is done, for Ctrl-C
            call = self._commands[0][1]
            if not call.request_id:
                self._conversation.submit(call, now)
            self._commands.popleft()
        if closed:
            self._conversation.end(ClosedError("this client was closed"))

    def _end(self) -> None:
        """Say goodbye, and close the socket; nobody leads, and nobody will."""
        self._conversation.end(ClosedError("this client was closed"))
        with contextlib.suppress(EnvbusError):  # without a connection nobody waits for it
            flush(self._transport, self._conversation)
        self._transport.close()
        self._bell.close()


def _tell_nobody(outcome: Outcome) -> None:
    del outcome
