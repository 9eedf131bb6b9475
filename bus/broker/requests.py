"""The life of a request: which peer gets it, or how long it waits, and that it ends exactly once.

Composes `deadlines.py` for `core.py`. Pure: no socket, clock, thread or process in this file.
Leaves out who the peers are and when they are gone.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict

import msgspec

from envbus.bus.broker.control import answer, encoded, read
from envbus.bus.broker.deadlines import LOCAL, Pending, PendingRequests
from envbus.bus.broker.events import (
    Accepted,
    BrokerConfig,
    BrokerStatistics,
    Complete,
    Effect,
    FailLocal,
    Refused,
    Send,
)
from envbus.bus.broker.peers import Peer, Peers, PeerState
from envbus.bus.errors import DecodeError
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import PROTOCOL_VERSION, Failed, FailureCode, Header, Kind

__all__ = ["Dispatcher", "Router"]

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REQUEST = Kind.REQUEST
_READY = PeerState.READY
_SUSPECT = PeerState.SUSPECT
_JOINING = PeerState.JOINING


class Dispatcher:
    """The unsettled requests of one broker, and the peers that get them."""

    def __init__(self, config: BrokerConfig, peers: Peers) -> None:
        self._config = config
        self._max_in_flight = config.max_in_flight_per_peer
        self._peers = peers
        self._find = peers.find
        self.pending = PendingRequests()
        self.router = Router(config.max_backlog)
        self.counts = BrokerStatistics()

    # --- beginning ------------------------------------------------------------------------

    def open(
        self,
        origin: bytes,
        request_id: int,
        to: bytes | str,
        payload_type: str,
        timeout: float,
        frames: Frames,
        now: float,
    ) -> list[Effect]:
        """Send or queue a new request: `[Accepted, ...]`, or `[Refused]`.

        Seven arguments, as this runs for each message and a struct to hold them would cost more
        than all the rest.
        """
        counts = self.counts
        if isinstance(to, bytes):
            peer = self._find(to)
        elif to in self.router:
            return self._open_for_service(
                Pending(
                    origin,
                    request_id,
                    0,
                    b"",
                    to,
                    now + timeout,
                    timeout,
                    payload_type,
                    frames,
                ),
                now,
            )
        else:
            peer = self._peers.by_name(to)
        if peer is None or peer.state is _JOINING:
            return self._refuse_no_peer(to, peer)
        if peer.in_flight >= self._max_in_flight:
            counts.overloaded += 1
            return [
                Refused(
                    FailureCode.OVERLOADED,
                    f"{peer.name} has {peer.in_flight} requests in flight, which is the limit; "
                    "wait for some, or raise max_in_flight_per_peer",
                )
            ]
        counts.accepted = wire_id = counts.accepted + 1
        identity = peer.identity
        self.pending.open(
            Pending(origin, request_id, wire_id, identity, "", now + timeout, timeout, payload_type)
        )
        peer.in_flight += 1
        header = Header(PROTOCOL_VERSION, _REQUEST, wire_id, payload_type, timeout)
        return [Accepted(wire_id), Send(identity, header, frames, wire_id)]

    def _open_for_service(self, pending: Pending, now: float) -> list[Effect]:
        service = pending.service
        counts = self.counts
        wire_id = counts.accepted + 1
        peer = self.router.pick(service)
        if peer is None:
            if not self.router.has_ready(service):
                return self._refuse_no_peer(service, None)
            most = self._max_in_flight + self._config.max_backlog
            if pending.origin and self.pending.asked_by(pending.origin) >= most:
                counts.overloaded += 1
                return [
                    Refused(
                        FailureCode.OVERLOADED,
                        f"{most} requests of this peer are unsettled, and this one would have to "
                        "wait; wait for some of them, or raise max_backlog",
                    )
                ]
            if not self.router.enqueue(service, wire_id):
                counts.overloaded += 1
                return [
                    Refused(
                        FailureCode.OVERLOADED,
                        f"{self._config.max_backlog} requests wait for {service!r}, which is the "
                        "limit; add peers, ask less, or raise max_backlog",
                    )
                ]
        counts.accepted = pending.wire_id = wire_id
        self.pending.open(pending)
        if peer is None:
            return [Accepted(wire_id)]
        return [Accepted(wire_id), self._assign(pending, peer, now)]

    def _assign(self, pending: Pending, peer: Peer, now: float) -> Send:
        """Give a request of a service to a peer."""
        frames = pending.frames
        assert frames is not None, f"request {pending.wire_id} was sent already"
        pending.holder = peer.identity
        pending.frames = None  # the buffers may be large and are not needed again
        peer.in_flight += 1
        header = Header(
            PROTOCOL_VERSION,
            _REQUEST,
            pending.wire_id,
            pending.payload_type,
            pending.deadline - now,
        )
        return Send(peer.identity, header, frames, pending.wire_id)

    def _refuse_no_peer(self, to: bytes | str, peer: Peer | None) -> list[Effect]:
        self.counts.no_peer += 1
        if peer is not None:
            text = f"{peer.name} was started and did not say hello yet"
        elif isinstance(to, str) and to in self.router:
            names = ", ".join(member.name for member in self.router.members(to))
            text = f"no peer that offers {to!r} is ready; silent or unreachable: {names}"
        else:
            text = f"no peer has the name or offers the service {to!r}"
        return [Refused(FailureCode.NO_PEER, text)]

    def pull(self, peer: Peer, now: float) -> list[Effect]:
        """Send what waits for the peer, as far as it has room."""
        effects: list[Effect] = []
        while peer.state is _READY and peer.in_flight < peer.capacity:
            wire_id = self.router.dequeue(peer)
            if wire_id is None:
                break
            pending = self.pending.get(wire_id)
            assert pending is not None, f"request {wire_id} waits though it is settled"
            if pending.deadline <= now:
                # No answer to it can be under way, so it need not wait for the Tick.
                self.pending.settle(wire_id, b"")
                effects.append(self._time_out(pending))
            else:
                effects.append(self._assign(pending, peer, now))
        return effects

    # --- end by the holder ----------------------------------------------------------------

    def on_reply(self, peer: Peer, header: Header, frames: Frames, now: float) -> list[Effect]:
        """A peer says that it has done a request."""
        pending = self.pending.settle(header.request_id, peer.identity)
        if pending is None:
            self._count_stray(peer, header.request_id)
            return []
        self.counts.replies += 1
        peer.in_flight -= 1
        effect = (
            _forward(pending, header, frames)
            if pending.origin
            else Complete(pending.wire_id, header, frames)
        )
        if self.router.num_queued:
            return [effect, *self.pull(peer, now)]
        return [effect]

    def on_failure(self, peer: Peer, header: Header, frames: Frames, now: float) -> list[Effect]:
        """A peer says that it could not do a request."""
        pending = self.pending.settle(header.request_id, peer.identity)
        if pending is None:
            self._count_stray(peer, header.request_id)
            return []
        self.counts.failures += 1
        peer.in_flight -= 1
        try:
            failed = read(Failed, frames)
        except DecodeError as error:
            text = f"{pending.payload_type} failed; {error}"
            failed = Failed(code=FailureCode.PROTOCOL, message=text)
            frames = encoded(failed)
        if not pending.origin:
            told = msgspec.structs.replace(failed, peer=peer.name)
            return [FailLocal(pending.wire_id, told), *self.pull(peer, now)]
        if failed.code is FailureCode.NOT_JOINED:
            # Only the broker may tell a peer that, who gives up all that it has asked then.
            frames = encoded(msgspec.structs.replace(failed, code=FailureCode.PROTOCOL))
        return [_forward(pending, header, frames), *self.pull(peer, now)]

    def _count_stray(self, peer: Peer, wire_id: int) -> None:
        """Count an answer that settles nothing, and drop it."""
        counts = self.counts
        if wire_id in peer.overdue:
            del peer.overdue[wire_id]
            counts.late_replies += 1
        elif not 0 < wire_id <= counts.accepted:
            counts.unknown_replies += 1
        elif self.pending.get(wire_id) is not None:
            counts.foreign_replies += 1
        else:
            counts.duplicate_replies += 1

    # --- end without the holder -----------------------------------------------------------

    def expire(self, now: float) -> list[Effect]:
        """Fail the requests whose deadline is there, and send what they kept waiting."""
        expired = self.pending.expire(now)
        effects: list[Effect] = [self._time_out(pending) for pending in expired]
        return effects + self._release(expired, now)

    def cancel(self, wire_id: int, now: float) -> list[Effect]:
        """Forget a local request; nothing happens if it has ended already."""
        pending = self.pending.get(wire_id)
        if pending is None or pending.origin:
            return []
        self.pending.settle(wire_id, pending.holder)
        self.counts.cancelled += 1
        return self._release([pending], now)

    def unsendable(
        self, identity: bytes, wire_id: int, code: FailureCode, message: str
    ) -> list[Effect]:
        """End a request that its holder never got."""
        pending = self.pending.settle(wire_id, identity) if wire_id else None
        if pending is None:
            self.counts.unsendable += 1
            return []
        peer = self._find(identity)
        assert peer is not None, f"request {wire_id} was held by nobody"
        peer.in_flight -= 1
        if peer.state is _READY:
            # It cannot be reached or does not read: no new work until it is heard again. This
            # also keeps the backlog from being failed, one by one, at a queue that is full.
            peer.state = _SUSPECT
        self.counts.failures += 1
        text = f"{pending.payload_type} was not sent to {peer.name}: {message}"
        return [self._fail(pending, code, text, peer.name)]

    def leave(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Fail what a peer held, forget what it asked.

        It has to be out of the peers already.
        """
        identity = peer.identity
        orphans = self.router.leave(peer)
        effects: list[Effect] = []
        unwanted: list[Pending] = []
        for pending in self.pending.drop_peer(identity):
            if pending.origin == identity:
                self.counts.cancelled += 1
                if not pending.holder and pending.wire_id in orphans:
                    orphans.remove(pending.wire_id)
                elif pending.holder != identity:
                    unwanted.append(pending)
            else:
                effects.append(self._lose(pending, peer, reason))
        for wire_id in orphans:
            orphan = self.pending.settle(wire_id, b"")
            assert orphan is not None, f"request {wire_id} waited though it was settled"
            effects.append(self._lose(orphan, peer, reason))
        return effects + self._release(unwanted, now)

    def _release(self, unanswered: list[Pending], now: float) -> list[Effect]:
        """Free the places of requests that were taken out, in backlogs and at their holders."""
        holders: dict[bytes, Peer] = {}
        for pending in unanswered:
            if not pending.holder:
                self.router.withdraw(pending.service, pending.wire_id)
                continue
            holder = self._find(pending.holder)
            assert holder is not None, f"request {pending.wire_id} was held by nobody"
            holder.in_flight -= 1
            holder.add_overdue(pending.wire_id)
            holders[pending.holder] = holder
        # Only now, when nothing is left in a backlog that is settled already.
        return [effect for holder in holders.values() for effect in self.pull(holder, now)]

    def _time_out(self, pending: Pending) -> Effect:
        self.counts.timeouts += 1
        holder = self._find(pending.holder) if pending.holder else None
        if holder is None:
            name = ""
            text = f"it still waited for a free peer of {pending.service!r}; add peers or ask less"
        else:
            name = holder.name
            text = f"raise the timeout, or look at what {name} is doing"
        message = f"{pending.payload_type} timed out after {pending.timeout:g} s; {text}"
        return self._fail(pending, FailureCode.TIMEOUT, message, name)

    def _lose(self, pending: Pending, peer: Peer, reason: str) -> Effect:
        self.counts.lost += 1
        if pending.holder:
            code, text = FailureCode.PEER_LOST, f"{peer.name}, which held it, is gone: {reason}"
        else:
            code = FailureCode.NO_PEER
            text = f"the last peer of {pending.service!r}, {peer.name}, is gone: {reason}"
        return self._fail(pending, code, f"{pending.payload_type} failed; {text}", peer.name)

    def _fail(self, pending: Pending, code: FailureCode, message: str, peer: str) -> Effect:
        """Return the effect that tells the origin; the request was taken out already."""
        failed = Failed(code=code, message=message, peer=peer)
        if pending.origin == LOCAL:
            return FailLocal(pending.wire_id, failed)
        return answer(pending.origin, Kind.FAILURE, pending.request_id, failed)

    def check_invariants(self) -> None:
        """Raise AssertionError if requests, backlogs and peers disagree."""
        self.pending.check_invariants()
        self.router.check_invariants()
        queued = self.router.queued()
        held: dict[bytes, int] = {}
        for pending in self.pending.unsettled():
            number = pending.wire_id
            assert math.isfinite(pending.deadline), f"request {number} has no deadline"
            assert 0 < number <= self.counts.accepted, f"request {number} was never accepted"
            assert pending.origin == LOCAL or self._find(pending.origin) is not None, (
                f"request {number} was asked by somebody who is gone"
            )
            if pending.holder:
                assert number not in queued, f"request {number} is queued and in flight"
                held[pending.holder] = held.get(pending.holder, 0) + 1
            else:
                assert queued.pop(number, None) == pending.service, f"request {number} is nowhere"
                assert pending.frames is not None, f"request {number} cannot be sent any more"
        assert not queued, "a settled request waits in a backlog"
        for peer in self._peers:
            assert peer.in_flight == held.pop(peer.identity, 0), (
                f"{peer.name} holds another number of requests than {peer.in_flight}"
            )
            assert peer.in_flight <= self._max_in_flight, f"{peer.name} holds too many requests"
            assert peer.state is not _JOINING or peer.in_flight == 0, (
                f"{peer.name} holds requests and said no hello"
            )
        assert not held, "a peer that is gone holds requests"
        counts = self.counts
        ended = counts.replies + counts.failures + counts.timeouts + counts.lost + counts.cancelled
        assert counts.accepted == ended + len(self.pending), "a request ended twice or never"


def _forward(pending: Pending, header: Header, frames: Frames) -> Send:
    """Return the answer for the peer that asked, under its own request id."""
    forwarded = Header(
        PROTOCOL_VERSION,
        header.kind,
        pending.request_id,
        header.payload_type,
        0.0,
        header.incarnation,
    )
    return Send(pending.origin, forwarded, frames)


# --- which peer of a service gets a request, and the bounded backlog of those that must wait ----


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

    def enqueue(self, service: str, wire_id: int) -> bool:
        """Queue a request; return False if the backlog is full."""
        backlog = self._services[service].backlog
        if len(backlog) >= self._max_backlog:
            return False
        backlog[wire_id] = None
        self.num_queued += 1
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
            assert service.members, f"nobody offers {name}, and it is still known"
            names = [peer.name for peer in service.members]
            assert names == sorted(set(names)), f"the peers of {name} are not in order"
            assert len(service.backlog) <= self._max_backlog, f"the backlog of {name} is too long"
            assert not service.backlog or self.pick(name) is None, (
                f"requests for {name} wait though a peer is free"
            )
            queued += len(service.backlog)
        assert queued == self.num_queued, f"{queued} requests are queued, not {self.num_queued}"


def _name(peer: Peer) -> str:
    return peer.name
