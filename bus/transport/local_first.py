"""A peer that takes the shortest way to its broker: a local link on one host, else ZeroMQ.

Leaves out where local links are (`local_listener.py`) and what is said.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from typing import Any, Final

from envbus.bus.descriptors import opening
from envbus.bus.errors import ClosedError, DecodeError, QueueFullError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.curve_keys import PeerKeys
from envbus.bus.transport.interface import A_MOMENT
from envbus.bus.transport.local_listener import ADDRESSES_EXIST, INTRODUCTION, StreamEnd, address_of
from envbus.bus.transport.spinning import CHILD_SPIN_SECONDS, SpinBudget
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.frames import Buffer, Frames
from envbus.bus.wire.framing import pack_for_stream

__all__ = ["LocalFirstPeer"]

#: Seconds between two looks for a local link while the broker has not said a word over ZeroMQ.
_LOOK_INTERVAL: Final = 0.05
#: Seconds for which no local link is looked for, after one that did not lead to the broker.
_BAR_SECONDS: Final = 5.0


class LocalFirstPeer:
    """A `PeerTransport` with the same identity on both ways.

    Both are kept: over a DEALER socket the broker is seen to come and go, and answers when there
    is no local link. A change of ways is told by `lost_for` as the loss of a connection, once: what
    was under way may be lost.

    Args:
        endpoint: What the broker is bound to.
        identity: Routing id of this life of the peer; must be fresh for each life.
        keys: This peer's, and the broker's public one; with keys there is no local link.
        local_links: False: ZeroMQ only.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        *,
        keys: PeerKeys | None = None,
        local_links: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._far = ZmqPeer(endpoint, identity, keys=keys)
        self._local: StreamEnd | None = None
        self._received: list[Buffer] | None = None
        #: Whether a message has come by this local link.
        self._local_heard = False
        #: When to look for a local link again, and at the earliest.
        self._look_at = 0.0
        self._barred_until = 0.0 if local_links and keys is None and ADDRESSES_EXIST else math.inf
        #: Whether a word has come over ZeroMQ: then that is the way.
        self._far_heard = False
        self._has_changed = False
        #: Since when the local link is lost that ZeroMQ was not connected beside; None: there is
        #: none.
        self._lost_since: float | None = None
        self._armed = False
        self._spinning = SpinBudget(0.0)
        #: None: this system has none, and no local links.
        with opening("no descriptor to wait for can be made"):
            self._poller: Any = select.epoll() if hasattr(select, "epoll") else None
        if self._poller is not None:
            self._poller.register(self._far.fileno(), select.EPOLLIN)
        self._look_for_local_link()
        self._has_changed = False  # nobody has said anything yet

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""
        return self._far.identity

    @property
    def is_local(self) -> bool:
        """Whether there is a local link now."""
        return self._local is not None

    def send(self, frames: Frames) -> None:
        """Send to the broker, or queue for it; never blocks.

        Raises:
            QueueFullError: There is no room now, or the connection was lost this moment.
            ClosedError: This peer was closed.
        """
        local = self._local
        if local is None:
            self._far.send(frames)
            return
        try:
            written = local.write(pack_for_stream(frames))
        except ClosedError as exc:
            self._lose_local_link()
            raise QueueFullError(f"the connection was lost: {exc}") from exc
        if (not written or local.has_begun) and not self._armed:
            self._arm(local, True)
        if not written:
            raise QueueFullError("the connection to the broker is full: it does not read")

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message, or None after `timeout` seconds, or when the way changes."""
        if timeout > 0.0 and self._received is None and not self.wait(timeout):
            return None
        if self._armed and self._local is not None:
            self._take_room(self._local)
        if self._local is None:
            frames = self._far.receive(0.0)
            if frames is not None and not self._far_heard:
                self._far_heard = True
                self._look_for_local_link()  # once more: it was bound, and may listen only now
            return frames
        if self._received is not None:
            frames, self._received = self._received, None
            return frames
        return self._read()

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds.

        Ends at once, in vain, if the connection was lost: ask `lost_for`.
        """
        if self._has_changed:
            return False
        local = self._local
        if local is None or self._poller is None:
            return self._far.wait(timeout)
        if self._received is not None or local.has_more:
            return True
        start = time.perf_counter()
        if spin := self._spinning.seconds():
            give_up = start + min(spin, timeout)
            while time.perf_counter() < give_up:
                self._received = self._read()
                if self._received is not None or self._local is None:
                    break
                os.sched_yield()
        found = self._received is not None
        slept = not found
        if not found and self._local is not None:
            for fd, events in self._poller.poll(timeout):
                found = True
                if fd == local.fileno() and events & select.EPOLLOUT:
                    self._finish(local)
        self._spinning.observe(time.perf_counter() - start, slept=slept)
        return found

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""
        self._far.watch(fd)
        if self._poller is not None:
            self._poller.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `receive(0.0)` is worth a call."""
        return self._far.fileno() if self._poller is None else self._poller.fileno()

    def lost_for(self) -> float:
        """Return for how many seconds the broker has been out of reach; 0.0 if it is not."""
        lost_for = self._far.lost_for()
        if lost_for > 0.0:
            self._far_heard = False
        if self._local is None and not self._far_heard and time.monotonic() >= self._look_at:
            self._look_for_local_link()
        if self._lost_since is not None:
            if self._local is not None or self._far.is_connected:
                self._lost_since = None
            else:
                lost_for = max(lost_for, time.monotonic() - self._lost_since)
        if self._has_changed:
            self._has_changed = False
            return max(lost_for, A_MOMENT)
        return 0.0 if self._local is not None else lost_for

    def trouble(self) -> str:
        """Return, for people, why there is no connection; "" if there is one, or none tells."""
        return "" if self._local is not None else self._far.trouble()

    def close(self) -> None:
        """Close both ways, giving unsent messages a bounded time. Idempotent."""
        if self._local is not None:
            self._local.close()
            self._local = None
        self._barred_until = math.inf
        if self._poller is not None:
            self._poller.close()
        self._far.close()

    @uninterrupted_call  # or a socket is left to the garbage collector
    def _look_for_local_link(self) -> None:
        now = time.monotonic()
        if now < self._barred_until:
            return
        self._look_at = now + _LOOK_INTERVAL
        address = address_of(self._endpoint)
        if address is None:
            return
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: ZeroMQ has its own
            return
        end = StreamEnd(sock)
        try:
            sock.connect(address)
        except OSError:  # nobody listens, or too many come at once
            end.close()
            return
        if not end.is_of_this_user():
            end.close()
            self._barred_until = now + _BAR_SECONDS
            return
        with contextlib.suppress(ClosedError):  # found out by `receive`
            end.write(pack_for_stream([INTRODUCTION, self.identity]))
        self._take_local_link(end)

    def _take_local_link(self, end: StreamEnd) -> None:
        # Its descriptor stays readable until somebody looks at the socket, which nobody does now.
        self._poller.unregister(self._far.fileno())
        self._poller.register(end.fileno(), select.EPOLLIN)
        self._local, self._local_heard, self._armed, self._has_changed = end, False, False, True
        spin = usable_cores() > 1 and not end.is_of_this_process()
        self._spinning = SpinBudget(CHILD_SPIN_SECONDS if spin else 0.0)

    @uninterrupted_call
    def _lose_local_link(self) -> None:
        local, self._local = self._local, None
        assert local is not None
        local.close()
        self._poller.register(self._far.fileno(), select.EPOLLIN)
        self._has_changed, self._far_heard, self._lost_since = True, False, time.monotonic()
        if not self._local_heard:
            self._barred_until = time.monotonic() + _BAR_SECONDS

    def _read(self) -> list[Buffer] | None:
        assert self._local is not None
        try:
            frames = self._local.receive()
        except (ClosedError, DecodeError):
            self._lose_local_link()
            return None
        if frames is not None:
            self._local_heard = True
        return frames

    def _take_room(self, local: StreamEnd) -> None:
        """Finish what was begun if there is room by now."""
        if any(fd == local.fileno() and on & select.EPOLLOUT for fd, on in self._poller.poll(0)):
            self._finish(local)

    def _finish(self, local: StreamEnd) -> None:
        try:
            if local.finish():
                self._arm(local, False)
        except ClosedError:
            self._lose_local_link()

    def _arm(self, local: StreamEnd, armed: bool) -> None:
        """Have `wait` return when there is room, or not any more."""
        self._armed = armed
        self._poller.modify(local.fileno(), select.EPOLLIN | (select.EPOLLOUT if armed else 0))
