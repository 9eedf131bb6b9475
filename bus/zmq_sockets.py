"""ROUTER and DEALER sockets behind the interface of `transport.py`, and what both have in common.

Leaves out what frames mean. Each has a ZeroMQ context of its own, is used by one thread, and must
be created in the process that uses it: it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from envbus.bus.authentication import (
    MONITOR_QUEUE,
    NOBODY,
    ZAP_DOMAIN,
    Doorkeeper,
    guard,
    handshake_trouble,
    introduce,
    unguard,
)
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.framing import lengths_of
from envbus.bus.interrupts import interruptible
from envbus.bus.keys import BrokerKeys, PeerKeys
from envbus.bus.transport import Buffer, Frames, check_endpoint, is_local

__all__ = ["HIGH_WATER_MARK", "ZmqPeer", "ZmqRouter", "router_socket"]

#: Messages queued per peer and direction. The broker allows far fewer requests in flight, so
#: that only a peer that ignores the protocol can fill it.
HIGH_WATER_MARK = 1000
#: Milliseconds that unsent messages get when a socket is closed.
_LINGER_MS = 500
# Plain ints: combining pyzmq's flag enums costs a microsecond each time.
_NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
#: Bytes from which on libzmq's buffers are the sender's own.
_COPY_THRESHOLD = zmq.COPY_THRESHOLD
#: `Socket.send` without what pyzmq adds for sockets of other types: half of the time.
_send_part: Any = zmq.backend.Socket.send
#: Longest path of a Unix socket, without the closing zero byte.
_IPC_PATH_BYTES = 107


def router_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER socket, not bound yet, that understands ZMTP 3 only.

    ZMTP 1.0, which libzmq takes by default, begins with whatever bytes come: to it the HTTP
    request of a web page that the user looks at is a message. ZMTP 3 begins with a byte that no
    HTTP, TLS or STUN client can send first, and with a handshake. A socket with a ZAP domain
    refuses all versions before 3. Without a ZAP handler in its context, connections without keys
    come in as before.

    Source:
        `handshake_v1_0` and `zap_enabled` in libzmq's `src/zmtp_engine.cpp`;
        https://rfc.zeromq.org/spec/23/.
    """
    router = context.socket(zmq.ROUTER)
    router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return router


def _send_frames(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """Send one message without blocking; buffers that libzmq's threshold calls large, uncopied.

    Part by part: `send_multipart` checks all parts first, which costs more than sending them.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _NOBLOCK if index == last else _NOBLOCK_MORE
        copy = type(frame) is bytes and len(frame) < _COPY_THRESHOLD
        _send_part(socket, frame, flags, copy)


def _send_tracked(socket: zmq.Socket[bytes], frames: Frames) -> zmq.MessageTracker:
    """As `_send_frames`; return what knows whether libzmq has let go of all large buffers."""
    last, trackers = len(frames) - 1, []
    for index, frame in enumerate(frames):
        flags = _NOBLOCK if index == last else _NOBLOCK_MORE
        view = memoryview(frame)  # also of a `zmq.Frame`, which cannot be tracked later
        if view.nbytes < _COPY_THRESHOLD:
            _send_part(socket, view, flags, True)
        else:
            trackers.append(_send_part(socket, view, flags, False, True))
    return zmq.MessageTracker(*trackers)


def _receive_frames(socket: zmq.Socket[bytes], flags: int) -> list[zmq.Frame]:
    """Return one message; its frames are not copied.

    A `Frame` knows whether more follow; asking the socket costs as much as receiving.
    """
    frame = socket.recv(flags, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame)
    return frames


def _set_limits(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    """Bound a socket's queues, its frames, and how long it lingers."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)


def _check_bindable(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Refuse an endpoint that must or can not be bound."""
    check_endpoint(endpoint, has_keys=has_keys, insecure=insecure)
    _check_ipc_path(endpoint)
    _check_ipc_unused(endpoint)


def _check_ipc_path(endpoint: str) -> None:
    """Refuse a path that is too long for a Unix socket."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc" and len(path.encode()) > _IPC_PATH_BYTES:
        raise ConfigError(
            f"the path of {endpoint} is longer than {_IPC_PATH_BYTES} bytes, the limit of Unix "
            "sockets; set TMPDIR to a shorter folder"
        )


def _check_ipc_unused(endpoint: str) -> None:
    """Refuse a path at which somebody listens: libzmq would take it away from them silently."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith("@"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise TransportError(f"cannot bind {endpoint}: somebody listens there")


logger = logging.getLogger("envbus.bus.zmq_sockets")

#: Bytes of large buffers that may wait for one peer; nothing is queued beyond that. Besides them
#: there are at most `HIGH_WATER_MARK` messages of buffers below 64 KiB.
QUEUE_BYTES: Final = 64 * 2**20
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
            _check_bindable(endpoint, has_keys=False, insecure=False)
        for endpoint in endpoints:
            _check_bindable(endpoint, has_keys=keys is not None, insecure=insecure)
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
        _set_limits(self._socket, max_frame_bytes)
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
        _check_bindable(endpoint, has_keys=False, insecure=False)
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
        large = sum(size for size in lengths_of(frames) if size >= _COPY_THRESHOLD)
        if large and (queued := self._large_bytes(peer)) >= QUEUE_BYTES:
            raise QueueFullError(f"{queued} bytes wait for this peer, which does not read")
        try:
            if not large:
                _send_frames(self._socket, (peer, *frames))
            else:
                tracker = _send_tracked(self._socket, (peer, *frames))
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
                if not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
                    return None
                self._is_burst = True
            # A ROUTER puts the identity before at least one frame; it is small: copied.
            peer = self._socket.recv(_NOBLOCK)
            return peer, _receive_frames(self._socket, _NOBLOCK)
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
        self._socket.close(_LINGER_MS)
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
        self._watched: list[tuple[Any, int]] = [(self._socket, _POLLIN)]
        if self._extra is None:
            self._watched += [(fd, _POLLIN) for fd in self._extra_fds]
        elif self._extra_fds:  # one descriptor stands for all: polling stays flat
            self._watched.append((self._extra.fileno(), _POLLIN))

    def _translate(self, exc: zmq.ZMQError) -> TransportError:
        if self._closed or exc.errno in (zmq.ENOTSOCK, zmq.ETERM):
            return ClosedError("the broker's socket is closed")
        return TransportError(f"the broker's socket failed: {exc}")


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
        _check_ipc_path(endpoint)
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
        self._watched: list[tuple[Any, int]] = [(self._socket, _POLLIN)]
        _set_limits(self._socket, max_frame_bytes)
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
            _send_frames(self._socket, frames)
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
            return _receive_frames(self._socket, 0)
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
        self._watched.append((fd, _POLLIN))

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
        self._socket.close(_LINGER_MS)
        self._context.term()

    def _send_again(self, frames: Frames) -> None:
        """Find out what hindered: libzmq says the same of a full queue and of none."""
        self._take_news()  # knocks, should it be time to: then there is a new queue
        if self._knock_at < math.inf:
            return  # lost: the queue went with the connection
        try:
            _send_frames(self._socket, frames)
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
