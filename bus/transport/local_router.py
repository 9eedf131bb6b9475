"""The broker's side of local links: one per child or local peer, and a router for all others.

Leaves out how messages become packets, and who may come in (`local_link.py`, `local_listener.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections import deque
from typing import Final

from envbus.bus.complaints import Complaints
from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    QueueFullError,
    TransportError,
    UnknownPeerError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import interruptible
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.curve_keys import Entrance
from envbus.bus.transport.interface import QUEUE_BYTES
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST, LocalLinkEnd
from envbus.bus.transport.local_listener import LocalListener, StreamEnd
from envbus.bus.transport.spinning import BROKER_SPIN_SECONDS, SpinBudget
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.bus.wire.frames import Buffer, Frames

__all__ = ["QUEUE_LIMIT", "LocalRouter", "with_local_links"]

logger = logging.getLogger("envbus.bus.transport.local_router")

#: Messages waiting for room in the socket, per peer; as many as the ROUTER's queue holds.
QUEUE_LIMIT: Final = 1000
#: Messages of the router's peers between two looks at local links that have been silent, at most: a
#: look costs as much as a message.
_FAR_AT_ONE_GO: Final = 16
#: Messages that peers of streams which send many at once may have until local links are looked at
#: again: tens of thousands may have come at one go, and others wait behind them.
_LOCAL_AT_ONE_GO: Final = 16
#: Links of peers that have come in, at one time; who comes later is cut off, and uses ZeroMQ.
_MAX_LOCAL: Final = 1024


class _Link:
    """A local link to one peer, and what waits for room in it."""

    __slots__ = ("end", "fd", "is_child", "peer", "queued", "unsent")

    def __init__(self, peer: bytes, end: LocalLinkEnd | StreamEnd, *, is_child: bool) -> None:
        self.peer = peer
        self.end = end
        self.fd = end.fileno()
        #: Whether somebody watches over its process; else it has come in by itself.
        self.is_child = is_child
        #: Packets that wait, and their bytes; None: there is room.
        self.unsent: deque[bytes] | None = None
        self.queued = 0


class LocalRouter:
    """A local link per child and local peer, and, if there is one, a router for other peers.

    Args:
        router: Carries the messages of all peers that have no local link; closed with this.
        listener: Where peers come in that are no children of this process; closed with this.
        spin: Whether there is a core to spare for short waits.
        spin_seconds: Longest spin, if there is.
    """

    def __init__(
        self,
        router: ZmqRouter | None = None,
        *,
        listener: LocalListener | None = None,
        spin: bool = False,
        spin_seconds: float = BROKER_SPIN_SECONDS,
    ) -> None:
        self._router = router
        self._listener = listener
        #: Whether the router's descriptor, which tells of changes only, will tell of the next one:
        #: nothing was there at the last look, and nothing was sent or bound, which may use one up.
        self._is_armed = False
        #: Messages that the router may have before local links are looked at again.
        self._credit = 0
        #: Whether local links were served since the router had its turn.
        self._owed = False
        self._spinning = SpinBudget(spin_seconds if spin else 0.0)
        self._poller = select.epoll()
        self._links: dict[bytes, _Link] = {}
        #: Those that may have something, by descriptor.
        self._by_fd: dict[int, _Link] = {}
        #: Peers in other processes; who spins for one of this process holds it up.
        self._elsewhere: set[bytes] = set()
        #: Packets for streams that are kept for each other; None: they go at once.
        self._held: dict[bytes, list[bytes]] | None = None
        #: Links that the last look found readable.
        self._ready: list[int] = []
        #: Streams whose next message is here already, and waits for the next look.
        self._aside: set[int] = set()
        #: Messages behind which there was another one.
        self._followed = 0
        #: Whether `wait` has just looked: then `receive` need not look again.
        self._looked = False
        #: Children whose links hung up, until they are dropped.
        self._hung_up: set[bytes] = set()
        self._watched: set[int] = set()
        #: Whether a watched file descriptor was found readable, until somebody asks.
        self._beside = False
        self._complaints = Complaints(logger)
        self._closed = False
        if router is not None:
            self._poller.register(router.fileno(), select.EPOLLIN)
        self._listening = -1 if listener is None else listener.fileno()
        if listener is not None:
            self._poller.register(self._listening, select.EPOLLIN)
        disown_in_forks(self)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers without a local link connect to."""
        return self._router.endpoints if self._router is not None else ()

    @property
    def own_tcp(self) -> Entrance | None:
        """As `ZmqRouter.own_tcp`; there is a local link beside it."""
        return None if self._router is None else self._router.own_tcp

    def bind_private(self, endpoint: str) -> None:
        """Bind an endpoint as `ZmqRouter.bind_private` does, with a local link beside it."""
        if self._router is None:
            raise TransportError(f"cannot bind {endpoint}: this broker has local links only")
        self._is_armed = False
        self._router.bind_private(endpoint)
        if self._listener is not None:
            self._listener.offer(endpoint)

    def add_local_link(self, peer: bytes, end: LocalLinkEnd) -> None:
        """Carry a child's messages over `end` from now on; takes it over."""
        end.set_timeout(None)
        self._add(_Link(peer, end, is_child=True))
        self._elsewhere.add(peer)

    def drop_local_link(self, peer: bytes) -> None:
        """Forget a peer that has ended; what it sent and nobody received is lost."""
        link = self._links.pop(peer, None)
        self._hung_up.discard(peer)
        self._elsewhere.discard(peer)
        if link is not None:
            self._forget(link.fd)
            link.end.close()

    def hung_up(self) -> list[bytes]:
        """Return the children that are gone and all of whose messages were received."""
        return list(self._hung_up) if self._hung_up else []

    def send(self, peer: bytes, frames: Frames) -> None:
        """Queue `frames` for `peer`; never blocks. Errors as `RouterTransport.send`.

        What is sent to a child that has ended is lost, until `drop_local_link`.
        """
        link = self._links.get(peer)
        if link is None:
            if self._router is None:
                raise UnknownPeerError("this peer is not connected")
            self._is_armed = False
            self._router.send(peer, frames)
            return
        waiting = link.unsent
        if waiting is not None and (len(waiting) >= QUEUE_LIMIT or link.queued >= QUEUE_BYTES):
            raise QueueFullError(
                f"{len(waiting)} messages of {link.queued} bytes wait for this peer, which "
                "does not read"
            )
        packet = link.end.pack(frames)
        if self._held is not None and waiting is None and type(link.end) is StreamEnd:
            self._held.setdefault(peer, []).append(packet)
        else:
            self._write(link, packet)

    def hold(self) -> None:
        """Keep messages for streams until `release`: many small writes cost more than one."""
        if self._held is None:
            self._held = {}

    def release(self) -> None:
        """Write what was kept."""
        held, self._held = self._held, None
        for peer, packets in (held or {}).items():
            link = self._links.get(peer)
            if link is not None:
                self._write(link, b"".join(packets))

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message and who sent it, or None if there is none now."""
        is_far_empty = False
        while True:
            if not self._ready:
                # Links that always have something must not keep the router's peers waiting, and
                # those need not wait for looks at links that have nothing.
                if self._owed or self._credit > 0:
                    owed, self._owed = self._owed, False
                    self._credit -= not owed
                    if (message := self._receive_far()) is not None:
                        return message
                    is_far_empty, self._credit = True, 0
                    if self._looked:
                        self._looked = False
                        return None
                if not self._looked:
                    self._look(0.0)
                self._looked = False
                if not self._ready:
                    if is_far_empty or (message := self._receive_far()) is None:
                        return None
                    self._credit = _FAR_AT_ONE_GO
                    return message
            fd = self._ready.pop()
            link = self._by_fd.get(fd)
            if link is None:
                continue
            self._owed = True
            end = link.end
            try:
                frames = end.receive()
                if end.has_more:
                    self._followed += 1
                    if self._followed % _LOCAL_AT_ONE_GO:
                        self._ready.append(fd)
                    else:
                        self._aside.add(fd)
                        self._looked = False
                if frames is not None:
                    return link.peer, frames
            except ClosedError:
                self._lose(link)
            except (DecodeError, TransportError) as exc:
                self._complaints.add("unreadable", f"what {link.peer!r} sent is unreadable: {exc}")
                if not link.is_child:
                    self.drop_local_link(link.peer)
                return link.peer, []  # no header: counted, and answered as malformed

    def user_of(self, frames: Frames) -> str:
        """Return who sent a message, by their key; "" for a child, which needs none."""
        return "" if self._router is None else self._router.user_of(frames)

    @property
    def refused_connections(self) -> int:
        """Connections that the router refused."""
        return 0 if self._router is None else self._router.refused_connections

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for peers which do not read."""
        far = 0 if self._router is None else self._router.queued_bytes
        return sum(link.queued for link in self._links.values()) + far

    @property
    def hides_messages(self) -> bool:
        """Whether the router has some: of those of local links the descriptor tells in any case."""
        return not self._is_armed and self._router is not None and self._router.hides_messages

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""
        if self._ready or self._aside:
            return True
        if not self._is_armed and self._router is not None and self._router.wait(0.0):
            return True
        if timeout <= 0:
            return self._look(0.0)
        start = time.perf_counter()
        found = False
        if self._elsewhere and (spin := self._spinning.seconds()):
            give_up = start + min(spin, timeout)
            while not (found := self._look(0.0)) and time.perf_counter() < give_up:
                os.sched_yield()
        slept = not found
        found = found or self._look(timeout)
        self._spinning.observe(time.perf_counter() - start, slept=slept)
        return found

    def ring(self, peer: bytes) -> None:
        """Wake a child that sleeps, and that a word in shared memory asks."""
        link = self._links.get(peer)
        if link is not None and isinstance(link.end, LocalLinkEnd):
            link.end.ring()

    def doze(self, timeout: float) -> bool:
        """Sleep until a child rings, at most `timeout` seconds.

        Returns:
            Whether one did, and nothing else has come that `wait` and `receive` would tell of.

        Raises:
            ClosedError: It was closed, also by a signal's handler meanwhile.
        """
        if self._ready or self._aside:
            return False
        try:
            found = self._poller.poll(timeout)
        except (OSError, ValueError) as exc:
            if not self._closed:
                raise
            raise ClosedError("a signal's handler has closed the broker's transport") from exc
        rung = bool(found)
        for fd, _ in found:
            link = self._by_fd.get(fd)
            end = None if link is None else link.end
            if not isinstance(end, LocalLinkEnd) or not end.take_ring():
                rung = False
        return rung

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
        for link in list(self._links.values()):
            self._flush(link)
            self.drop_local_link(link.peer)
        self._poller.close()
        if self._listener is not None:
            self._listener.close()
        if self._router is not None:
            self._router.close()

    def disown(self) -> None:
        """In a forked copy: be closed, and leave the owner's epoll, which both share, alone."""
        self._closed = True
        self._links.clear()
        self._by_fd.clear()
        self._ready.clear()
        self._aside.clear()
        self._poller.close()

    def _look(self, timeout: float) -> bool:
        """Note which local links are readable and write to those that have room again."""
        if self._closed:
            raise ClosedError("the broker's transport is closed")
        if timeout > 0:
            try:
                with interruptible():  # what it has found is found again
                    found = self._poller.poll(timeout)
            except (OSError, ValueError) as exc:
                if not self._closed:
                    raise
                raise ClosedError("a signal's handler has closed the broker's transport") from exc
        else:
            found = self._poller.poll(0.0)
        self._looked = True
        for fd, events in found:
            link = self._by_fd.get(fd)
            if link is None:
                if fd == self._listening:
                    self._let_in()
                else:
                    self._beside = True
                continue
            if events & ~select.EPOLLOUT:
                self._ready.append(fd)
            if events & select.EPOLLOUT:
                self._flush(link)
        if self._aside:
            self._ready += self._aside.difference(self._ready)
            self._aside.clear()
        return bool(found)

    def _write(self, link: _Link, packet: bytes) -> None:
        """Send a packet, or queue it. To who is gone it is lost, as in a ROUTER's queue."""
        end, waiting = link.end, link.unsent
        try:
            written = waiting is None and end.write(packet)
        except ClosedError:
            return  # `receive` finds out, and who watches over it
        if written and not end.has_begun:
            return
        if waiting is None:
            waiting = link.unsent = deque()
            self._poller.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)
        if not written:
            waiting.append(packet)
            link.queued += len(packet)

    def _flush(self, link: _Link) -> None:
        waiting, end = link.unsent, link.end
        if waiting is None:
            return
        try:
            while waiting and end.write(waiting[0]):
                link.queued -= len(waiting.popleft())
            finished = end.finish() and not waiting
        except ClosedError:
            finished = True
        except TransportError:  # no memory or descriptor for a large one: it is tried again
            return
        if finished:
            link.unsent, link.queued = None, 0
            with contextlib.suppress(OSError, ValueError):  # hung up, and forgotten already
                self._poller.modify(link.fd, select.EPOLLIN)

    def _receive_far(self) -> tuple[bytes, list[Buffer]] | None:
        if self._router is None:
            return None
        self._is_armed = False  # also where it is broken off
        message = self._router.receive()
        self._is_armed = message is None
        return message

    def _let_in(self) -> None:
        """Take over those who have come in and said who they are; the newest of a name counts."""
        assert self._listener is not None
        for peer, end in self._listener.arrivals():
            former = self._links.get(peer)
            if former is not None and former.is_child:  # whose name is not to be had
                end.close()
                continue
            self.drop_local_link(peer)
            if sum(not link.is_child for link in self._links.values()) >= _MAX_LOCAL:
                end.close()
                continue
            if not end.is_of_this_process():
                self._elsewhere.add(peer)
            link = _Link(peer, end, is_child=False)
            self._add(link)
            if end.has_more:
                self._ready.append(link.fd)

    def _add(self, link: _Link) -> None:
        self._poller.register(link.fd, select.EPOLLIN)
        self._links[link.peer] = self._by_fd[link.fd] = link

    def _lose(self, link: _Link) -> None:
        """The other side of a local link is gone."""
        if not link.is_child:
            self.drop_local_link(link.peer)  # it may come back, by this way or another
            return
        self._forget(link.fd)  # its process' end is told by whoever watches over it
        self._hung_up.add(link.peer)
        self._elsewhere.discard(link.peer)

    def _forget(self, fd: int) -> None:
        self._by_fd.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):  # closed by its owner, or never there
            self._poller.unregister(fd)


def with_local_links(router: ZmqRouter) -> LocalRouter | ZmqRouter:
    """Return what also lets peers of this user and host in without ZeroMQ, if that can be.

    For a router without keys only: a local link does not ask for any.
    """
    if not LOCAL_LINKS_EXIST:
        return router
    listener = LocalListener(router.endpoints)
    if (own := router.own_tcp) is not None and own.endpoint not in router.endpoints:
        listener.offer(own.endpoint)
    return LocalRouter(router, listener=listener, spin=usable_cores() > 1)
