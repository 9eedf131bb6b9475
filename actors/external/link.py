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
from typing import Any, Final

from envbus.actors.external.conversation import GRACE, Call, Conversation, Outcome
from envbus.actors.external.verbs import REPLY_TYPES
from envbus.bus.errors import (
    ClosedError,
    EnvbusError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.interrupts import uninterrupted
from envbus.bus.messages import Payload
from envbus.bus.near_peer import NearPeer
from envbus.bus.serve import Heartbeats
from envbus.bus.transport import AT_ONE_GO
from envbus.bus.unix_sockets import Bell

__all__ = ["PROGRESS_AFTER", "Link", "told_if_slow"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds of silence until something that takes its time says so.
PROGRESS_AFTER: Final = 2.0
#: Longest wait of who leads, in seconds, between looks at the connection.
_SLICE = 0.5


@contextlib.contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Log, once, that the context takes longer than `PROGRESS_AFTER`."""
    text = "%s, for %g s until now: the bridge does not take what is to be sent"
    timer = threading.Timer(PROGRESS_AFTER, logger.warning, (text, what, PROGRESS_AFTER))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Waiter:
    """A caller and what it waits for."""

    __slots__ = ("bell", "call", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.call: Call | None = None
        #: Locked while it waits for another thread; None: it never did.
        self.bell: threading.Lock | None = None

    def settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        if self.bell is not None:
            with contextlib.suppress(RuntimeError):  # it is awake, maybe by another thread just now
                self.bell.release()


class Link:
    """The socket, and who leads."""

    def __init__(
        self,
        address: str,
        transport: NearPeer,
        conversation: Conversation,
        heartbeats: Heartbeats,
    ) -> None:
        self._address = address
        self._transport = transport
        self._conversation = conversation
        self._heartbeats = heartbeats
        self._owner = os.getpid()
        #: Guards what follows. Transport and conversation belong to who leads.
        self._mutex = threading.Lock()
        #: Who leads. Handed over by one assignment, so that Ctrl-C cannot come in between.
        self._leader: _Waiter | None = None
        self._orders: deque[tuple[_Waiter, Call]] = deque()
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        #: Whether somebody closes, or has closed, the socket.
        self._ended = False
        self._unknown = False
        self._bell = Bell()
        transport.watch(self._bell.fileno())

    def connect(self, timeout: float) -> None:
        """Join the bridge; raises `RequestTimeoutError`, or why it refuses."""
        talk, nobody = self._conversation, _Waiter()
        self._leader = nobody
        try:
            self._heartbeats.start()
            begun = time.monotonic()
            deadline, told = begun + timeout, False
            while not talk.ready:
                if talk.refused is not None:
                    raise talk.refused
                now = time.monotonic()
                if now >= deadline:
                    why = self._transport.trouble() or talk.state()
                    raise RequestTimeoutError(
                        f"no bridge was joined at {self._address} within {timeout:g} s; {why}",
                        request_id=0,
                        peer="bridge",
                    )
                if not told and now - begun >= PROGRESS_AFTER:
                    told = True
                    logger.warning(
                        "no bridge was joined at %s for %g s, and is waited for until %g s are "
                        "over; %s",
                        self._address,
                        PROGRESS_AFTER,
                        timeout,
                        self._transport.trouble() or talk.state(),
                    )
                self._turn(min(deadline - now, _SLICE / 5), nobody)
        finally:
            self._leader = None

    def request(self, payload: Payload, frames: Any, timeout: float) -> tuple[Outcome, int]:
        """Return how a request has ended, and its id."""
        now = time.monotonic()
        waiter = _Waiter()
        call = waiter.call = Call(
            payload, frames, REPLY_TYPES[type(payload)], now, now + timeout, waiter.settle
        )
        try:
            try:
                self._wait_for(waiter, call, timeout, now)
            finally:
                self._hand_over(waiter)
        except BaseException:  # Ctrl-C, which may have come while the lead was handed over
            self._hand_over(waiter)
            raise
        assert waiter.outcome is not None
        return waiter.outcome, call.request_id

    def _wait_for(self, waiter: _Waiter, call: Call, timeout: float, now: float) -> None:
        """Lead, or wait until who leads has the answer, or leaves the lead to this one."""
        with self._mutex:
            if self._closed:
                raise ClosedError("this client was closed")
            if self._owner != os.getpid():
                raise ClosedError(
                    f"this client belongs to process {self._owner}; make a new one here"
                )
            if self._leader is None:
                self._leader = waiter
            else:
                waiter.bell = threading.Lock()
                waiter.bell.acquire()
                self._orders.append((waiter, call))
                self._waiters[waiter] = None
                self._bell.ring()
        # Whoever leads judges the deadline; beyond it only a bug keeps one waiting.
        if waiter.bell is not None and not waiter.bell.acquire(timeout=timeout + 10 * GRACE):
            raise AssertionError("nobody leads")
        if self._leader is waiter:
            self._lead(waiter, call, now)

    def on_unknown(self) -> None:
        """The broker does not know this client any more; called in the heartbeats' thread."""
        self._unknown = True
        with self._mutex:
            self._bell.ring()

    def close(self) -> None:
        """Wake everybody up, and close when nobody leads any more. Idempotent."""
        if self._owner != os.getpid():
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

    def _lead(self, waiter: _Waiter, call: Call, now: float) -> None:
        """Send and receive for all, until this one's answer is there."""
        try:
            if waiter.bell is None:  # else it was submitted by who led before
                self._conversation.submit(call, now)
            self._flush()
            while waiter.outcome is None:
                self._turn(_SLICE, waiter)
        except BaseException:  # Ctrl-C: nobody waits for that answer any more
            self._conversation.abandon(call)
            self._conversation.send_again(time.monotonic())  # others' answers may be lost by it
            raise

    def _hand_over(self, waiter: _Waiter) -> None:
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

    def _turn(self, timeout: float, waiter: _Waiter) -> None:
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
            self._take_orders(now)
        if self._unknown:
            self._unknown = False
            talk.forgotten()
        if silent or not patience or not talk.ready:
            lost_for = transport.lost_for()
            talk.tick(now, lost_for, transport.trouble())
        self._flush()

    def _receive(self, waiter: _Waiter, now: float) -> None:
        """Take messages that are there, up to this one's answer."""
        for _ in range(AT_ONE_GO):
            if waiter.outcome is not None or (frames := self._transport.receive(0.0)) is None:
                return
            try:
                self._conversation.received(frames, now)
            except ProtocolError as exc:
                logger.warning("%s sent what cannot be read: %s", self._address, exc)
            del frames

    def _take_orders(self, now: float) -> None:
        with self._mutex:
            self._bell.silence()
            closed = self._closed
        while self._orders:  # who submits leaves them there until it is done, for Ctrl-C
            call = self._orders[0][1]
            if not call.request_id:
                self._conversation.submit(call, now)
            self._orders.popleft()
        if closed:
            self._conversation.end(ClosedError("this client was closed"))

    def _flush(self) -> None:
        outgoing = self._conversation.outgoing
        while outgoing:
            try:
                self._transport.send(outgoing[0])
            except QueueFullError:
                return  # tried again with the next turn; each request has its time
            del outgoing[0]

    def _end(self) -> None:
        """Say goodbye, and close the socket; nobody leads, and nobody will."""
        self._conversation.end(ClosedError("this client was closed"))
        with contextlib.suppress(EnvbusError):  # without a connection nobody waits for it
            self._flush()
        self._transport.close()
        self._bell.close()
