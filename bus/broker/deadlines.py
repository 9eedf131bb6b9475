"""Requests in flight or queued, and their deadlines.

Pure: no socket, clock, thread or process in this file. Who gets a request is decided in
`requests.py`, what follows from its end in `core.py`.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

import msgspec

from envbus.bus.wire.frames import Frames

__all__ = ["LOCAL", "NO_DEADLINE", "Pending", "PendingRequests"]

#: Origin of the requests of the broker's owner; no peer has an empty routing id.
LOCAL = b""

#: What "no deadline" becomes on the bus, where each request has one: some 30 years, in seconds.
NO_DEADLINE = 1e9

#: Dead entries that the heap of deadlines may hold beyond as many as there are live ones.
#: Large enough that rebuilding it is rare, small enough to cost nothing.
_HEAP_SLACK = 256


class Pending(msgspec.Struct, gc=False, eq=False):
    """One unsettled request: queued while `holder` is empty, in flight otherwise."""

    #: Routing id of the peer that asked, or `LOCAL`.
    origin: bytes
    #: The origin's own number for it.
    request_id: int
    #: The broker's number for it, from 1, never used twice; it is on the wire to the holder.
    wire_id: int
    #: Routing id of the peer that has to answer, or empty while queued.
    holder: bytes
    #: Service it was addressed to, or empty if to one peer.
    service: str
    #: Seconds of the caller's clock; finite.
    deadline: float
    #: Seconds it was given, for messages to people.
    timeout: float
    payload_type: str
    #: Payload and buffers, kept only as long as they have to be sent.
    frames: Frames | None = None


class PendingRequests:
    """The unsettled requests. Each leaves by exactly one of `settle`, `expire`, `drop_peer`."""

    def __init__(self) -> None:
        self._requests: dict[int, Pending] = {}
        # Of peers' requests only: the owner is handed its wire_id and can use none twice.
        self._keys: dict[tuple[bytes, int], int] = {}
        #: How many each peer has asked.
        self._asked: dict[bytes, int] = {}
        # Settled requests stay in here until they surface or the heap is rebuilt.
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_deadlines(self) -> int:
        """Entries in the heap of deadlines, dead ones included."""
        return len(self._heap)

    def get(self, wire_id: int) -> Pending | None:
        """Return the unsettled request of that id, if there is one."""
        return self._requests.get(wire_id)

    def has(self, origin: bytes, request_id: int) -> bool:
        """Whether that peer has a request of that id unsettled."""
        return (origin, request_id) in self._keys

    def asked_by(self, origin: bytes) -> int:
        """Return how many requests of that peer are unsettled."""
        return self._asked.get(origin, 0)

    def open(self, pending: Pending) -> None:
        """Add a request.

        Raises:
            ValueError: Its `wire_id`, or its origin's `request_id`, is in use.
        """
        requests = self._requests
        wire_id = pending.wire_id
        if wire_id in requests:
            raise ValueError(f"request {wire_id} is pending already")
        if pending.origin:
            key = (pending.origin, pending.request_id)
            if key in self._keys:
                raise ValueError(f"request {key} is pending already")
            self._keys[key] = wire_id
            self._asked[pending.origin] = self._asked.get(pending.origin, 0) + 1
        requests[wire_id] = pending
        heap = self._heap
        heappush(heap, (pending.deadline, wire_id))
        if len(heap) > 2 * len(requests) + _HEAP_SLACK:
            self._heap = [(entry.deadline, number) for number, entry in requests.items()]
            heapify(self._heap)

    def settle(self, wire_id: int, holder: bytes) -> Pending | None:
        """Take out the request of that id if `holder` holds it; else return None."""
        pending = self._requests.get(wire_id)
        if pending is None or pending.holder != holder:
            return None
        del self._requests[wire_id]
        if pending.origin:
            self._forget_origin(pending)
        return pending

    def expire(self, now: float) -> list[Pending]:
        """Take out and return the requests whose deadline is `now` or before, in that order."""
        expired: list[Pending] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            pending = self._requests.get(heappop(heap)[1])
            if pending is not None:
                self._remove(pending)
                expired.append(pending)
        return expired

    def drop_peer(self, peer: bytes) -> list[Pending]:
        """Take out and return the requests that `peer` holds or asked, oldest first."""
        dropped = [
            pending
            for pending in self._requests.values()
            if pending.holder == peer or pending.origin == peer
        ]
        for pending in dropped:
            self._remove(pending)
        return sorted(dropped, key=lambda pending: pending.wire_id)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next, or None if nothing is unsettled."""
        heap = self._heap
        requests = self._requests
        while heap and heap[0][1] not in requests:
            heappop(heap)
        return heap[0][0] if heap else None

    def unsettled(self) -> list[Pending]:
        """Return all unsettled requests."""
        return list(self._requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the indices disagree."""
        keys = {
            (pending.origin, pending.request_id): wire_id
            for wire_id, pending in self._requests.items()
            if pending.origin
        }
        assert keys == self._keys, "the index by origin differs from the requests"
        asked = Counter(origin for origin, _ in keys)
        assert asked == self._asked, "the counts by origin differ from the requests"
        assert all(wire_id == entry.wire_id for wire_id, entry in self._requests.items()), (
            "a request is filed under another one's id"
        )
        deadlines = set(self._heap)
        assert all(
            (entry.deadline, number) in deadlines for number, entry in self._requests.items()
        ), "a request has no deadline in the heap"

    def _remove(self, pending: Pending) -> None:
        del self._requests[pending.wire_id]
        if pending.origin:
            self._forget_origin(pending)

    def _forget_origin(self, pending: Pending) -> None:
        del self._keys[pending.origin, pending.request_id]
        self._asked[pending.origin] -= 1
        if not self._asked[pending.origin]:
            del self._asked[pending.origin]
