"""A client's connection to a bridge, shared by its threads.

Leaves out the protocol (`conversation.py`) and what the verbs mean (`verbs.py`).

There is no thread between a caller and the socket: of the callers that wait, one *leads*, which
means that it sends and receives for all. When it has its answer another one takes over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import Any

from envbus.actors.external.conversation import GRACE, Call, Conversation, Outcome
from envbus.actors.external.verbs import REPLY_TYPES
from envbus.bus.errors import (
    ClosedError,
    EnvbusError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.messages import Payload
from envbus.bus.near_peer import NearPeer
from envbus.bus.serve import Heartbeats

__all__ = ["Link"]

logger = logging.getLogger("envbus.actors.external")

#: Longest wait of who leads, in seconds, between looks at the connection.
_SLICE = 0.5


class _Waiter:
    """A caller and what it waits for."""

    __slots__ = ("bell", "call", "leads", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.call: Call | None = None
        #: Whether it has to lead now.
        self.leads = False
        #: Locked while it waits for another thread; None: it never did.
        self.bell: threading.Lock | None = None

    def settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        if self.bell is not None and self.bell.locked():
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
        self._led = False
        self._orders: deque[tuple[_Waiter, Call]] = deque()
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        self._rung = False
        self._unknown = False
        self._waker, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        transport.watch(self._ear.fileno())

    def connect(self, timeout: float) -> None:
        """Join the bridge; raises `RequestTimeoutError`, or why it refuses."""
        talk, nobody = self._conversation, _Waiter()
        self._led = True
        try:
            self._heartbeats.start()
            deadline = time.monotonic() + timeout
            while not talk.ready:
                if talk.refused is not None:
                    raise talk.refused
                now = time.monotonic()
                if now >= deadline:
                    why = self._transport.trouble() or "is it running, and is the address right?"
                    raise RequestTimeoutError(
                        f"no bridge answered at {self._address} within {timeout:g} s; {why}",
                        request_id=0,
                        peer="bridge",
                    )
                self._turn(min(deadline - now, _SLICE / 5), nobody)
        finally:
            self._led = False

    def request(self, payload: Payload, frames: Any, timeout: float) -> tuple[Outcome, int]:
        """Return how a request has ended, and its id."""
        now = time.monotonic()
        waiter = _Waiter()
        call = waiter.call = Call(
            payload, frames, REPLY_TYPES[type(payload)], now, now + timeout, waiter.settle
        )
        with self._mutex:
            if self._closed:
                raise ClosedError("this client was closed")
            if self._owner != os.getpid():
                raise ClosedError(
                    f"this client belongs to process {self._owner}; make a new one here"
                )
            if self._led:
                waiter.bell = threading.Lock()
                waiter.bell.acquire()
                self._orders.append((waiter, call))
                self._waiters[waiter] = None
                self._ring()
            else:
                self._led = waiter.leads = True
        if waiter.bell is None:
            self._conversation.submit(call, now)
        else:
            self._follow(waiter, waiter.bell, timeout)
        if waiter.leads:
            self._lead(waiter)
        assert waiter.outcome is not None
        return waiter.outcome, call.request_id

    def _follow(self, waiter: _Waiter, bell: threading.Lock, timeout: float) -> None:
        """Wait until who leads has the answer, or leaves the lead to this one."""
        try:
            # Whoever leads judges the deadline; beyond it only a bug keeps one waiting.
            if not bell.acquire(timeout=timeout + 10 * GRACE):
                raise AssertionError("nobody leads")
        except BaseException:  # Ctrl-C
            if waiter.leads:
                self._hand_over(waiter)
            raise
        finally:
            with self._mutex:
                if not waiter.leads:
                    self._waiters.pop(waiter, None)

    def on_unknown(self) -> None:
        """The broker does not know this client any more; called in the heartbeats' thread."""
        self._unknown = True
        with self._mutex:
            self._ring()

    def close(self) -> None:
        """Wake everybody up, and close when nobody leads any more. Idempotent."""
        if self._owner != os.getpid():
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._ring()
            alone = not self._led
        self._heartbeats.stop()  # a sign of life after the goodbye would be a stranger's
        if alone:
            self._end()

    def _ring(self) -> None:
        """Let who leads look at the orders; the mutex is held."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                self._waker.send(b".")

    def _lead(self, waiter: _Waiter) -> None:
        """Send and receive for all, until this one's answer is there; then hand over."""
        try:
            self._flush()
            while waiter.outcome is None:
                self._turn(_SLICE, waiter)
        except BaseException:  # Ctrl-C: nobody waits for that answer any more
            if waiter.call is not None:
                self._conversation.abandon(waiter.call)
            raise
        finally:
            self._hand_over(waiter)

    def _hand_over(self, waiter: _Waiter) -> None:
        with self._mutex:
            self._waiters.pop(waiter, None)
            for other in self._waiters:
                if other.outcome is None:
                    other.leads = True
                    other.wake()
                    return
            self._led = False
            ending = self._closed
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
        while waiter.outcome is None and (frames := transport.receive(0.0)) is not None:
            try:
                talk.received(frames, now)
            except ProtocolError as exc:
                logger.warning("%s sent what cannot be read: %s", self._address, exc)
        if self._rung:
            self._take_orders(now)
        if self._unknown:
            self._unknown = False
            talk.forgotten()
        if silent or not talk.ready:
            lost_for = transport.lost_for()
            talk.tick(now, lost_for, transport.trouble())
        self._flush()

    def _take_orders(self, now: float) -> None:
        with self._mutex:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(64)
            orders, self._orders = self._orders, deque()
            closed = self._closed
        for _, call in orders:
            self._conversation.submit(call, now)
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
        self._waker.close()
        self._ear.close()
