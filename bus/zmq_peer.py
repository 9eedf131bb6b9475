"""A peer's DEALER socket behind the interface of `transport.py`.

Leaves out what frames mean, and what all sockets have in common (`zmq_sockets.py`). It has a
ZeroMQ context of its own, is used by one thread, and must be created in the process that uses it:
it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from envbus.bus.authentication import MONITOR_QUEUE, handshake_trouble, introduce
from envbus.bus.errors import ClosedError, QueueFullError, TransportError
from envbus.bus.keys import PeerKeys
from envbus.bus.transport import Buffer, Frames, is_local
from envbus.bus.zmq_sockets import (
    LINGER_MS,
    POLLIN,
    check_ipc_path,
    receive_frames,
    send_frames,
    set_limits,
)

__all__ = ["ZmqPeer"]

#: Milliseconds between libzmq's own signs of life on a TCP connection, and until the lack of them
#: closes it.
KEEPALIVE_MS = 10_000
#: Longest pause between two tries to connect, in milliseconds; libzmq's first one is 100.
RECONNECT_MAX_MS = 1000
#: Seconds until a peer that was turned away for good by libzmq knocks again: the broker may allow
#: its key by then.
_KNOCK_INTERVAL = 1.0
#: What tells a peer about its connection.
_NEWS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
#: After these libzmq does not try again by itself.
_TURNED_AWAY = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ZmqPeer:
    """A peer's DEALER socket, connected to one broker.

    Args:
        endpoint: What the broker is bound to.
        identity: Routing id of this life of the peer; must be fresh for each life.
        max_frame_bytes: A broker that sends a larger frame is disconnected by libzmq.
        keys: This peer's, and the broker's public one; None for a broker without keys.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        *,
        max_frame_bytes: int = 1 << 30,
        keys: PeerKeys | None = None,
    ) -> None:
        is_local(endpoint)  # raises for one that is malformed
        check_ipc_path(endpoint)
        self._endpoint = endpoint
        self._identity = identity
        self._keys = keys
        self._trouble = ""
        self._knock_at = math.inf
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.RCVHWM, MONITOR_QUEUE)
        self._socket = self._context.socket(zmq.DEALER)
        self._timeout_ms = -1
        self._closed = False
        self._lost_since: float | None = None
        self._is_connected = False
        self._watched: list[tuple[Any, int]] = [(self._socket, POLLIN)]
        set_limits(self._socket, max_frame_bytes)
        if endpoint.startswith("tcp:"):  # a cable can be pulled; a process of this host cannot
            for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT):
                self._socket.setsockopt(option, KEEPALIVE_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            introduce(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(_NEWS)
        try:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        except zmq.ZMQError as exc:
            self.close()
            raise TransportError(f"{identity!r} is no identity for ZeroMQ: {exc}") from exc
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise TransportError(f"cannot connect to {endpoint}: {exc}") from exc

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""
        return self._identity

    def send(self, frames: Frames) -> None:
        """Queue `frames` for the broker; never blocks. Large buffers are not copied.

        What a connection that is turned away has taken is lost with it, and so is what comes until
        this peer knocks again: `trouble` tells.
        """
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            self._send_again(frames)
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message, or None after `timeout` seconds."""
        timeout_ms = math.ceil(timeout * 1000)
        try:
            if timeout_ms != self._timeout_ms:  # a call into libzmq: only when it changes
                self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._timeout_ms = timeout_ms
            return receive_frames(self._socket, 0)
        except zmq.Again:
            if timeout_ms:
                self._take_news()
            return None
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""
        try:
            return bool(zmq.zmq_poll(self._watched, math.ceil(timeout * 1000)))
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""
        self._watched.append((fd, POLLIN))

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `receive(0.0)` is worth a call."""
        return int(self._socket.getsockopt(zmq.FD))

    def lost_for(self) -> float:
        """Return for how many seconds the broker has been out of reach; 0.0 if it is not.

        A closed connection shows at once, one that was cut without a word after `KEEPALIVE_MS`.
        """
        self._take_news()
        return 0.0 if self._lost_since is None else time.monotonic() - self._lost_since

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as `lost_for` has last seen it."""
        return self._is_connected

    def trouble(self) -> str:
        """Return, for people, why there is no connection; "" if there is one, or none tells.

        As `receive` (after a wait in vain) and `lost_for` have last seen it.
        """
        return self._trouble

    def close(self) -> None:
        """Close the socket, giving unsent messages a bounded time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        self._context.term()

    def _send_again(self, frames: Frames) -> None:
        """Find out what hindered: libzmq says the same of a full queue and of none."""
        self._take_news()  # knocks, should it be time to: then there is a new queue
        if self._knock_at < math.inf:
            return  # lost: the queue went with the connection
        try:
            send_frames(self._socket, frames)
        except zmq.Again as exc:
            raise QueueFullError("the queue to the broker is full: it does not read") from exc

    def _take_news(self) -> None:
        """Take what the monitor has said; knock again where libzmq would not."""
        while self._monitor.poll(0):
            news = recv_monitor_message(self._monitor)
            event = news["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_since, self._trouble, self._is_connected = None, "", True
                continue
            now = time.monotonic()
            self._is_connected = False
            self._lost_since = self._lost_since or now
            if event != zmq.EVENT_DISCONNECTED:
                self._trouble = handshake_trouble(event, news["value"], self._keys)
            if event & _TURNED_AWAY:
                self._knock_at = now + _KNOCK_INTERVAL
        if time.monotonic() >= self._knock_at:
            self._knock_at = math.inf
            with contextlib.suppress(zmq.ZMQError):  # else libzmq takes it for connected
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def _translate(self, exc: zmq.ZMQError) -> TransportError:
        if self._closed or exc.errno in (zmq.ENOTSOCK, zmq.ETERM):
            return ClosedError("this peer's socket is closed")
        return TransportError(f"this peer's socket failed: {exc}")
