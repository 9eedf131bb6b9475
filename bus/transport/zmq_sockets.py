"""ROUTER and DEALER sockets behind the interface of `interface.py`, and what both have in common.

Leaves out what frames mean. Each has a ZeroMQ context of its own, is used by one thread, and must
be created in the process that uses it: it does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from envbus.bus.descriptors import opening
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.interrupts import interruptible, uninterrupted_call
from envbus.bus.transport.authentication import (
    MONITOR_QUEUE,
    NOBODY,
    ZAP_DOMAIN,
    Authenticator,
    disable_curve,
    enable_client_curve,
    enable_curve,
    handshake_trouble,
)
from envbus.bus.transport.curve_keys import BrokerKeys, Entrance, PeerKeys
from envbus.bus.transport.interface import A_MOMENT, QUEUE_BYTES, is_local
from envbus.bus.wire.frames import Buffer, Frames
from envbus.bus.wire.framing import lengths_of
from envbus.bus.wire.limits import MAX_FRAME_BYTES

__all__ = [
    "HIGH_WATER_MARK",
    "LINGER_MS",
    "NOBLOCK",
    "NOBLOCK_MORE",
    "ZmqPeer",
    "ZmqRouter",
    "check_room",
    "prepare_large",
    "router_socket",
]

logger = logging.getLogger("envbus.bus.transport.zmq_sockets")

#: Messages queued per peer and direction. The broker allows far fewer requests in flight, so
#: that only a peer that ignores the protocol can fill it.
HIGH_WATER_MARK = 1000
#: Milliseconds that unsent messages get when a socket is closed.
LINGER_MS = 500
# Plain ints: combining pyzmq's flag enums costs a microsecond each time.
NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
#: Bytes from which on libzmq's buffers are the sender's own.
_COPY_THRESHOLD = zmq.COPY_THRESHOLD
#: `Socket.send` without what pyzmq adds for sockets of other types: half of the time.
_send_part: Any = zmq.backend.Socket.send
#: Longest path of a Unix socket, without the closing zero byte.
_IPC_PATH_BYTES = 107
#: Descriptors that a socket takes, with its context's threads.
_DESCRIPTORS: Final = 10
#: Those that a broker's takes with keys, with who watches over it.
_DESCRIPTORS_WITH_KEYS: Final = 20


@uninterrupted_call  # or descriptors stay
def check_room(needed: int = _DESCRIPTORS) -> None:
    """See that there are descriptors for a socket: libzmq ends the process if a thread finds none.

    Raises:
        TransportError: There are too few.
    """
    found: list[int] = []
    try:
        with opening(f"no ZeroMQ socket can be made, which takes {needed} descriptors"):
            while len(found) < needed:
                found += os.pipe()
    finally:
        for fd in found:
            os.close(fd)


def prepare_large(needed: int = _DESCRIPTORS) -> None:
    """Have pyzmq start now what lets go of large buffers: a thread, with sockets of its own.

    It would with the first one. By then strangers at a TCP endpoint may have all descriptors, and
    libzmq ends a process whose new threads find none. Takes fewer than the `needed` ones of the
    socket that is made next.
    """
    check_room(needed)
    zmq.Frame(bytes(_COPY_THRESHOLD), copy=False)


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
    """Send one message without blocking; `bytes` that libzmq's threshold calls large, uncopied.

    Part by part: `send_multipart` checks all parts first, which costs more than sending them.
    """
    index, last = 0, len(frames) - 1
    try:
        for index, frame in enumerate(frames):
            flags = NOBLOCK if index == last else NOBLOCK_MORE
            copy = type(frame) is not bytes or len(frame) < _COPY_THRESHOLD
            _send_part(socket, frame, flags, copy)
    except BaseException as exc:
        _end_broken(socket, index, exc)
        raise


def _send_tracked(socket: zmq.Socket[bytes], frames: Frames) -> zmq.MessageTracker:
    """As `_send_frames`; return what knows whether libzmq has let go of all large buffers."""
    index, last, trackers = 0, len(frames) - 1, []
    try:
        for index, frame in enumerate(frames):
            flags = NOBLOCK if index == last else NOBLOCK_MORE
            view = memoryview(frame)  # also of a `zmq.Frame`, which cannot be tracked later
            if view.nbytes < _COPY_THRESHOLD:
                _send_part(socket, view, flags, True)
            else:
                trackers.append(_send_part(socket, view, flags, False, True))
    except BaseException as exc:
        _end_broken(socket, index, exc)
        raise
    return zmq.MessageTracker(*trackers)


def _end_broken(socket: zmq.Socket[bytes], index: int, error: BaseException) -> None:
    """End a message that broke off at a part, or the next one is taken for its rest.

    Only libzmq's own errors say that this part was not sent: a signal's handler may raise behind
    it. Where nothing was, a ROUTER refuses the empty part, which names nobody.
    """
    if index or not isinstance(error, zmq.ZMQError):
        with contextlib.suppress(zmq.ZMQError):
            _send_part(socket, b"", NOBLOCK, True)


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
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)


def _check_bindable(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Refuse an endpoint that is malformed, wider than this host without keys, or in use."""
    if not is_local(endpoint) and not has_keys and not insecure:
        raise ConfigError(
            f"binding {endpoint} would let other hosts join without a key; make keys with "
            "'envbus keys new' and pass keys= and allow=, bind to 127.0.0.1 instead, or say "
            "insecure=True"
        )
    path = _ipc_path(endpoint)
    if path and not path.startswith("@"):
        # libzmq would take it away from who listens there, silently.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except OSError:
                return
        raise TransportError(f"cannot bind {endpoint}: somebody listens there")


