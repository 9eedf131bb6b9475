"""What the broker does about each event: events in, effects out.

Composes `peers.py`, `pending.py` and `routing.py`. Pure: no socket, clock, thread or process in
this file; `broker.py` owns those. Payloads stay opaque, save those of the broker's own control
messages (Hello, Heartbeat, Goodbye, Failed), which hold no arrays.

Rules:

- Each accepted request ends exactly once: in a reply, or in a failure.
- Deadlines and leases are judged on `Tick` only, which the shell sends after it drained its
  socket, so that a driver that was busy for a minute sees the answers before it judges anybody.
- At most once: nothing is sent twice, save an idempotent `Ask` for a service whose holder is
  lost, which goes to another peer, once.
- A peer's bad input is counted, logged once per peer, answered, and changes nothing else.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from envbus.bus.broker_vocabulary import (
    Accepted,
    Ask,
    BrokerConfig,
    BrokerStatistics,
    Cancel,
    Complete,
    Effect,
    Event,
    Expect,
    FailLocal,
    Log,
    Malformed,
    Notify,
    PeerGone,
    PeerLeft,
    PeerReady,
    Received,
    Refused,
    Send,
    Tick,
    Unsendable,
)
from envbus.bus.invariants import expect
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Welcome,
)
from envbus.bus.peers import Peer, Peers, PeerState
from envbus.bus.pending import LOCAL, Pending, PendingRequests
from envbus.bus.routing import Router
from envbus.bus.transport import Frames

__all__ = [
    "Accepted",
    "Ask",
    "BrokerConfig",
    "BrokerCore",
    "BrokerStatistics",
    "Cancel",
    "Complete",
    "Effect",
    "Event",
    "Expect",
    "FailLocal",
    "Log",
    "Malformed",
    "Notify",
    "PeerGone",
    "PeerLeft",
    "PeerReady",
    "Received",
    "Refused",
    "Send",
    "Tick",
    "Unsendable",
]

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REQUEST = Kind.REQUEST
_REPLY = Kind.REPLY
_FAILURE = Kind.FAILURE
_NOTICE = Kind.NOTICE
_READY = PeerState.READY
_SUSPECT = PeerState.SUSPECT
_JOINING = PeerState.JOINING
_INFINITY = math.inf

_ENCODER = msgspec.msgpack.Encoder()
_HELLO = msgspec.msgpack.Decoder(Hello)
_HEARTBEAT = msgspec.msgpack.Decoder(Heartbeat)
_FAILED = msgspec.msgpack.Decoder(Failed)

#: Peers whose first complaint is remembered, so that each is logged once. Strangers choose
#: their identities, so it has to end somewhere.
_MAX_COMPLAINTS = 1024
#: Longest name of a peer or service, and most services of one peer: longer ones are no names.
_MAX_NAME_CHARS = 256
_MAX_SERVICES = 64


class BrokerCore:
    """The decisions of one broker.

    `handle` never blocks and never raises for what a peer does; AssertionError is a bug of the
    caller or of this class.
    """

    def __init__(self, config: BrokerConfig | None = None) -> None:
        self._config = config = config or BrokerConfig()
        self._peers = Peers()
        self._find = self._peers.find
        self._pending = PendingRequests()
        self._router = Router(config.max_backlog)
        self._max_in_flight = config.max_in_flight_per_peer
        self._next_wire_id = 1
        self._complained: OrderedDict[bytes, None] = OrderedDict()
        self._counts = _Counts()
        # Any: each handler takes its own event; `handle` is what callers' types are checked by.
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            Ask: self._on_ask,
            Received: self._on_received,
            Malformed: self._on_malformed,
            PeerGone: self._on_peer_gone,
            Unsendable: self._on_unsendable,
            Expect: self._on_expect,
            Cancel: self._on_cancel,
            Tick: self._on_tick,
        }

    def __repr__(self) -> str:
        return (
            f"<BrokerCore peers={len(self._peers)} pending={len(self._pending)} "
            f"queued={self._router.num_queued}>"
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return what to do about `event`, in order.

        Args:
            event: What happened.
            now: Seconds of the caller's monotonic clock; must not go back.
        """
        return self._handlers[type(event)](event, now)

    def wake_at(self) -> float | None:
        """Return by when a `Tick` is due, or None if nothing will be.

        Waking up earlier is harmless; after a `Tick` at `now` it is later than `now`.
        """
        deadline = self._pending.next_deadline()
        lease = self._peers.next_check()
        if deadline is None or lease is None:
            return lease if deadline is None else deadline
        return min(deadline, lease)

    def peer_name(self, peer: bytes) -> str | None:
        """Return the name of the peer of that identity, expected ones included."""
        found = self._find(peer)
        return None if found is None else found.name

    def peer_state(self, peer: bytes) -> PeerState:
        """Return the state of the peer of that identity; GONE if there is none."""
        found = self._find(peer)
        return PeerState.GONE if found is None else found.state

    def statistics(self) -> BrokerStatistics:
        """Return the counts so far."""
        counts = self._counts
        queued = self._router.num_queued
        return BrokerStatistics(
            ready_peers_now=self._peers.count(_READY),
            suspect_peers_now=self._peers.count(_SUSPECT),
            joining_peers_now=self._peers.count(_JOINING),
            in_flight_now=len(self._pending) - queued,
            backlog_now=queued,
            deadlines_now=self._pending.num_deadlines,
            pending_high_water=self._pending.high_water,
            backlog_high_water=self._router.high_water,
            accepted=self._next_wire_id - 1,
            **msgspec.structs.asdict(counts),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self._peers.check_invariants()
        self._pending.check_invariants()
        self._router.check_invariants()
        queued = self._router.queued()
        held: dict[bytes, int] = {}
        for pending in self._pending.unsettled():
            number = pending.wire_id
            expect(math.isfinite(pending.deadline), f"request {number} has no deadline")
            expect(0 < number < self._next_wire_id, f"request {number} was never accepted")
            if pending.origin != LOCAL:
                origin = self._find(pending.origin)
                expect(origin is not None, f"request {number} is of nobody")
            if not pending.holder:
                expect(queued.get(number) == pending.service, f"request {number} waits nowhere")
                expect(pending.frames is not None, f"request {number} cannot be sent any more")
                continue
            expect(number not in queued, f"request {number} is queued and in flight")
            held[pending.holder] = held.get(pending.holder, 0) + 1
        for number in queued:
            expect(self._pending.get(number) is not None, f"request {number} waits though settled")
        for peer in self._peers:
            expect(
                peer.in_flight == held.pop(peer.identity, 0),
                f"{peer.name} holds another number of requests than {peer.in_flight}",
            )
            expect(peer.in_flight <= self._max_in_flight, f"{peer.name} holds too many requests")
            expect(
                peer.state is not _JOINING or peer.in_flight == 0,
                f"{peer.name} holds requests and said no hello",
            )
        expect(not held, "a peer that is gone holds requests")
        expect(len(self._complained) <= _MAX_COMPLAINTS, "too many complaints are remembered")
        counts = self._counts
        ended = counts.replies + counts.failures + counts.timeouts + counts.lost + counts.cancelled
        expect(
            self._next_wire_id - 1 == ended + len(self._pending),
            "a request ended twice or never",
        )

    # --- requests -------------------------------------------------------------------------

    def _on_ask(self, event: Ask, now: float) -> list[Effect]:
        timeout = event.timeout
        if not 0.0 < timeout < _INFINITY:
            raise AssertionError(f"the timeout of a request must be finite and positive: {timeout}")
        return self._open(
            LOCAL, 0, event.to, event.payload_type, timeout, event.frames, event.idempotent, now
        )

    def _open(
        self,
        origin: bytes,
        request_id: int,
        to: bytes | str,
        payload_type: str,
        timeout: float,
        frames: Frames,
        idempotent: bool,
        now: float,
    ) -> list[Effect]:
        """Send or queue a new request: `[Accepted, ...]`, or `[Refused]`."""
        service = ""
        if type(to) is bytes:
            peer = self._find(to)
        elif to in self._router:
            return self._open_for_service(
                Pending(
                    origin, request_id, 0, b"", to, now + timeout, timeout, payload_type,
                    idempotent, False, frames,
                ),
                now,
            )  # fmt: skip
        else:
            peer = self._peers.by_name(to)
        if peer is None or peer.state is _JOINING:
            return self._refuse_no_peer(to, peer)
        if peer.in_flight >= self._max_in_flight:
            self._counts.overloaded += 1
            return [
                Refused(
                    FailureCode.OVERLOADED,
                    f"{peer.name} has {peer.in_flight} requests in flight, which is the limit; "
                    "wait for some, or raise max_in_flight_per_peer",
                )
            ]
        wire_id = self._next_wire_id
        self._next_wire_id = wire_id + 1
        identity = peer.identity
        self._pending.open(
            Pending(
                origin, request_id, wire_id, identity, service, now + timeout, timeout, payload_type
            )
        )
        peer.in_flight += 1
        header = Header(PROTOCOL_VERSION, _REQUEST, wire_id, payload_type, timeout)
        return [Accepted(wire_id), Send(identity, header, frames, wire_id)]

    def _open_for_service(self, pending: Pending, now: float) -> list[Effect]:
        service = pending.service
        peer = self._router.pick(service)
        if peer is None:
            if not self._router.has_ready(service):
                return self._refuse_no_peer(service, None)
            if not self._router.enqueue(service, self._next_wire_id):
                self._counts.overloaded += 1
                return [
                    Refused(
                        FailureCode.OVERLOADED,
                        f"{self._config.max_backlog} requests wait for {service!r}, which is the "
                        "limit; add peers, ask less, or raise max_backlog",
                    )
                ]
        pending.wire_id = wire_id = self._next_wire_id
        self._next_wire_id = wire_id + 1
        self._pending.open(pending)
        if peer is None:
            return [Accepted(wire_id)]
        return [Accepted(wire_id), self._assign(pending, peer, now)]

    def _assign(self, pending: Pending, peer: Peer, now: float) -> Send:
        """Give a request of a service to a peer."""
        frames = pending.frames
        if frames is None:
            raise AssertionError(f"request {pending.wire_id} was sent already")
        pending.holder = peer.identity
        if not pending.idempotent or pending.resent:
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
        self._counts.no_peer += 1
        if peer is not None:
            text = f"{peer.name} was started and did not say hello yet"
        elif isinstance(to, str) and to in self._router:
            names = ", ".join(member.name for member in self._router.members(to))
            text = f"no peer that offers {to!r} is ready: {names} silent for half a lease"
        else:
            text = f"no peer has the name or offers the service {to!r}"
        return [Refused(FailureCode.NO_PEER, text)]

    def _pull(self, peer: Peer, now: float) -> list[Effect]:
        """Send what waits for the peer, as far as it has room."""
        effects: list[Effect] = []
        while peer.state is _READY and peer.in_flight < peer.capacity:
            wire_id = self._router.dequeue(peer)
            if wire_id is None:
                break
            pending = self._pending.get(wire_id)
            if pending is None:
                raise AssertionError(f"request {wire_id} waits though it is settled")
            if pending.deadline <= now:
                # No answer to it can be under way, so it need not wait for the Tick.
                self._pending.settle(wire_id, b"")
                effects.append(self._time_out(pending))
            else:
                effects.append(self._assign(pending, peer, now))
        return effects

    # --- the ends of requests -------------------------------------------------------------

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        header = event.header
        peer = self._find(event.peer)
        if peer is None or peer.state is _JOINING:
            return self._on_stranger(event, now)
        if header.incarnation < peer.incarnation:
            self._counts.stale_frames += 1
            return []
        peer.heard = now
        if peer.state is _SUSPECT:
            return self._heal(peer, now) + self._on_received(event, now)
        kind = header.kind
        if kind is _REPLY:
            return self._on_reply(peer, header, event.frames, now)
        if kind is _REQUEST:
            return self._on_request(peer, event, now)
        if kind is _FAILURE:
            return self._on_failure(peer, event, now)
        return self._on_notice(peer, event, now)

    def _on_reply(self, peer: Peer, header: Header, frames: Frames, now: float) -> list[Effect]:
        wire_id = header.request_id
        pending = self._pending.settle(wire_id, peer.identity)
        if pending is None:
            return self._on_stray(peer, wire_id)
        self._counts.replies += 1
        peer.in_flight -= 1
        effects: list[Effect] = [
            Complete(wire_id, header, frames)
            if not pending.origin
            else _forward(pending, header, frames)
        ]
        if self._router.num_queued:
            effects += self._pull(peer, now)
        return effects

    def _on_failure(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        wire_id = event.header.request_id
        pending = self._pending.settle(wire_id, peer.identity)
        if pending is None:
            return self._on_stray(peer, wire_id)
        self._counts.failures += 1
        peer.in_flight -= 1
        effects: list[Effect] = []
        if pending.origin:
            effects.append(_forward(pending, event.header, event.frames))
        else:
            try:
                failed: Failed = _FAILED.decode(_only(event.frames))
            except (msgspec.MsgspecError, ValueError) as error:
                reason = f"its failure of request {wire_id} cannot be read: {error}"
                effects += self._complain(peer.identity, reason)
                self._counts.malformed += 1
                failed = Failed(code=FailureCode.PROTOCOL, message=f"{peer.name} failed; {reason}")
            if not failed.peer:
                failed = msgspec.structs.replace(failed, peer=peer.name)
            effects.append(FailLocal(wire_id, failed))
        return effects + self._pull(peer, now)

    def _on_stray(self, peer: Peer, wire_id: int) -> list[Effect]:
        """Count and drop an answer that settles nothing."""
        counts = self._counts
        if wire_id in peer.overdue:
            del peer.overdue[wire_id]
            counts.late_replies += 1
        elif not 0 < wire_id < self._next_wire_id:
            counts.unknown_replies += 1
        elif self._pending.get(wire_id) is not None:
            counts.foreign_replies += 1
        else:
            counts.duplicate_replies += 1
        return []

    def _on_tick(self, _event: Tick, now: float) -> list[Effect]:
        expired_requests = self._pending.expire(now)
        effects: list[Effect] = [self._time_out(pending) for pending in expired_requests]
        effects += self._release(expired_requests, now)
        suspected, expired = self._peers.judge(now)
        for peer in suspected:
            effects.append(
                Log(logging.WARNING, f"{peer.name} is silent for {now - peer.heard:.1f} s")
            )
        for peer in expired:
            reason = f"lease of {peer.lease:g} s ran out, last heard {now - peer.heard:.1f} s ago"
            effects += self._leave(peer, reason, now)
        return effects

    def _on_cancel(self, event: Cancel, now: float) -> list[Effect]:
        pending = self._pending.get(event.wire_id)
        if pending is None or pending.origin:
            return []  # it ended a moment ago; the owner could not know
        self._pending.settle(event.wire_id, pending.holder)
        self._counts.cancelled += 1
        return self._release([pending], now)

    def _on_unsendable(self, event: Unsendable, now: float) -> list[Effect]:
        pending = self._pending.settle(event.wire_id, event.peer) if event.wire_id else None
        if pending is None:
            self._counts.unsendable += 1
            return []
        self._counts.failures += 1
        effects = [self._fail(pending, event.code, event.message, self.peer_name(event.peer) or "")]
        peer = self._find(event.peer)
        if peer is not None:
            peer.in_flight -= 1
            effects += self._pull(peer, now)
        return effects

    def _release(self, unanswered: list[Pending], now: float) -> list[Effect]:
        """Free the places of requests that were taken out, in backlogs and at their holders."""
        holders: dict[bytes, Peer] = {}
        for pending in unanswered:
            if not pending.holder:
                self._router.withdraw(pending.service, pending.wire_id)
                continue
            holder = self._find(pending.holder)
            if holder is None:
                raise AssertionError(f"request {pending.wire_id} was held by nobody")
            holder.in_flight -= 1
            holder.add_overdue(pending.wire_id)
            holders[pending.holder] = holder
        # Only now, when nothing is left in a backlog that is settled already.
        return [effect for holder in holders.values() for effect in self._pull(holder, now)]

    def _time_out(self, pending: Pending) -> Effect:
        self._counts.timeouts += 1
        if pending.holder:
            name = self.peer_name(pending.holder) or ""
            text = f"raise the timeout, or look at what {name} is doing"
        else:
            name = ""
            text = f"it still waited for a free peer of {pending.service!r}; add peers or ask less"
        return self._fail(
            pending,
            FailureCode.TIMEOUT,
            f"{pending.payload_type} timed out after {pending.timeout:g} s; {text}",
            name,
        )

    def _fail(self, pending: Pending, code: FailureCode, message: str, peer: str) -> Effect:
        """Return the effect that tells the origin; the request is out of `_pending` already."""
        failed = Failed(code=code, message=message, peer=peer)
        if pending.origin == LOCAL:
            return FailLocal(pending.wire_id, failed)
        return _answer(pending.origin, _FAILURE, pending.request_id, failed)

    # --- requests and notices of peers ----------------------------------------------------

    def _on_request(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        header = event.header
        identity = peer.identity
        request_id = header.request_id
        if not header.to:
            if header.payload_type == "Hello":
                return self._on_hello(event, now)
            if self._config.embedded:
                return [Notify(identity, header, event.frames)]
            self._counts.no_peer += 1
            message = (
                f"this broker answers no {header.payload_type}; name a peer or service in 'to'"
            )
            failed = Failed(code=FailureCode.NO_PEER, message=message)
            return [_answer(identity, _FAILURE, request_id, failed)]
        if not 0.0 < header.ttl < _INFINITY:
            return self._refuse(
                identity,
                request_id,
                f"the ttl of a request must be finite and over 0 s, not {header.ttl}",
            )
        if self._pending.has(identity, request_id):
            # The first one's answer answers both; a failure would be taken for the first one's.
            self._counts.duplicate_requests += 1
            return self._complain(identity, f"request id {request_id} is in flight already")
        effects = self._open(
            identity, request_id, header.to, header.payload_type, header.ttl, event.frames, False,
            now,
        )  # fmt: skip
        first = effects[0]
        if type(first) is not Refused:
            return effects[1:]  # Accepted is for the owner only
        failed = Failed(code=first.code, message=first.message)
        return [_answer(identity, _FAILURE, request_id, failed)]

    def _on_notice(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        header = event.header
        if header.to:
            holder = (
                self._router.pick(header.to)
                if header.to in self._router
                else self._peers.by_name(header.to)
            )
            if holder is None or holder.state is _JOINING:
                self._counts.dropped_notices += 1
                return []
            forwarded = Header(PROTOCOL_VERSION, _NOTICE, header.request_id, header.payload_type)
            return [Send(holder.identity, forwarded, event.frames)]
        if header.payload_type == "Goodbye":
            return self._leave(peer, "it said goodbye", now)
        if header.payload_type == "Heartbeat":
            return self._on_heartbeat(event, now)
        return [Notify(peer.identity, header, event.frames)]

    # --- peers ----------------------------------------------------------------------------

    def _on_stranger(self, event: Received, now: float) -> list[Effect]:
        """Frames of somebody who did not say hello, or whose life is over."""
        header = event.header
        kind = header.kind
        if kind is _REQUEST and header.payload_type == "Hello" and not header.to:
            return self._on_hello(event, now)
        if kind is _NOTICE and header.payload_type == "Heartbeat" and not header.to:
            return self._on_heartbeat(event, now)
        self._counts.stranger_frames += 1
        if kind is _FAILURE or (kind is _NOTICE and header.payload_type == "Goodbye"):
            return []  # complaining to those who complain or leave would never end
        if header.version != PROTOCOL_VERSION:
            return self._refuse_version(event)
        return self._refuse(
            event.peer,
            header.request_id if kind is _REQUEST else 0,
            "no peer of this identity is known; say hello first",
            count=False,
        )

    def _on_hello(self, event: Received, now: float) -> list[Effect]:
        header = event.header
        if header.version != PROTOCOL_VERSION:
            return self._refuse_version(event)
        try:
            hello: Hello = _HELLO.decode(_only(event.frames))
        except (msgspec.MsgspecError, ValueError) as error:
            return self._refuse(event.peer, header.request_id, f"the hello is unreadable: {error}")
        problem = _problem_of(hello) or self._conflict_of(hello, event)
        if problem:
            return self._refuse(event.peer, header.request_id, problem)
        lease = hello.heartbeat * self._config.liveness
        welcome = _answer(
            event.peer,
            _REPLY,
            header.request_id,
            Welcome(lease=lease, max_message_bytes=self._config.max_message_bytes),
        )
        peer = self._find(event.peer)
        if peer is not None and peer.state is not _JOINING:
            return [welcome]  # said again, e.g. because the first welcome was lost
        effects: list[Effect] = []
        former = self._peers.by_name(hello.name)
        if former is not None and former is not peer:
            reason = f"incarnation {header.incarnation} took its name over"
            effects += self._leave(former, reason, now)
        elif peer is None and len(self._peers) >= self._config.max_peers:
            self._counts.overloaded += 1
            message = f"{len(self._peers)} peers are known, which is the limit; raise max_peers"
            failed = Failed(code=FailureCode.OVERLOADED, message=message)
            return [_answer(event.peer, _FAILURE, header.request_id, failed)]
        services = tuple(dict.fromkeys(hello.services))
        capacity = min(hello.capacity, self._max_in_flight)
        if peer is None:
            peer = Peer(
                event.peer,
                hello.name,
                header.incarnation,
                _READY,
                services=services,
                capacity=capacity,
                lease=lease,
                heard=now,
            )
            self._peers.add(peer)
        else:
            self._peers.on_hello(
                peer,
                incarnation=header.incarnation,
                services=services,
                capacity=capacity,
                lease=lease,
                now=now,
            )
        self._router.join(peer)
        effects += [welcome, PeerReady(peer.identity, hello, peer.incarnation)]
        return effects + self._pull(peer, now)

    def _conflict_of(self, hello: Hello, event: Received) -> str:
        """Return why the peer cannot join beside those who are there, or an empty string."""
        incarnation = event.header.incarnation
        peer = self._find(event.peer)
        if peer is not None:
            if peer.name != hello.name:
                return f"this identity belongs to {peer.name!r}, not to {hello.name!r}"
            if peer.state is not _JOINING and (
                peer.services != tuple(dict.fromkeys(hello.services))
                or peer.incarnation != incarnation
            ):
                return f"{peer.name!r} said hello before, with other services or incarnation"
            if incarnation < peer.incarnation:
                return f"{peer.name!r} is expected with incarnation {peer.incarnation}"
        former = self._peers.by_name(hello.name)
        if (
            former is not None
            and former is not peer
            and (former.expected or incarnation <= former.incarnation)
        ):
            return (
                f"the name {hello.name!r} is taken by incarnation {former.incarnation} of it; "
                "choose another name, or raise the incarnation"
            )
        if hello.name in self._router and hello.name not in hello.services:
            return f"the name {hello.name!r} is that of a service; choose another name"
        for service in hello.services:
            other = self._peers.by_name(service)
            if other is not None and service != hello.name and service not in other.services:
                return f"the service {service!r} has the name of a peer; choose another name"
        return ""

    def _on_heartbeat(self, event: Received, now: float) -> list[Effect]:
        try:
            heartbeat: Heartbeat = _HEARTBEAT.decode(_only(event.frames))
        except (msgspec.MsgspecError, ValueError) as error:
            return self._refuse(event.peer, 0, f"the heartbeat is unreadable: {error}")
        peer = self._find(heartbeat.identity)
        if peer is None:
            # So that a peer that was given up, or whose broker was restarted, gets to know.
            self._counts.stranger_frames += 1
            message = "no peer of the heartbeat's identity is known; say hello first"
            return self._refuse(event.peer, 0, message, count=False)
        if peer.state is _JOINING or event.header.incarnation < peer.incarnation:
            return []
        return self._heal(peer, now)

    def _heal(self, peer: Peer, now: float) -> list[Effect]:
        return self._pull(peer, now) if self._peers.on_heard(peer, now) else []

    def _on_expect(self, event: Expect, now: float) -> list[Effect]:
        if not event.name or not event.peer or self._find(event.peer) is not None:
            raise AssertionError(f"the identity of {event.name!r} is not fresh")
        effects: list[Effect] = []
        former = self._peers.by_name(event.name)
        if former is not None:
            # The owner knows whom it started; whoever has the name is an old life or a stranger.
            reason = f"incarnation {event.incarnation} was started in its place"
            effects += self._leave(former, reason, now)
        self._peers.add(
            Peer(event.peer, event.name, event.incarnation, _JOINING, expected=True, heard=now)
        )
        return effects

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Effect]:
        peer = self._find(event.peer)
        return [] if peer is None else self._leave(peer, event.reason, now)

    def _leave(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Forget a peer, fail or re-send what it held, forget what it asked."""
        identity = peer.identity
        self._peers.remove(peer)
        orphans = self._router.leave(peer)
        effects: list[Effect] = [PeerLeft(identity, peer.name, reason)]
        again: list[Pending] = []
        unwanted: list[Pending] = []
        for pending in self._pending.drop_peer(identity):
            if pending.origin == identity:
                self._counts.cancelled += 1
                if not pending.holder and pending.wire_id in orphans:
                    orphans.remove(pending.wire_id)
                elif pending.holder != identity:
                    unwanted.append(pending)
            elif pending.frames is not None and self._router.has_ready(pending.service):
                again.append(pending)
            else:
                effects.append(self._lose(pending, peer, reason))
        for wire_id in orphans:
            orphan = self._pending.settle(wire_id, b"")
            if orphan is None:
                raise AssertionError(f"request {wire_id} waited though it was settled")
            effects.append(self._lose(orphan, peer, reason))
        for pending in reversed(again):  # each goes to the front, so the oldest comes last
            effects += self._send_again(pending, peer, reason, now)
        return effects + self._release(unwanted, now)

    def _send_again(self, pending: Pending, lost: Peer, reason: str, now: float) -> list[Effect]:
        """Give an idempotent request whose holder is lost to another peer."""
        pending.holder = b""
        pending.resent = True
        peer = self._router.pick(pending.service)
        if peer is None and not self._router.enqueue(pending.service, pending.wire_id, first=True):
            return [self._lose(pending, lost, reason)]
        self._pending.open(pending)
        self._counts.resent += 1
        return [] if peer is None else [self._assign(pending, peer, now)]

    def _lose(self, pending: Pending, peer: Peer, reason: str) -> Effect:
        self._counts.lost += 1
        if pending.holder or pending.resent:
            code, text = FailureCode.PEER_LOST, f"{peer.name}, which held it, is gone: {reason}"
        else:
            code = FailureCode.NO_PEER
            text = f"the last peer of {pending.service!r}, {peer.name}, is gone: {reason}"
        return self._fail(pending, code, f"{pending.payload_type} failed; {text}", peer.name)

    # --- bad input ------------------------------------------------------------------------

    def _on_malformed(self, event: Malformed, now: float) -> list[Effect]:
        peer = self._find(event.peer)
        healed = []
        if peer is not None and peer.state is not _JOINING:
            healed = self._heal(peer, now)  # it lives, whatever it sends
        return healed + self._refuse(event.peer, event.request_id, event.reason, event.code)

    def _refuse_version(self, event: Received) -> list[Effect]:
        text = (
            f"the peer speaks protocol version {event.header.version}, this broker speaks "
            f"{PROTOCOL_VERSION}; install the same envbus on both sides"
        )
        request_id = event.header.request_id if event.header.kind is _REQUEST else 0
        return self._refuse(event.peer, request_id, text, FailureCode.VERSION)

    def _refuse(
        self,
        peer: bytes,
        request_id: int,
        message: str,
        code: FailureCode = FailureCode.PROTOCOL,
        *,
        count: bool = True,
    ) -> list[Effect]:
        """Count, log once per peer, and answer with a failure."""
        if count:
            self._counts.malformed += 1
        failed = Failed(code=code, message=message)
        return [*self._complain(peer, message), _answer(peer, _FAILURE, request_id, failed)]

    def _complain(self, peer: bytes, message: str) -> list[Effect]:
        complained = self._complained
        if peer in complained:
            return []
        complained[peer] = None
        if len(complained) > _MAX_COMPLAINTS:
            complained.popitem(last=False)
        name = self.peer_name(peer) or f"peer {peer.hex()}"
        return [Log(logging.WARNING, f"{name}: {message} (later complaints are only counted)")]


class _Counts(msgspec.Struct, kw_only=True):
    """The part of `BrokerStatistics` that only grows and is counted here."""

    replies: int = 0
    failures: int = 0
    timeouts: int = 0
    lost: int = 0
    cancelled: int = 0
    resent: int = 0
    overloaded: int = 0
    no_peer: int = 0
    late_replies: int = 0
    duplicate_replies: int = 0
    foreign_replies: int = 0
    unknown_replies: int = 0
    stale_frames: int = 0
    stranger_frames: int = 0
    malformed: int = 0
    duplicate_requests: int = 0
    dropped_notices: int = 0
    unsendable: int = 0


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


def _answer(peer: bytes, kind: Kind, request_id: int, payload: Payload) -> Send:
    header = Header(PROTOCOL_VERSION, kind, request_id, type(payload).__name__)
    return Send(peer, header, [_ENCODER.encode(payload)])


def _only(frames: Frames) -> Any:
    """Return the payload of a control message. Any: it is any buffer."""
    if len(frames) != 1:
        raise ValueError(f"a control message has 1 frame behind its header, not {len(frames)}")
    return frames[0]


def _problem_of(hello: Hello) -> str:
    """Return what is wrong with a hello in itself, or an empty string."""
    names = [hello.name, *hello.services]
    if not all(0 < len(name) <= _MAX_NAME_CHARS for name in names):
        return f"names of peers and services have 1 to {_MAX_NAME_CHARS} characters"
    if len(hello.services) > _MAX_SERVICES:
        return f"a peer offers at most {_MAX_SERVICES} services, not {len(hello.services)}"
    if hello.capacity < 1:
        return f"the capacity must be 1 or more, not {hello.capacity}"
    if not 0.0 <= hello.heartbeat < math.inf:
        return f"the heartbeat must be finite and not negative, not {hello.heartbeat}"
    return ""
