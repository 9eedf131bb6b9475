"""Router and peers in one process and one thread, for tests: no sockets, no waiting, no chance.

Behaves like `zmq_sockets.py` where that matters (`tests/integration/bus/test_zmq_sockets.py` looks
at both): frames arrive as bytes of their own, queues are bounded, an unknown or closed peer is an
error to the sender. Leaves out what is about real time and other processes: `wait` and `receive` do
not wait, and watched file descriptors are never reported.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable

from envbus.bus.errors import ClosedError, QueueFullError, UnknownPeerError
from envbus.bus.wire.frames import Buffer, Frames

__all__ = ["MemoryNetwork", "MemoryPeer", "MemoryRouter"]


class MemoryNetwork:
    """One router and its peers.

    Args:
        queue_size: Messages that fit into the queue to each peer, and into that from each peer.
        idle: Called with the seconds that somebody would have to wait, for each such wait; may
            advance a `FakeClock` or let others run. None: nothing happens.
    """

    def __init__(
        self, *, queue_size: int = 1000, idle: Callable[[float], None] | None = None
    ) -> None:
        self.queue_size = queue_size
        self.idle = idle
        self._router: MemoryRouter | None = None
        self.peers: dict[bytes, MemoryPeer] = {}

    def router(self) -> MemoryRouter:
        """Return the router, the same each time."""
        if self._router is None:
            self._router = MemoryRouter(self)
        return self._router

    def peer(self, identity: bytes) -> MemoryPeer:
        """Connect a new peer."""
        assert identity not in self.peers, f"the routing id {identity!r} is in use"
        peer = MemoryPeer(self, identity)
        self.peers[identity] = peer
        return peer


class MemoryRouter:
    """The broker's side; a `RouterTransport`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._inbox: deque[tuple[bytes, list[Buffer]]] = deque()
        self._queued: dict[bytes, int] = {}
        self.closed = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """A name that nothing can connect to."""
        return ("inproc://memory",)

    def send(self, peer: bytes, frames: Frames) -> None:
        """Put `frames` into the peer's inbox."""
        self._check_open()
        receiver = self._network.peers.get(peer)
        if receiver is None:
            raise UnknownPeerError("this peer is not connected")
        if len(receiver.inbox) >= self._network.queue_size:
            raise QueueFullError(f"{len(receiver.inbox)} messages wait for this peer already")
        receiver.inbox.append(_copy(frames))

    def hold(self) -> None:
        """Do nothing: messages go at once."""

    def release(self) -> None:
        """Do nothing: see `hold`."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message and who sent it, or None if there is none."""
        self._check_open()
        if not self._inbox:
            return None
        peer, frames = self._inbox.popleft()
        self._queued[peer] -= 1
        if not self._queued[peer]:
            del self._queued[peer]
        return peer, frames

    def user_of(self, _frames: Frames) -> str:
        """Return "": nobody has a key."""
        return ""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait: of none it is known."""
        return 0

    @property
    def refused_connections(self) -> int:
        """None: everybody may join."""
        return 0

    @property
    def hides_messages(self) -> bool:
        """Return False: there is no descriptor."""
        return False

    def wait(self, timeout: float) -> bool:
        """Return whether a message is there; if none is, `idle` is called before."""
        self._check_open()
        if not self._inbox and self._network.idle is not None:
            self._network.idle(timeout)
        return bool(self._inbox)

    def fileno(self) -> int:
        """Raise, as files without a descriptor do."""
        raise io.UnsupportedOperation("memory has no descriptor to wait for")

    def watch(self, fd: int) -> None:
        """Do nothing: see above."""

    def unwatch(self, fd: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Refuse all further use. Idempotent."""
        self.closed = True

    def put(self, peer: bytes, frames: Frames) -> None:
        """Take a message from a peer, or from a test that wants to send nonsense."""
        queued = self._queued.get(peer, 0)
        if queued >= self._network.queue_size:
            raise QueueFullError(f"{queued} messages of {peer!r} wait for the broker already")
        self._queued[peer] = queued + 1
        self._inbox.append((peer, _copy(frames)))

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the router was closed")


class MemoryPeer:
    """A peer's side; a `PeerTransport`."""

    def __init__(self, network: MemoryNetwork, identity: bytes) -> None:
        self._network = network
        self._identity = identity
        self.inbox: deque[list[Buffer]] = deque()
        self.closed = False

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""
        return self._identity

    def send(self, frames: Frames) -> None:
        """Put `frames` into the router's inbox."""
        self._check_open()
        self._network.router().put(self._identity, frames)

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message; if there is none, `idle` is called before None is returned."""
        self._check_open()
        if not self.inbox and self._network.idle is not None:
            self._network.idle(timeout)
        return self.inbox.popleft() if self.inbox else None

    def lost_for(self) -> float:
        """Return 0.0: a broker in the same process is always in reach."""
        return 0.0

    def trouble(self) -> str:
        """Return "": see `lost_for`."""
        return ""

    def close(self) -> None:
        """Disconnect; what was sent still arrives. Idempotent."""
        if not self.closed:
            self.closed = True
            del self._network.peers[self._identity]

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the peer {self._identity!r} was closed")


def _copy(frames: Frames) -> list[Buffer]:
    """Return frames as the wire delivers them: bytes that the sender cannot change any more."""
    return [bytes(frame) for frame in frames]
