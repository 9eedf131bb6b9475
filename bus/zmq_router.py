"""The broker's ROUTER socket behind the interface of `transport.py`.

Leaves out what frames mean, and what all sockets have in common (`zmq_sockets.py`). It has a
ZeroMQ context of its own, is used by one thread, and must be created in the process that uses it:
it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import zmq

from envbus.bus.authentication import NOBODY, Doorkeeper, guard, unguard
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.interrupts import interruptible
from envbus.bus.keys import BrokerKeys
from envbus.bus.packets import lengths_of
from envbus.bus.transport import Buffer, Frames
from envbus.bus.zmq_sockets import (
    COPY_THRESHOLD,
    HIGH_WATER_MARK,
    LINGER_MS,
    NOBLOCK,
    POLLIN,
    check_bindable,
    receive_frames,
    router_socket,
    send_frames,
    send_tracked,
    set_limits,
)

__all__ = ["ZmqRouter"]

logger = logging.getLogger("envbus.bus.zmq_router")

#: Bytes of large buffers that may wait for one peer; nothing is queued beyond that. Besides them
#: there are at most `HIGH_WATER_MARK` messages of buffers below 64 KiB.
QUEUE_BYTES: Final = 64 * 2**20
# A plain int: see `zmq_sockets.py`.
_EVENTS = int(zmq.EVENTS)


class ZmqRouter:
    """The broker's ROUTER socket, bound to one or more endpoints.

    Args:
        endpoints: What to bind: `"ipc:///path"`, `"tcp://127.0.0.1:*"`; may be mixed.
        private: What to bind besides, for the owner's own processes: without keys, and reachable
            from this host only.
        max_frame_bytes: A peer that sends a larger frame is disconnected by libzmq.
        keys: Take connections to `endpoints` only from who holds a key that is allowed.
        insecure: Allow binding wider than this host without keys.

    Raises:
        ConfigError: An endpoint is malformed, too long, or wider than this host.
        TransportError: An endpoint cannot be bound, e.g. is in use.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        private: Sequence[str] = (),
        max_frame_bytes: int = 1 << 30,
        keys: BrokerKeys | None = None,
        insecure: bool = False,
    ) -> None:
        if not endpoints and not private:
            raise ConfigError("no endpoint to bind; name at least one")
        for endpoint in private:
            check_bindable(endpoint, has_keys=False, insecure=False)
        for endpoint in endpoints:
            check_bindable(endpoint, has_keys=keys is not None, insecure=insecure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = router_socket(self._context)
        self._extra = select.epoll() if hasattr(select, "epoll") else None
        self._extra_fds: set[int] = set()
        #: Paths of Unix sockets that are this one's, and their inodes; libzmq leaves them behind.
        self._files: dict[str, int] = {}
        self._closed = False
        #: Whether the last `wait` saw a message that was not received yet.
        self._has_message = False
        #: Whether messages have been coming one after another: there are probably more.
        self._is_burst = False
        #: Large buffers that were sent, by peer, and who knows whether libzmq has let go of them.
        self._large: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        #: Peers in it, at which those that are gone are forgotten.
        self._sweep_at = 16
        self._doorkeeper: Doorkeeper | None = None
        self._list_watched()
        set_limits(self._socket, max_frame_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The newest connection of an identity counts. By default libzmq ignores it, which shuts out
        # a peer whose former connection is dead unnoticed, and never frees what it sends.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._keys = keys
        try:
            bound = [self._bind(endpoint) for endpoint in private]
            if keys is not None:
                guard(self._socket, keys)
                self._doorkeeper = Doorkeeper(self._socket, keys.allow)
            self._endpoints = (*bound, *(self._bind(endpoint) for endpoint in endpoints))
        except TransportError:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers connect to; a `*` port is replaced by the real one."""
        return self._endpoints

    def bind_private(self, endpoint: str) -> None:
        """Bind an endpoint for the owner's own processes, as `private`; `endpoints` leaves it out.

        Raises:
            ConfigError: It is malformed, too long, or wider than this host.
            TransportError: It cannot be bound.
        """
        check_bindable(endpoint, has_keys=False, insecure=False)
        if self._keys is None:
            self._bind(endpoint)
            return
        unguard(self._socket)
        try:
            self._bind(endpoint)
        finally:
            guard(self._socket, self._keys)

    def send(self, peer: bytes, frames: Frames) -> None:
        """Queue `frames` for `peer`; never blocks. Large buffers are not copied: see `codec`."""
        large = sum(size for size in lengths_of(frames) if size >= COPY_THRESHOLD)
        if large and (queued := self._large_bytes(peer)) >= QUEUE_BYTES:
            raise QueueFullError(f"{queued} bytes wait for this peer, which does not read")
        try:
            if not large:
                send_frames(self._socket, (peer, *frames))
            else:
                tracker = send_tracked(self._socket, (peer, *frames))
                self._large.setdefault(peer, deque()).append((tracker, large))
        except zmq.Again as exc:
            raise QueueFullError(
                f"{HIGH_WATER_MARK} messages wait for this peer, which does not read"
            ) from exc
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                raise UnknownPeerError("this peer is not connected") from exc
            raise self._translate(exc) from exc

    def hold(self) -> None:
        """Do nothing: messages go at once."""

    def release(self) -> None:
        """Do nothing: see `hold`."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message and who sent it, or None if there is none now."""
        had_message, self._has_message = self._has_message, False
        try:
            # Asking costs half of what the exception for an empty queue does, and as much as taking
            # a message: in a burst the exception comes once, and the question would come each time.
            if not (had_message or self._is_burst):
                if not int(self._socket.getsockopt(_EVENTS)) & POLLIN:
                    return None
                self._is_burst = True
            # A ROUTER puts the identity before at least one frame; it is small: copied.
            peer = self._socket.recv(NOBLOCK)
            return peer, receive_frames(self._socket, NOBLOCK)
        except zmq.Again:
            self._is_burst = False
            return None
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

    def user_of(self, frames: Frames) -> str:
        """Return the public key of who sent a message that was received; "" without keys."""
        if self._doorkeeper is None or not frames or not isinstance(frames[0], zmq.Frame):
            return ""  # the last: it came another way, and is given on by who wraps this
        try:
            user = str(frames[0].get("User-Id"))
        except zmq.ZMQError:  # over a private endpoint
            return ""
        return "" if user == NOBODY else user

    @property
    def queued_bytes(self) -> int:
        """Bytes of large buffers that libzmq has not handed to the system yet."""
        return sum(map(self._large_bytes, list(self._large)))

    @property
    def refused_connections(self) -> int:
        """Connections that were refused for their keys, or broken off in the handshake."""
        return 0 if self._doorkeeper is None else self._doorkeeper.refused

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""
        try:
            with interruptible():  # what it has found is found again
                ready = zmq.zmq_poll(self._watched, math.ceil(timeout * 1000))
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc
        self._has_message = bool(ready) and ready[0][0] is self._socket
        return bool(ready)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `wait(0.0)` is worth a call."""
        return int(self._socket.getsockopt(zmq.FD))

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""
        if fd in self._extra_fds:
            return
        self._extra_fds.add(fd)
        if self._extra is not None:
            self._extra.register(fd, select.EPOLLIN | select.EPOLLHUP)
        self._list_watched()

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; no error if it was not watched."""
        if fd not in self._extra_fds:
            return
        self._extra_fds.discard(fd)
        if self._extra is not None:
            with contextlib.suppress(OSError, ValueError):  # closed by its owner: gone already
                self._extra.unregister(fd)
        self._list_watched()

    def close(self) -> None:
        """Close the socket, giving unsent messages a bounded time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._extra is not None:
            self._extra.close()
        let_go = self._doorkeeper is None or self._doorkeeper.close()
        self._socket.close(LINGER_MS)
        if let_go:
            self._context.term()
        else:  # it would wait for that thread
            logger.error("allow= has not returned; its thread and one context are left behind")
        for path, inode in self._files.items():
            with contextlib.suppress(OSError):  # gone with its folder
                if os.stat(path).st_ino == inode:  # else somebody else's by now
                    os.unlink(path)

    def _bind(self, endpoint: str) -> str:
        """Return where it is bound in fact."""
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as exc:
            raise TransportError(f"cannot bind {endpoint}: {exc}") from exc
        bound = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        scheme, _, path = bound.partition("://")
        if scheme == "ipc":
            with contextlib.suppress(OSError):  # an abstract one, `@name`, has no file
                self._files[path] = os.stat(path).st_ino
        return bound

    def _large_bytes(self, peer: bytes) -> int:
        """Return the bytes of large buffers that wait for a peer.

        libzmq counts messages only, and tells nothing of its queues. What it has sent, or dropped
        with a connection, it lets go of.
        """
        waiting = self._large.get(peer)
        if waiting is None:
            if len(self._large) >= self._sweep_at:  # peers that are gone are asked of no more
                for other in list(self._large):
                    self._large_bytes(other)
                self._sweep_at = 2 * len(self._large) + 16
            return 0
        while waiting and waiting[0][0].done:
            waiting.popleft()
        if not waiting:
            del self._large[peer]
        return sum(size for _, size in waiting)

    def _list_watched(self) -> None:
        self._watched: list[tuple[Any, int]] = [(self._socket, POLLIN)]
        if self._extra is None:
            self._watched += [(fd, POLLIN) for fd in self._extra_fds]
        elif self._extra_fds:  # one descriptor stands for all: polling stays flat
            self._watched.append((self._extra.fileno(), POLLIN))

    def _translate(self, exc: zmq.ZMQError) -> TransportError:
        if self._closed or exc.errno in (zmq.ENOTSOCK, zmq.ETERM):
            return ClosedError("the broker's socket is closed")
        return TransportError(f"the broker's socket failed: {exc}")
