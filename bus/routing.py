"""Which peer of a service gets a request, and the bounded backlog of those that must wait.

Pure: no socket, clock, thread or process in this file. Knows requests by their number only.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from envbus.bus.invariants import expect
from envbus.bus.peers import Peer, PeerState

__all__ = ["Router"]


class _Service:
    """The peers that offer one service, and what waits for them."""

    def __init__(self) -> None:
        #: Sorted by name, so that the first of the least loaded ones wins ties by name.
        self.members: list[Peer] = []
        #: Ids of queued requests, the next one first. A dict, so that any can be taken out.
        self.backlog: OrderedDict[int, None] = OrderedDict()


class Router:
    """Services, their peers and their backlogs.

    A service is known as long as a peer offers it, ready or suspected.
    """

    def __init__(self, max_backlog: int) -> None:
        self._max_backlog = max_backlog
        self._services: dict[str, _Service] = {}
        #: Requests queued, over all services.
        self.num_queued = 0
        #: Most requests that were queued at one time.
        self.high_water = 0

    def __contains__(self, service: object) -> bool:
        return service in self._services

    def join(self, peer: Peer) -> None:
        """The peer offers its services from now on."""
        for name in peer.services:
            service = self._services.setdefault(name, _Service())
            insort(service.members, peer, key=_name)

    def leave(self, peer: Peer) -> list[int]:
        """The peer offers nothing any more; return the requests that now wait for nobody."""
        orphans: list[int] = []
        for name in peer.services:
            service = self._services[name]
            service.members.remove(peer)
            if not service.members:
                del self._services[name]
                orphans += service.backlog
                self.num_queued -= len(service.backlog)
        return orphans

    def members(self, service: str) -> list[Peer]:
        """Return the peers that offer the service, by name."""
        known = self._services.get(service)
        return list(known.members) if known else []

    def has_ready(self, service: str) -> bool:
        """Whether a READY peer offers the service, busy or not."""
        known = self._services.get(service)
        return known is not None and any(peer.state is PeerState.READY for peer in known.members)

    def pick(self, service: str) -> Peer | None:
        """Return the least loaded READY peer with room for one more request, if there is one."""
        known = self._services.get(service)
        if known is None:
            return None
        best: Peer | None = None
        for peer in known.members:
            if (
                peer.state is PeerState.READY
                and peer.in_flight < peer.capacity
                and (best is None or peer.load < best.load)
            ):
                best = peer
        return best

    def enqueue(self, service: str, wire_id: int, *, first: bool = False) -> bool:
        """Queue a request, last or first; return False if the backlog is full."""
        backlog = self._services[service].backlog
        if len(backlog) >= self._max_backlog:
            return False
        backlog[wire_id] = None
        if first:
            backlog.move_to_end(wire_id, last=False)
        self.num_queued += 1
        self.high_water = max(self.high_water, self.num_queued)
        return True

    def dequeue(self, peer: Peer) -> int | None:
        """Take out the oldest request that waits for a service of the peer, if there is one."""
        oldest: OrderedDict[int, None] | None = None
        for name in peer.services:
            backlog = self._services[name].backlog
            if backlog and (oldest is None or next(iter(backlog)) < next(iter(oldest))):
                oldest = backlog
        if oldest is None:
            return None
        self.num_queued -= 1
        return oldest.popitem(last=False)[0]

    def withdraw(self, service: str, wire_id: int) -> None:
        """Take one request out of the backlog."""
        del self._services[service].backlog[wire_id]
        self.num_queued -= 1

    def queued(self) -> dict[int, str]:
        """Return the service that each queued request waits for."""
        return {
            wire_id: name for name, service in self._services.items() for wire_id in service.backlog
        }

    def check_invariants(self) -> None:
        """Raise AssertionError if a limit is exceeded or work waits beside a free peer."""
        queued = 0
        for name, service in self._services.items():
            expect(bool(service.members), f"nobody offers {name}, and it is still known")
            names = [peer.name for peer in service.members]
            expect(names == sorted(set(names)), f"the peers of {name} are not in order")
            expect(len(service.backlog) <= self._max_backlog, f"the backlog of {name} is too long")
            expect(
                not service.backlog or self.pick(name) is None,
                f"requests for {name} wait though a peer is free",
            )
            queued += len(service.backlog)
        expect(queued == self.num_queued, f"{queued} requests are queued, not {self.num_queued}")


def _name(peer: Peer) -> str:
    return peer.name
