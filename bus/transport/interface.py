"""How frames move between a broker and its peers: the interface, and endpoint syntax.

Vocabulary only; `zmq_sockets.py` and local links implement it.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Protocol

from envbus.bus.errors import ConfigError
from envbus.bus.wire.frames import Buffer, Frames

__all__ = [
    "AT_ONE_GO",
    "A_MOMENT",
    "BACKLOG",
    "QUEUE_BYTES",
    "PeerTransport",
    "RouterTransport",
    "is_local",
]

#: Most messages that a peer takes until it looks at its clock: its broker may send without end.
AT_ONE_GO: Final = 1000
#: Connections to a listening socket that wait to be accepted, also while nobody does.
BACKLOG: Final = 128
#: What `lost_for` says of a connection that was lost and made again since it was asked last.
A_MOMENT: Final = 1e-6
#: Bytes that may wait for one peer. Nothing is queued beyond that, so one message may be over it.
QUEUE_BYTES: Final = 64 * 2**20

_HIGHEST_PORT: Final = 65535


class RouterTransport(Protocol):
    """The broker's side: one socket, many peers. Used by one thread only."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers connect to."""

    def send(self, peer: bytes, frames: Frames) -> None:
        """Queue `frames` for `peer`; never blocks.

        Raises:
            UnknownPeerError: No such peer is connected.
            QueueFullError: The queue to that peer is full.
            ClosedError: The transport was closed.
        """

    def hold(self) -> None:
        """Until `release` messages may be kept, so that those to one peer go at once."""

    def release(self) -> None:
        """Send what was kept. What cannot be sent any more is lost, as what a peer never reads."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message and who sent it, or None if there is none now.

        Right after a `wait` that may be what `wait` has seen; None then says that this is taken.
        """

    def user_of(self, frames: Frames) -> str:
        """Return who sent a message that was received: a public key, in Z85; "" without keys."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for peers which do not read, as far as they are counted."""

    @property
    def refused_connections(self) -> int:
        """Connections that were refused for their keys, or broken off in the handshake."""

    @property
    def hides_messages(self) -> bool:
        """Whether messages are there of which `fileno` does not tell, since something was sent."""

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `wait(0.0)` is worth a call.

        It tells of changes: look for messages first, then wait for it.
        """

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; no error if it was not watched."""

    def close(self) -> None:
        """Close the socket, giving unsent messages a bounded time. Idempotent."""


class PeerTransport(Protocol):
    """A peer's side: one socket to one broker. Used by one thread only."""

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""

    def send(self, frames: Frames) -> None:
        """Queue `frames` for the broker; never blocks.

        Raises:
            QueueFullError: The queue is full: the broker does not read.
            ClosedError: The transport was closed.
        """

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message, or None after `timeout` seconds."""

    def lost_for(self) -> float:
        """Return for how many seconds the broker has been out of reach; 0.0 if it is not.

        A loss that is made good by now is told, too, once, as `A_MOMENT`.
        """

    def trouble(self) -> str:
        """Return, for people, why there is no connection; "" if there is one, or none tells."""

    def close(self) -> None:
        """Close the socket, giving unsent messages a bounded time. Idempotent."""


def is_local(endpoint: str) -> bool:
    """Whether only this host can reach `endpoint`: ipc, inproc or a loopback address.

    Raises:
        ConfigError: The endpoint's syntax is unknown, or there is no such port.
    """
    scheme, separator, address = endpoint.partition("://")
    if not separator or not address or scheme not in ("ipc", "tcp", "inproc"):
        gateways = {"stream": "tcp", "streams": "tcp", "ws": "websocket", "wss": "websocket"}
        raise ConfigError(
            f"endpoint {endpoint!r} is not understood; use 'ipc:///path' or 'tcp://host:port'"
            + (
                f", or a bridge's gateway: gateway=GatewayConfig({gateways[scheme]}=[{address!r}])"
                if scheme in gateways
                else ""
            )
        )
    if scheme != "tcp":
        return True
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port == "*" or port.isdigit()):
        raise ConfigError(f"endpoint {endpoint!r} has no port; use 'tcp://host:port' or ':*'")
    if port != "*" and int(port) > _HIGHEST_PORT:  # ZeroMQ would take another one
        raise ConfigError(f"endpoint {endpoint!r}: ports are from 0 to {_HIGHEST_PORT}")
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name or `*`: assume that others can reach it
