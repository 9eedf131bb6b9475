"""What callers hand to a client's own thread: the one place where their threads meet it.

Leaves out what the thread does with it (`client_loop.py`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec

from envbus.bus.errors import OverloadedError
from envbus.bus.transport import Frames

__all__ = ["Cancelled", "Order", "Orders", "Question", "Telling"]


class Question(msgspec.Struct, eq=False):
    """A request of a caller, encoded, and the future that waits for its end."""

    #: From 1, never used twice by one client.
    request_id: int
    to: str
    payload_type: str
    frames: Frames
    #: Seconds of the monotonic clock, and how many it was given.
    deadline: float
    timeout: float
    idempotent: bool
    future: Future[Any]
    #: Whether its first holder was lost and it was asked again.
    resent: bool = False


class Telling(msgspec.Struct, frozen=True):
    """A notice of a caller, encoded."""

    to: str
    payload_type: str
    frames: Frames


class Cancelled(msgspec.Struct, frozen=True):
    """A caller has cancelled the future of a question."""

    request_id: int


Order: TypeAlias = Question | Telling | Cancelled


class Orders:
    """A queue from any thread to one that waits for a descriptor.

    Args:
        max_pending: Most requests and notices that may be unsettled at one time.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._orders: deque[Order] = deque()
        self._unsettled = 0
        self._woken = False
        self._closing: Exception | None = None
        self._waker, self._bell = socket.socketpair()
        self._bell.setblocking(False)

    # --- any thread --------------------------------------------------------------------------

    @property
    def closing(self) -> Exception | None:
        """Why nothing is taken any more; None: it is."""
        return self._closing

    @property
    def unsettled(self) -> int:
        """Requests and notices that were submitted and not released."""
        with self._lock:
            return self._unsettled

    def submit(self, order: Question | Telling) -> None:
        """Hand over something to be sent.

        Raises:
            OverloadedError: Too much is unsettled. Nothing will be sent.
            Exception: As `close` was told.
        """
        with self._lock:
            if self._closing is not None:
                raise self._closing
            if self._unsettled >= self._max_pending:
                raise OverloadedError(
                    f"{self._unsettled} requests of this client are unsettled, which is the "
                    "limit; wait for some, or raise max_pending",
                    request_id=order.request_id if isinstance(order, Question) else 0,
                    peer=order.to,
                )
            self._unsettled += 1
            self._orders.append(order)
            self._wake()
        if isinstance(order, Question):
            # Without the order: its frames would stay until a garbage collection.
            number = order.request_id
            order.future.add_done_callback(lambda future: self._on_done(number, future))

    def close(self, reason: Exception) -> None:
        """Take nothing any more, and let the thread know. Idempotent."""
        with self._lock:
            self._closing = self._closing or reason
            self._wake()

    def _on_done(self, request_id: int, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._orders.append(Cancelled(request_id))
                self._wake()

    def _wake(self) -> None:
        """Ring the bell, unless it rings; holding the lock, so that `take` finds it rung."""
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._waker.send(b".")

    # --- the thread --------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` is worth a call."""
        return self._bell.fileno()

    def take(self) -> deque[Order]:
        """Return what was handed over since the last call, in order."""
        with self._lock:
            orders, self._orders = self._orders, deque()
            if self._woken:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(64)
        return orders

    def release(self) -> None:
        """One that was submitted is settled."""
        with self._lock:
            self._unsettled -= 1

    def end(self, reason: Exception) -> tuple[Exception, deque[Order]]:
        """Take nothing any more; return why, `reason` unless `close` was told, and what is left."""
        with self._lock:
            self._closing = error = self._closing or reason
            orders, self._orders = self._orders, deque()
        self._waker.close()
        self._bell.close()
        return error, orders
