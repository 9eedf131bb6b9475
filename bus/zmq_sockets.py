"""What ROUTER and DEALER sockets have in common: limits, whole messages, what can be bound.

Leaves out who uses them, and what happens when they fail (`zmq_router.py`, `zmq_peer.py`).
"""

from __future__ import annotations

import socket
from typing import Any

import zmq

from envbus.bus.errors import ConfigError, TransportError
from envbus.bus.transport import Frames, check_endpoint

__all__ = [
    "COPY_THRESHOLD",
    "HIGH_WATER_MARK",
    "LINGER_MS",
    "NOBLOCK",
    "POLLIN",
    "ZAP_DOMAIN",
    "check_bindable",
    "check_ipc_path",
    "receive_frames",
    "router_socket",
    "send_frames",
    "send_tracked",
    "set_limits",
]

#: Messages queued per peer and direction. The broker allows far fewer requests in flight, so
#: that only a peer that ignores the protocol can fill it.
HIGH_WATER_MARK = 1000
#: Milliseconds that unsent messages get when a socket is closed.
LINGER_MS = 500
# Plain ints: combining pyzmq's flag enums costs a microsecond each time.
NOBLOCK = int(zmq.NOBLOCK)
POLLIN = int(zmq.POLLIN)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
#: Bytes from which on libzmq's buffers are the sender's own.
COPY_THRESHOLD = zmq.COPY_THRESHOLD
#: `Socket.send` without what pyzmq adds for sockets of other types: half of the time.
_send_part: Any = zmq.backend.Socket.send
#: Domain in which a ZAP handler is asked, where there is one.
ZAP_DOMAIN = "envbus"
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


def send_frames(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """Send one message without blocking; buffers that libzmq's threshold calls large, uncopied.

    Part by part: `send_multipart` checks all parts first, which costs more than sending them.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = NOBLOCK if index == last else _NOBLOCK_MORE
        copy = type(frame) is bytes and len(frame) < COPY_THRESHOLD
        _send_part(socket, frame, flags, copy)


def send_tracked(socket: zmq.Socket[bytes], frames: Frames) -> zmq.MessageTracker:
    """As `send_frames`; return what knows whether libzmq has let go of all large buffers."""
    last, trackers = len(frames) - 1, []
    for index, frame in enumerate(frames):
        flags = NOBLOCK if index == last else _NOBLOCK_MORE
        view = memoryview(frame)  # also of a `zmq.Frame`, which cannot be tracked later
        if view.nbytes < COPY_THRESHOLD:
            _send_part(socket, view, flags, True)
        else:
            trackers.append(_send_part(socket, view, flags, False, True))
    return zmq.MessageTracker(*trackers)


def receive_frames(socket: zmq.Socket[bytes], flags: int) -> list[zmq.Frame]:
    """Return one message; its frames are not copied.

    A `Frame` knows whether more follow; asking the socket costs as much as receiving.
    """
    frame = socket.recv(flags, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame)
    return frames


def set_limits(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    """Bound a socket's queues, its frames, and how long it lingers."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)


def check_bindable(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Refuse an endpoint that must or can not be bound."""
    check_endpoint(endpoint, has_keys=has_keys, insecure=insecure)
    check_ipc_path(endpoint)
    _check_ipc_unused(endpoint)


def check_ipc_path(endpoint: str) -> None:
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
