"""A faster carriage between a broker and the children of its own process: one socketpair each.

The same messages as over ROUTER and DEALER, without libzmq's I/O threads: a message costs one
wake-up instead of three. Leaves out what frames mean, and how a child gets its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections import deque
from typing import Final

from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.limits import DEFAULT_LIMITS
from envbus.bus.pipe import Pipe
from envbus.bus.spinning import BROKER_SPIN_SECONDS, CHILD_SPIN_SECONDS, SpinBudget
from envbus.bus.transport import Buffer, Frames
from envbus.bus.zmq_transport import ZmqRouter

__all__ = ["LANES_EXIST", "LaneEnd", "LanePeer", "LaneRouter"]

logger = logging.getLogger("envbus.bus.lane")

#: Whether this platform has sockets that keep message boundaries and report a hang-up.
LANES_EXIST: Final = hasattr(socket, "SOCK_SEQPACKET") and hasattr(select, "epoll")
#: Do not wait in `LaneEnd.read`.
DONT_WAIT: Final = getattr(socket, "MSG_DONTWAIT", 0)
#: Largest message that goes through the socket; a larger one is handed over as a parcel. A
#: socket's buffer holds some 200 kB, and copying 32 kB costs less than a parcel does.
INLINE_BYTES: Final = 32 * 1024
#: Messages waiting for room in the socket, per peer; as many as the ROUTER's queue holds.
QUEUE_LIMIT: Final = 1000
#: Seconds to wait for a parcel that was sent before the packet that names it.
_PARCEL_TIMEOUT: Final = 30.0
#: Number of frames; a parcel's number follows if it is 0, else each frame's length.
_COUNT: Final = struct.Struct("<I")
_PARCEL: Final = struct.Struct("<IQ")
#: Layouts of the usual counts; two is a message without arrays.
_TABLES: Final = {count: struct.Struct(f"<{count + 1}I") for count in range(1, 9)}


class LaneEnd:
    """One end of a lane: packets in, packets out. Used by one thread.

    Args:
        sock: One end of a SOCK_SEQPACKET pair.
        pipe: One end of a pipe of its own, for messages that are too large for the socket.
    """

    def __init__(self, sock: socket.socket, pipe: Pipe) -> None:
        self._socket = sock
        self._pipe = pipe
        disown_in_forks(self)

    @classmethod
    def pair(cls) -> tuple[LaneEnd, LaneEnd]:
        """Return both ends of a new lane."""
        socks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = (cls(sock, pipe) for sock, pipe in zip(socks, Pipe.pair(), strict=True))
        return ours, theirs

    @classmethod
    def from_fds(cls, fds: tuple[int, int]) -> LaneEnd:
        """Return the end that has these descriptors; takes them over."""
        return cls(socket.socket(fileno=fds[0]), Pipe.from_fd(fds[1]))

    def fds(self) -> tuple[int, int]:
        """Return the descriptors of this end, to hand duplicates of them to a child."""
        return self._socket.fileno(), self._pipe.fileno()

    def set_timeout(self, timeout: float | None) -> None:
        """Let `read` wait up to `timeout` seconds, and `write` for room; None: neither waits."""
        self._socket.setblocking(timeout is not None)
        if timeout is not None:
            # The kernel's own time-out: one system call per message, where Python's takes two.
            seconds, fraction = divmod(max(timeout, 1e-6), 1.0)
            interval = struct.pack("@ll", int(seconds), int(fraction * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def pack(self, frames: Frames) -> bytes:
        """Return the packet that carries `frames`; a large one's content goes ahead by pipe.

        Raises:
            TransportError: The pipe failed.
        """
        lengths = [_size(frame) for frame in frames]
        table = _table(len(frames))
        if table.size + sum(lengths) <= INLINE_BYTES:
            return b"".join((table.pack(len(frames), *lengths), *frames))
        number = self._pipe.next_number()
        self._pipe.send_bytes(number, b"".join((table.pack(len(frames), *lengths), *frames)))
        return _PARCEL.pack(0, number)

    def unpack(self, packet: bytes) -> list[Buffer]:
        """Return the frames that a packet carries.

        Raises:
            DecodeError: It is not one of `pack`.
            TransportError: The pipe failed.
        """
        try:
            (count,) = _COUNT.unpack_from(packet)
            if count == 0:
                number = _PARCEL.unpack(packet)[1]
                packet = self._pipe.receive_bytes(number, _PARCEL_TIMEOUT)
                (count,) = _COUNT.unpack_from(packet)
            table = _table(count)
            _, *lengths = table.unpack_from(packet)
        except (struct.error, KeyError) as exc:
            raise DecodeError(f"a packet of {len(packet)} bytes has no readable table") from exc
        view, start, frames = memoryview(packet), table.size, []
        for length in lengths:
            frames.append(view[start : start + length])
            start += length
        if start != len(packet):
            raise DecodeError(f"a packet has {len(packet)} bytes, its table says {start}")
        return frames

    def write(self, packet: bytes) -> bool:
        """Send a packet; False if there is no room now.

        Raises:
            ClosedError: The other side is gone.
        """
        try:
            self._socket.send(packet)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise ClosedError(f"the other side of the lane is gone: {exc}") from exc
        return True

    def read(self, flags: int = 0) -> bytes | None:
        """Return the next packet, or None if there is none (now, or within the time-out).

        Args:
            flags: `DONT_WAIT`, or 0.

        Raises:
            ClosedError: The other side is gone.
        """
        try:
            packet = self._socket.recv(2 * INLINE_BYTES, flags)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ClosedError(f"the other side of the lane is gone: {exc}") from exc
        if not packet:
            raise ClosedError("the other side of the lane is gone")
        return packet

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
        self._pipe.close()

    def disown(self) -> None:
        """In a forked copy: close its descriptors, which the owner does not notice."""
        self.close()


class LanePeer:
    """A child's end, as a `PeerTransport`.

    Args:
        end: The lane to the broker; closed with this.
        identity: Routing id of this life of the peer.
        spin: Whether there is a core to spare for short waits.
    """

    def __init__(self, end: LaneEnd, identity: bytes, *, spin: bool = False) -> None:
        self._identity = identity
        self._end = end
        self._timeout: float | None = None
        self._spinning = SpinBudget(CHILD_SPIN_SECONDS if spin else 0.0)

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""
        return self._identity

    def send(self, frames: Frames) -> None:
        """Send to the broker; waits while its socket is full, as when it is away for long.

        Raises:
            ClosedError: The broker is gone.
        """
        self._set_timeout(self._timeout or 1.0)
        self._end.write(self._end.pack(frames))

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message, or None after `timeout` seconds.

        Raises:
            ClosedError: The broker is gone.
        """
        self._set_timeout(timeout)
        end = self._end
        start = time.perf_counter()
        packet = None
        if spin := self._spinning.seconds():
            give_up = start + spin
            while (packet := end.read(DONT_WAIT)) is None and time.perf_counter() < give_up:
                os.sched_yield()
        if packet is None:
            packet = end.read()
        self._spinning.observe(time.perf_counter() - start)
        return None if packet is None else end.unpack(packet)

    def lost_for(self) -> float:
        """Return 0.0: `receive` reports at once that a broker is gone."""
        return 0.0

    def trouble(self) -> str:
        """Return "": see `lost_for`."""
        return ""

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()

    def _set_timeout(self, timeout: float) -> None:
        if timeout != self._timeout:
            self._end.set_timeout(timeout)
            self._timeout = timeout