def _allowing(own: str, allow: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return what lets in the holder of the public key `own`, and those that `allow` does.

    No method of a router's: the thread that calls it would keep one that is dropped.
    """
    return lambda key: key == own or allow(key)


def _check_together(endpoints: Sequence[str]) -> None:
    """Refuse `ipc://` beside TCP that other hosts can reach; see `ZmqRouter.own_tcp`."""
    wide = [endpoint for endpoint in endpoints if not is_local(endpoint)]
    files = [endpoint for endpoint in endpoints if endpoint.startswith("ipc:")]
    if wide and files:
        raise ConfigError(
            f"{wide[0]} and {files[0]} cannot be bound together: whoever reaches the first could "
            "take all descriptors, and libzmq ends a process that has none left for the second; "
            "bind tcp://127.0.0.1 for this host instead"
        )


def _ipc_path(endpoint: str) -> str:
    """Return the path of a Unix socket, empty for other endpoints; one too long is refused."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return ""
    if len(path.encode()) > _IPC_PATH_BYTES:
        raise ConfigError(
            f"the path of {endpoint} is longer than {_IPC_PATH_BYTES} bytes, the limit of Unix "
            "sockets; set TMPDIR to a shorter folder"
        )
    return path


def _translated(exc: zmq.ZMQError, closed: bool, whose: str) -> TransportError:
    """Return libzmq's error as one of ours."""
    if closed or exc.errno in (zmq.ENOTSOCK, zmq.ETERM):
        return ClosedError(f"{whose} socket is closed")
    return TransportError(f"{whose} socket failed: {exc}")


def _finalizer(
    owner: object, close: Callable[..., None], *parts: Any
) -> weakref.finalize[..., Any]:
    """Return what closes the parts of a transport, also if that is dropped without.

    A garbage collection may end a context before its sockets, for which libzmq then waits for ever.
    At the interpreter's end other threads may still use them.
    """
    finalizer = weakref.finalize(owner, _close_here, os.getpid(), close, *parts)
    finalizer.atexit = False
    return finalizer


def _close_here(process: int, close: Callable[..., None], *parts: Any) -> None:
    if os.getpid() == process:  # in a forked copy they are not this process'
        close(*parts)


def _close_router(
    context: zmq.Context[zmq.Socket[bytes]],
    router: zmq.Socket[bytes],
    authenticators: Sequence[Authenticator],
    files: Mapping[str, int],
) -> None:
    let_go = all(each.close() for each in authenticators)
    router.close(LINGER_MS)
    if let_go:
        context.term()
    else:  # it would wait for that thread
        logger.error("allow= has not returned; its thread and one context are left behind")
    for path, inode in files.items():
        with contextlib.suppress(OSError):  # gone with its folder
            if os.stat(path).st_ino == inode:  # else somebody else's by now
                os.unlink(path)


def _close_peer(
    context: zmq.Context[zmq.Socket[bytes]],
    peer: zmq.Socket[bytes],
    monitors: Sequence[zmq.Socket[bytes]],
) -> None:
    peer.disable_monitor()
    for monitor in monitors:
        monitor.close(0)
    peer.close(LINGER_MS)
    context.term()


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
        ConfigError: An endpoint is malformed, too long, wider than this host without keys, or
            wider than this host beside one of `ipc://`.
        TransportError: An endpoint cannot be bound, e.g. is in use; or descriptors are too few.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        private: Sequence[str] = (),
        max_frame_bytes: int = MAX_FRAME_BYTES,
        keys: BrokerKeys | None = None,
        insecure: bool = False,
    ) -> None:
        if not endpoints and not private:
            raise ConfigError("no endpoint to bind; name at least one")
        needed = _DESCRIPTORS if keys is None else _DESCRIPTORS_WITH_KEYS
        prepare_large(needed)
        check_room(needed)
        for endpoint in private:
            _check_bindable(endpoint, has_keys=False, insecure=False)
        for endpoint in endpoints:
            _check_bindable(endpoint, has_keys=keys is not None, insecure=insecure)
        _check_together(endpoints)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = router_socket(self._context)
        #: What `wait` waits for: the socket, and few descriptors of the owner's.
        self._watched: list[tuple[Any, int]] = [(self._socket, _POLLIN)]
        #: Paths of Unix sockets that are this one's, and their inodes; libzmq leaves them behind.
        self._files: dict[str, int] = {}
        self._authenticators: list[Authenticator] = []
        self._finalizer = _finalizer(
            self, _close_router, self._context, self._socket, self._authenticators, self._files
        )
        #: Whether the last `wait` saw a message that was not received yet.
        self._has_message = False
        #: Whether messages have been coming one after another: there are probably more.
        self._is_burst = False
        #: Large buffers that were sent, by peer, and who knows whether libzmq has let go of them.
        self._large: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        #: Peers in it, at which those that are gone are forgotten.
        self._sweep_at = 16
        _set_limits(self._socket, max_frame_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The newest connection of an identity counts. By default libzmq ignores it, which shuts out
        # a peer whose former connection is dead unnoticed, and never frees what it sends.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._keys = keys
        #: What the owner's own processes show where there are keys; nobody else has it.
        self._own = None if keys is None else PeerKeys.temporary(keys.own.public)
        try:
            bound = [self._bind(endpoint) for endpoint in private]
            if keys is not None:
                enable_curve(self._socket, keys)
                assert self._own is not None
                allow = _allowing(self._own.own.public.decode(), keys.allow)
                self._authenticators.append(Authenticator(self._socket, allow))
            self._endpoints = (*bound, *(self._bind(endpoint) for endpoint in endpoints))
        except TransportError:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers connect to; a `*` port is replaced by the real one."""
        return self._endpoints

    @property
    def own_tcp(self) -> Entrance | None:
        """Where the owner's own processes come in; None: no TCP is bound.

        Not by `ipc://`, beside TCP: libzmq ends a process that has no descriptor left for such a
        connection, and strangers at a TCP endpoint can take them all. At TCP it bears that.
        """
        bound = [endpoint for endpoint in self._endpoints if endpoint.startswith("tcp:")]
        for endpoint in sorted(bound, key=is_local, reverse=True):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            ip = ipaddress.ip_address(host.strip("[]"))
            if ip.is_unspecified:
                host = "127.0.0.1" if ip.version == 4 else "[::1]"
            return Entrance(f"tcp://{host}:{port}", self._own)
        return None

    def bind_private(self, endpoint: str) -> None:
        """Bind an endpoint for the owner's own processes, as `private`; `endpoints` leaves it out.

        Raises:
            ConfigError: It is malformed, too long, wider than this host, or `ipc://` beside TCP
                that is wider.
            TransportError: It cannot be bound.
        """
        _check_bindable(endpoint, has_keys=False, insecure=False)
        _check_together([*self._endpoints, endpoint])
        if self._keys is None:
            self._bind(endpoint)
            return
        disable_curve(self._socket)
        try:
            self._bind(endpoint)
        finally:
            enable_curve(self._socket, self._keys)

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
            peer = self._socket.recv(NOBLOCK)
            return peer, _receive_frames(self._socket, NOBLOCK)
        except zmq.Again:
            self._is_burst = False
            return None
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

    def user_of(self, frames: Frames) -> str:
        """Return the public key of who sent a message that was received; "" without keys."""
        if not self._authenticators or not frames or not isinstance(frames[0], zmq.Frame):
            return ""  # the last: it came another way, and is given on by who wraps this
        try:
            user = str(frames[0].get("User-Id"))
        except zmq.ZMQError:  # over a private endpoint
            return ""
        is_own = self._own is not None and user == self._own.own.public.decode()
        return "" if is_own or user == NOBODY else user

    @property
    def queued_bytes(self) -> int:
        """Bytes of large buffers that libzmq has not handed to the system yet."""
        return sum(map(self._large_bytes, list(self._large)))

    @property
    def refused_connections(self) -> int:
        """Connections that were refused for their keys, or broken off in the handshake."""
        return sum(each.refused for each in self._authenticators)

    @property
    def hides_messages(self) -> bool:
        """Whether a message is there: sending may have used up what the descriptor had to tell."""
        try:
            return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)
        except zmq.ZMQError as exc:
            raise self._translate(exc) from exc

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
        if (fd, _POLLIN) not in self._watched:
            self._watched.append((fd, _POLLIN))

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; no error if it was not watched."""
        with contextlib.suppress(ValueError):
            self._watched.remove((fd, _POLLIN))

    def close(self) -> None:
        """Close the socket, giving unsent messages a bounded time. Idempotent."""
        self._finalizer()

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

    def _translate(self, exc: zmq.ZMQError) -> TransportError:
        return _translated(exc, not self._finalizer.alive, "the broker's")


#: Milliseconds between libzmq's own signs of life on a TCP connection. It is closed where the other
#: host's system does not acknowledge them for twice as long.
KEEPALIVE_MS = 10_000
#: Milliseconds until the lack of libzmq's signs of life closes it. They wait behind a message that
#: is under way, so one that takes longer over a slow line never arrives.
SLOWEST_MS = 60_000
#: Longest pause between two tries to connect, in milliseconds; libzmq's first one is 100.
RECONNECT_MAX_MS = 1000
#: Seconds until a peer that was turned away for good by libzmq connects again: the broker may allow
#: its key by then.
_RECONNECT_INTERVAL = 1.0
#: What tells a peer about its connection.
_CONNECTION_EVENTS = (
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
        keys: This peer's, and the broker's public one; None for a broker without keys.

    Raises:
        ConfigError: The endpoint is malformed.
        TransportError: It cannot be connected to; or descriptors are too few.
    """

    def __init__(self, endpoint: str, identity: bytes, *, keys: PeerKeys | None = None) -> None:
        is_local(endpoint)  # raises for one that is malformed
        _ipc_path(endpoint)
        self._endpoint = endpoint
        self._identity = identity
        self._keys = keys
        self._trouble = ""
        self._reconnect_at = math.inf
        check_room()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.RCVHWM, MONITOR_QUEUE)
        self._socket = self._context.socket(zmq.DEALER)
        monitors: list[zmq.Socket[bytes]] = []
        self._finalizer = _finalizer(self, _close_peer, self._context, self._socket, monitors)
        self._timeout_ms = -1
        self._lost_since: float | None = None
        self._is_connected = False
        #: Whether a connection was lost of which `lost_for` has not told.
        self._was_lost = False
        self._watched: list[tuple[Any, int]] = [(self._socket, _POLLIN)]
        _set_limits(self._socket, MAX_FRAME_BYTES)
        if endpoint.startswith("tcp:"):  # a cable can be pulled; a process of this host cannot
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, KEEPALIVE_MS)
            self._socket.setsockopt(zmq.TCP_MAXRT, 2 * KEEPALIVE_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SLOWEST_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            enable_client_curve(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(_CONNECTION_EVENTS)
        monitors.append(self._monitor)
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

    @uninterrupted_call  # or the next message is taken for the rest of this one
    def send(self, frames: Frames) -> None:
        """Queue `frames` for the broker; never blocks.

        Buffers are copied: what is queued cannot be taken back, and whoever has given it up, as its
        time was over, may write to its arrays. What a connection that is turned away has taken is
        lost with it, and so is what comes until this peer connects again: `trouble` tells.
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
                self._take_events()
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

        A closed connection shows at once, one that was cut without a word after three
        times `KEEPALIVE_MS`, and one whose other side is stuck after `SLOWEST_MS`.
        libzmq may have connected again by then: what was under way is lost all the same.
        """
        self._take_events()
        was_lost, self._was_lost = self._was_lost, False
        if self._lost_since is None:
            return A_MOMENT if was_lost else 0.0
        return time.monotonic() - self._lost_since

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
        self._finalizer()

    def _send_again(self, frames: Frames) -> None:
        """Find out what hindered: libzmq says the same of a full queue and of none."""
        self._take_events()  # connects, should it be time to: then there is a new queue
        if self._reconnect_at < math.inf:
            return  # lost: the queue went with the connection
        try:
            _send_frames(self._socket, frames)
        except zmq.Again as exc:
            raise QueueFullError("the queue to the broker is full: it does not read") from exc

    def _take_events(self) -> None:
        """Take what the monitor has said; connect again where libzmq would not."""
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event = message["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_since, self._trouble, self._is_connected = None, "", True
                continue
            now = time.monotonic()
            self._was_lost |= self._is_connected
            self._is_connected = False
            self._lost_since = self._lost_since or now
            if event != zmq.EVENT_DISCONNECTED:
                self._trouble = handshake_trouble(event, message["value"], self._keys)
            if event & _TURNED_AWAY:
                self._reconnect_at = now + _RECONNECT_INTERVAL
        if time.monotonic() >= self._reconnect_at:
            self._reconnect_at = math.inf
            with contextlib.suppress(zmq.ZMQError):  # else libzmq takes it for connected
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def _translate(self, exc: zmq.ZMQError) -> TransportError:
        return _translated(exc, not self._finalizer.alive, "this peer's")