class LaneRouter:
    """The broker's side: a lane per child, and, if there is one, a router for other peers.

    Args:
        router: Carries the messages of all peers that have no lane; closed with this.
        spin: Whether there is a core to spare for short waits.
        spin_seconds: Longest spin, if there is.
    """

    def __init__(
        self,
        router: ZmqRouter | None = None,
        *,
        spin: bool = False,
        spin_seconds: float = BROKER_SPIN_SECONDS,
    ) -> None:
        self._router = router
        self._spinning = SpinBudget(spin_seconds if spin else 0.0)
        self._poller = select.epoll()
        self._lanes: dict[bytes, LaneEnd] = {}
        self._by_fd: dict[int, bytes] = {}
        self._unsent: dict[bytes, deque[bytes]] = {}
        #: Lanes that the last look found readable.
        self._ready: list[int] = []
        #: Whether `wait` has just looked: then `receive` need not look again.
        self._looked = False
        #: Peers whose lanes hung up, until they are dropped.
        self._hung_up: set[bytes] = set()
        self._watched: set[int] = set()
        #: Whether a watched file descriptor was found readable, until somebody asks.
        self._beside = False
        self._closed = False
        if router is not None:
            self._poller.register(router.fileno(), select.EPOLLIN)
        disown_in_forks(self)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers without a lane connect to."""
        return self._router.endpoints if self._router is not None else ()

    def add_lane(self, peer: bytes, end: LaneEnd) -> None:
        """Carry a child's messages over `end` from now on; takes it over."""
        end.set_timeout(None)
        self._lanes[peer] = end
        self._by_fd[end.fileno()] = peer
        self._poller.register(end.fileno(), select.EPOLLIN)

    def drop_lane(self, peer: bytes) -> None:
        """Forget a child that has ended; what it sent and nobody received is lost."""
        end = self._lanes.pop(peer, None)
        self._unsent.pop(peer, None)
        self._hung_up.discard(peer)
        if end is not None:
            self._forget(end.fileno())
            end.close()

    def hung_up(self) -> list[bytes]:
        """Return the peers that are gone and all of whose messages were received."""
        return list(self._hung_up) if self._hung_up else []

    def send(self, peer: bytes, frames: Frames) -> None:
        """Queue `frames` for `peer`; never blocks. Errors as `RouterTransport.send`.

        What is sent to a child that has ended is lost, until `drop_lane`.
        """
        end = self._lanes.get(peer)
        if end is None:
            if self._router is None:
                raise UnknownPeerError(f"no peer {peer!r} is connected")
            self._router.send(peer, frames)
            return
        waiting = self._unsent.get(peer)
        if waiting is not None and len(waiting) >= QUEUE_LIMIT:
            raise QueueFullError(f"the queue to {peer!r} holds {QUEUE_LIMIT} messages")
        try:
            packet = end.pack(frames)
            if waiting is None and end.write(packet):
                return
        except ClosedError:
            return  # lost, as in a ROUTER's queue: the news of its process' end says why
        if waiting is None:
            waiting = self._unsent[peer] = deque()
            self._poller.modify(end.fileno(), select.EPOLLIN | select.EPOLLOUT)
        waiting.append(packet)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message and who sent it, or None if there is none now."""
        while True:
            if not self._ready:
                if not self._looked:
                    self._look(0.0)
                self._looked = False
                if not self._ready:
                    return self._router.receive() if self._router is not None else None
            fd = self._ready.pop()
            peer = self._by_fd.get(fd)
            if peer is None:
                continue
            end = self._lanes[peer]
            try:
                packet = end.read()
                if packet is not None:
                    return peer, end.unpack(packet)
            except ClosedError:
                self._forget(fd)  # its process' end is told by whoever watches over it
                self._hung_up.add(peer)
            except (DecodeError, TransportError) as exc:
                logger.error("what %r sent is unreadable: %s", peer, exc)
                return peer, []  # no header: counted, and answered as malformed

    def user_of(self, frames: Frames) -> str:
        """Return who sent a message, by their key; "" for a child, which needs none."""
        return "" if self._router is None else self._router.user_of(frames)

    @property
    def refused_connections(self) -> int:
        """Connections that the router refused."""
        return 0 if self._router is None else self._router.refused_connections

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""
        # The router's descriptor tells of changes only, and sending may have used one up.
        if self._ready or (self._router is not None and self._router.wait(0.0)):
            return True
        if timeout <= 0:
            return self._look(0.0)
        start = time.perf_counter()
        found = False
        if spin := self._spinning.seconds():
            give_up = start + min(spin, timeout)
            while not (found := self._look(0.0)) and time.perf_counter() < give_up:
                os.sched_yield()
        found = found or self._look(timeout)
        self._spinning.observe(time.perf_counter() - start)
        return found

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait(0.0)` is worth a call."""
        return self._poller.fileno()

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""
        if fd not in self._watched:
            self._watched.add(fd)
            self._poller.register(fd, select.EPOLLIN | select.EPOLLHUP)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; no error if it was not watched."""
        if fd in self._watched:
            self._watched.discard(fd)
            self._forget(fd)

    def take_beside(self) -> bool:
        """Return whether a watched file descriptor was found readable since the last call."""
        found, self._beside = self._beside, False
        return found

    def close(self) -> None:
        """Send what is waiting, as far as there is room, and close all. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._lanes):
            self._flush(peer)
            self.drop_lane(peer)
        self._poller.close()
        if self._router is not None:
            self._router.close()

    def disown(self) -> None:
        """In a forked copy: be closed, and leave the owner's epoll, which both share, alone."""
        self._closed = True
        self._lanes.clear()
        self._by_fd.clear()
        self._unsent.clear()
        self._ready.clear()
        self._poller.close()

    def _look(self, timeout: float) -> bool:
        """Note which lanes are readable and write to those that have room again."""
        if self._closed:
            raise ClosedError("the broker's transport is closed")
        found = self._poller.poll(timeout)
        self._looked = True
        for fd, events in found:
            peer = self._by_fd.get(fd)
            if peer is None:
                self._beside = True
                continue
            if events & ~select.EPOLLOUT:
                self._ready.append(fd)
            if events & select.EPOLLOUT:
                self._flush(peer)
        return bool(found)

    def _flush(self, peer: bytes) -> None:
        waiting, end = self._unsent.get(peer), self._lanes[peer]
        if waiting is None:
            return
        try:
            while waiting and end.write(waiting[0]):
                waiting.popleft()
        except ClosedError:
            waiting.clear()
        if not waiting:
            del self._unsent[peer]
            with contextlib.suppress(OSError, ValueError):  # hung up, and forgotten already
                self._poller.modify(end.fileno(), select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        self._by_fd.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):  # closed by its owner, or never there
            self._poller.unregister(fd)


def _table(count: int) -> struct.Struct:
    """Return the layout of a packet's table; KeyError for a count that no message has."""
    table = _TABLES.get(count)
    if table is None:
        if not 0 < count <= DEFAULT_LIMITS.max_frames + 1:
            raise KeyError(count)
        table = struct.Struct(f"<{count + 1}I")
    return table


def _size(frame: Buffer) -> int:
    return len(frame) if type(frame) is bytes else memoryview(frame).nbytes
