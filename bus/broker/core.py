"""What the broker does about each event: events in, effects out.

Composes `peers.py` and `requests.py`. Pure: no socket, clock, thread or process in
this file; `loop.py` owns those. Payloads stay opaque, save those of the broker's own control
messages (Hello, Heartbeat, Goodbye, Failed), which hold no arrays.

Rules:

- Each accepted request ends exactly once: in a reply, or in a failure.
- Deadlines and leases are judged on `Tick` only, which the shell sends after it drained its
  socket, so that a driver that was busy for a minute sees the answers before it judges anybody.
- At most once: nothing is sent twice.
- An embedded broker passes nothing on from peer to peer; a standalone one does, but for what
  controls a peer, and what is blocked.
- A peer's bad input is counted, logged once per peer, answered, and changes nothing else.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from envbus.bus.broker.control import NOBODY, answer, failure, read
from envbus.bus.broker.deadlines import LOCAL
from envbus.bus.broker.events import (
    Ask,
    BrokerConfig,
    BrokerStatistics,
    Cancel,
    Effect,
    Event,
    Expect,
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
from envbus.bus.broker.peers import Peer, Peers, PeerState
from envbus.bus.broker.requests import Dispatcher
from envbus.bus.errors import DecodeError
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Welcome,
)

__all__ = ["BrokerCore"]

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REQUEST = Kind.REQUEST
_REPLY = Kind.REPLY
_FAILURE = Kind.FAILURE
_NOTICE = Kind.NOTICE
_READY = PeerState.READY
_SUSPECT = PeerState.SUSPECT
_JOINING = PeerState.JOINING
_INFINITY = math.inf
#: By these a broker and its peers control each other; no peer sends them to another one.
_CONTROL = frozenset({"Goodbye", "Heartbeat", "Hello", "Shutdown", "Token", "Welcome"})

#: Peers whose first complaint is remembered, so that each is logged once. Strangers choose
#: their identities, so it has to end somewhere.
_MAX_COMPLAINTS = 1024
#: Peers without a name whose complaints are logged at all: strangers must not fill a disk.
_MAX_STRANGERS_LOGGED = 100
#: What is said to who asks nobody.
_NOBODYS = "nobody has this name"
#: Names of silent peers in one line.
_MAX_NAMES_LOGGED = 5


class BrokerCore:
    """The decisions of one broker.

    `handle` never blocks and never raises for what a peer does; AssertionError is a bug of the
    caller or of this class.
    """

    def __init__(self, config: BrokerConfig | None = None) -> None:
        self._config = config = config or BrokerConfig()
        #: What a message has in `to` that is for the owner.
        self._owner = frozenset({"", config.owner})
        self._blocked = config.blocked | _CONTROL
        self._peers = Peers()
        self._find = self._peers.find
        self._dispatcher = Dispatcher(config, self._peers)
        self._open = self._dispatcher.open
        self._complained: OrderedDict[bytes, None] = OrderedDict()
        self._strangers_logged = 0
        self._counts = self._dispatcher.counts
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
        dispatcher = self._dispatcher
        return (
            f"<BrokerCore peers={len(self._peers)} pending={len(dispatcher.pending)} "
            f"queued={dispatcher.router.num_queued}>"
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
        deadline = self._dispatcher.pending.next_deadline()
        lease = self._peers.next_check()
        if deadline is None or lease is None:
            return lease if deadline is None else deadline
        return min(deadline, lease)

    def is_pending(self, wire_id: int) -> bool:
        """Return whether the request of that id has not ended."""
        return self._dispatcher.pending.get(wire_id) is not None

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
        pending, router = self._dispatcher.pending, self._dispatcher.router
        return msgspec.structs.replace(
            self._counts,
            ready_peers_now=self._peers.count(_READY),
            suspect_peers_now=self._peers.count(_SUSPECT),
            joining_peers_now=self._peers.count(_JOINING),
            in_flight_now=len(pending) - router.num_queued,
            backlog_now=router.num_queued,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self._peers.check_invariants()
        self._dispatcher.check_invariants()
        assert len(self._complained) <= _MAX_COMPLAINTS, "too many complaints are remembered"

    # --- the owner and the clock ----------------------------------------------------------

    def _on_ask(self, event: Ask, now: float) -> list[Effect]:
        timeout = event.timeout
        assert 0.0 < timeout < _INFINITY, f"a timeout must be finite and positive: {timeout}"
        return self._open(LOCAL, 0, event.to, event.payload_type, timeout, event.frames, now)

    def _on_cancel(self, event: Cancel, now: float) -> list[Effect]:
        return self._dispatcher.cancel(event.wire_id, now)

    def _on_unsendable(self, event: Unsendable, _now: float) -> list[Effect]:
        return self._dispatcher.unsendable(event.peer, event.wire_id, event.code, event.message)

    def _on_tick(self, _event: Tick, now: float) -> list[Effect]:
        effects = self._dispatcher.expire(now)
        suspected, expired = self._peers.judge(now)
        if suspected:
            # One line, however many strangers joined and fell silent.
            names = ", ".join(peer.name for peer in suspected[:_MAX_NAMES_LOGGED])
            more = len(suspected) - _MAX_NAMES_LOGGED
            names += f" and {more} more" if more > 0 else ""
            silence = max(now - peer.heard for peer in suspected)
            effects.append(Log(logging.WARNING, f"silent for {silence:.1f} s: {names}"))
        for peer in expired:
            reason = f"lease of {peer.lease:g} s ran out, last heard {now - peer.heard:.1f} s ago"
            effects += self._leave(peer, reason, now)
        return effects

    def _on_expect(self, event: Expect, now: float) -> list[Effect]:
        assert event.name, "a child needs a name"
        assert event.peer, f"the child {event.name} needs an identity"
        assert self._find(event.peer) is None, f"the identity of {event.name} is not fresh"
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
        self._peers.remove(peer)
        effects = self._dispatcher.leave(peer, reason, now)
        return [PeerLeft(peer.identity, peer.name, reason), *effects]

    # --- frames of peers ------------------------------------------------------------------

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        header = event.header
        peer = self._find(event.peer)
        if peer is None or peer.state is _JOINING:
            return self._on_unknown_peer(event, now)
        if header.incarnation < peer.incarnation:
            self._counts.stale_frames += 1
            return []
        if peer.state is _SUSPECT:
            return self._on_healed(peer, event, now)
        peer.heard = now
        kind = header.kind
        if kind is _REPLY:
            return self._dispatcher.on_reply(peer, header, event.frames, now)
        if kind is _REQUEST:
            return self._on_request(peer, event, now)
        if kind is _FAILURE:
            return self._dispatcher.on_failure(peer, header, event.frames, now)
        return self._on_notice(peer, event, now)

    def _on_healed(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        """A SUSPECT peer is heard again; it gets work after its frame is seen to."""
        self._peers.on_heard(peer, now)
        effects = self._on_received(event, now)
        return effects + self._dispatcher.pull(peer, now)  # nothing if that was its goodbye

    def _on_request(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        header = event.header
        identity = peer.identity
        request_id = header.request_id
        if header.to in self._owner:
            if header.payload_type == "Hello":
                return self._on_hello(event, now)
            if self._config.embedded:
                return [Notify(identity, header, event.frames)]
            self._counts.no_peer += 1
            text = f"this broker answers no {header.payload_type}; name a peer or service in 'to'"
            return [failure(identity, request_id, FailureCode.NO_PEER, text)]
        if header.to == NOBODY:
            return [failure(identity, request_id, FailureCode.NO_PEER, _NOBODYS)]
        if self._config.embedded:
            self._counts.blocked += 1
            text = "nothing is passed on from peer to peer here: leave 'to' empty"
            return [failure(identity, request_id, FailureCode.NO_PEER, text)]
        if header.payload_type in self._blocked:
            self._counts.blocked += 1
            text = f"{header.payload_type} is blocked on this bus"
            return [failure(identity, request_id, FailureCode.PROTOCOL, text)]
        if not 0.0 < header.ttl < _INFINITY:
            text = f"the ttl of a request must be finite and over 0 s, not {header.ttl}"
            return self._refuse(identity, request_id, text)
        if self._dispatcher.pending.has(identity, request_id):
            # The first one's answer answers both; a failure would be taken for the first one's.
            self._counts.duplicate_requests += 1
            return self._complain(identity, f"request id {request_id} is in flight already")
        effects = self._open(
            identity, request_id, header.to, header.payload_type, header.ttl, event.frames, now
        )
        first = effects[0]
        if isinstance(first, Refused):
            return [failure(identity, request_id, first.code, first.message)]
        return effects[1:]  # `Accepted` is for the owner only

    def _on_notice(self, peer: Peer, event: Received, now: float) -> list[Effect]:
        header = event.header
        if header.to not in self._owner:
            return self._on_notice_to(header.to, event)
        if header.payload_type == "Goodbye":
            return self._leave(peer, "it said goodbye", now)
        if header.payload_type == "Heartbeat":
            return self._on_heartbeat(event, now)
        return [Notify(peer.identity, header, event.frames)]

    def _on_notice_to(self, to: str, event: Received) -> list[Effect]:
        """Pass a notice on, to one peer; there is no promise that it arrives."""
        if self._config.embedded or event.header.payload_type in self._blocked:
            self._counts.blocked += 1
            return []
        router = self._dispatcher.router
        receiver = router.pick(to) if to in router else self._peers.by_name(to)
        if receiver is None or receiver.state is _JOINING:
            self._counts.dropped_notices += 1
            return []
        header = event.header
        forwarded = Header(PROTOCOL_VERSION, _NOTICE, header.request_id, header.payload_type)
        return [Send(receiver.identity, forwarded, event.frames)]

    def _on_heartbeat(self, event: Received, now: float) -> list[Effect]:
        """A sign of life, mostly over a socket of its own, which says no hello."""
        try:
            heartbeat = read(Heartbeat, event.frames)
        except DecodeError as error:
            return self._refuse(event.peer, 0, str(error))
        peer = self._find(heartbeat.identity or event.peer)
        if peer is None:
            # So that a peer that was given up, or whose broker was restarted, gets to know.
            self._counts.stranger_frames += 1
            text = "no peer of the heartbeat's identity is known; say hello first"
            return [
                *self._complain(event.peer, text),
                failure(event.peer, 0, FailureCode.NOT_JOINED, text),
            ]
        if peer.state is not _JOINING and self._peers.on_heard(peer, now):
            return self._dispatcher.pull(peer, now)
        return []

    # --- hello ----------------------------------------------------------------------------

    def _on_hello(self, event: Received, now: float) -> list[Effect]:
        header = event.header
        identity = event.peer
        if header.version != PROTOCOL_VERSION:
            return self._refuse_version(event)
        try:
            hello = read(Hello, event.frames)
        except DecodeError as error:
            return self._refuse(identity, header.request_id, str(error))
        problem = self._admission_error(hello, event)
        if problem is not None:
            return self._refuse(identity, header.request_id, problem)
        lease = hello.heartbeat * self._config.liveness
        welcome = answer(
            identity,
            _REPLY,
            header.request_id,
            Welcome(lease=lease, max_message_bytes=self._config.max_message_bytes),
        )
        peer = self._find(identity)
        if peer is not None and peer.state is not _JOINING:
            return [welcome]  # said again, e.g. because the first welcome was lost
        effects: list[Effect] = []
        former = self._peers.by_name(hello.name)
        if former is not None and former is not peer:
            reason = f"incarnation {header.incarnation} took its name over"
            effects += self._leave(former, reason, now)
        if peer is None:
            if (full := self._no_room(event.user)) is not None:
                self._counts.overloaded += 1
                return [failure(identity, header.request_id, FailureCode.OVERLOADED, full)]
            peer = Peer(identity, hello.name, header.incarnation, _JOINING)
            self._peers.add(peer)
        self._peers.on_hello(
            peer,
            services=_services_of(hello),
            capacity=min(hello.capacity, self._config.max_in_flight_per_peer),
            lease=lease,
            now=now,
            user=event.user,
        )
        self._dispatcher.router.join(peer)
        effects += [welcome, PeerReady(identity, hello, peer.incarnation, event.user)]
        return effects + self._dispatcher.pull(peer, now)

    def _no_room(self, user: str) -> str | None:
        """Return which limit leaves no place for a new peer; None: there is one."""
        if len(self._peers) >= self._config.max_peers:
            return f"{len(self._peers)} peers are known, which is the limit; raise max_peers"
        if user and self._peers.of_user(user) >= self._config.max_user_peers:
            return (
                f"{self._config.max_user_peers} peers with this public key are known, which is the "
                "limit: half of max_peers"
            )
        return None

    def _admission_error(self, hello: Hello, event: Received) -> str | None:
        """Return why the peer cannot join, for people, or None if it can.

        A name belongs to one peer at a time. A higher incarnation of the same user takes it over,
        unless the broker's owner started the holder; without keys, when the holder has been silent
        for half its lease. Services and names are told apart by nothing but themselves, so none may
        be both, except that a peer may be called like its own service.
        """
        if event.peer.startswith(b"\0"):
            # A ROUTER makes up an id for who has none, and for what a connection that was lost has
            # left. What the latter says of itself is out of date: its sender is there, or comes,
            # under its own id.
            return (
                "a peer has a routing id of its own (ZMQ_ROUTING_ID), which does not begin with a "
                "zero byte; set one before connecting, and keep it"
            )
        owner = self._config.owner
        if (problem := _malformed(hello)) is not None:
            return problem
        if owner and owner in (hello.name, *hello.services):
            return f"the name {owner!r} is that of this broker's owner; choose another name"
        peer, holder = self._find(event.peer), self._peers.by_name(hello.name)
        problem = None
        if peer is not None:
            problem = _other_self(hello, event, peer)
        if problem is None and holder is not None and holder is not peer:
            problem = _name_taken(event, holder)
        if problem is not None:
            return problem
        longest = self._config.max_heartbeat
        is_watched = peer is not None and peer.expected  # else only its silence tells
        if not is_watched and longest < math.inf and not 0.0 < hello.heartbeat <= longest:
            return (
                f"this broker asks for a heartbeat over 0 and of at most {longest:g} s, not "
                f"{hello.heartbeat:g}: it would not miss a peer that vanished"
            )
        if hello.name in self._dispatcher.router and hello.name not in hello.services:
            return f"the name {hello.name!r} is that of a service; choose another name"
        for service in hello.services:
            other = self._peers.by_name(service)
            if other is not None and service != hello.name and service not in other.services:
                return f"the service {service!r} has the name of a peer; choose another name"
        return None

    # --- bad input ------------------------------------------------------------------------

    def _on_unknown_peer(self, event: Received, now: float) -> list[Effect]:
        """Frames of somebody who did not say hello, or whose life is over."""
        header = event.header
        kind = header.kind
        if not header.to:
            if kind is _REQUEST and header.payload_type == "Hello":
                return self._on_hello(event, now)
            if kind is _NOTICE and header.payload_type == "Heartbeat":
                return self._on_heartbeat(event, now)
        if header.to == NOBODY and kind is _REQUEST:
            # Not to be complained of: a gateway's mark behind the goodbye of its client.
            return [failure(event.peer, header.request_id, FailureCode.NO_PEER, _NOBODYS)]
        self._counts.stranger_frames += 1
        if kind is _FAILURE or (kind is _NOTICE and header.payload_type == "Goodbye"):
            return []  # complaining to those who complain or leave would never end
        if header.version != PROTOCOL_VERSION:
            return self._refuse_version(event)
        text = "no peer of this identity is known; say hello first"
        request_id = header.request_id if kind is _REQUEST else 0
        return [
            *self._complain(event.peer, text),
            failure(event.peer, request_id, FailureCode.NOT_JOINED, text),
        ]

    def _on_malformed(self, event: Malformed, now: float) -> list[Effect]:
        effects = self._refuse(event.peer, event.request_id, event.reason, event.code)
        peer = self._find(event.peer)
        if peer is not None and peer.state is not _JOINING and self._peers.on_heard(peer, now):
            effects += self._dispatcher.pull(peer, now)  # it lives, whatever it sends
        return effects

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
    ) -> list[Effect]:
        """Count, log once per peer, and answer with a failure."""
        self._counts.malformed += 1
        return [*self._complain(peer, message), failure(peer, request_id, code, message)]

    def _complain(self, peer: bytes, message: str) -> list[Effect]:
        complained = self._complained
        if peer in complained:
            return []
        complained[peer] = None
        if len(complained) > _MAX_COMPLAINTS:
            complained.popitem(last=False)
        name = self.peer_name(peer)
        if name is None:
            self._strangers_logged += 1
            if self._strangers_logged > _MAX_STRANGERS_LOGGED:
                return []
            name = f"peer {peer.hex()[:64]}"
        return [Log(logging.WARNING, f"{name}: {message} (further complaints are only counted)")]


#: Longest name of a peer or service, and most services of one peer: more is a mistake, or meant
#: to fill our memory.
_MAX_NAME_CHARS = 256
_MAX_SERVICES = 64
#: Shortest interval between signs of life, in seconds: no sender keeps a shorter one.
_MIN_HEARTBEAT = 0.01


def _malformed(hello: Hello) -> str | None:
    if not all(0 < len(name) <= _MAX_NAME_CHARS for name in (hello.name, *hello.services)):
        return f"names of peers and services have 1 to {_MAX_NAME_CHARS} characters"
    if not all(name.isprintable() for name in (hello.name, *hello.services)):
        # They stand in logs and errors: this is the one place where they come in.
        return "names of peers and services have no control characters or line breaks"
    if len(hello.services) > _MAX_SERVICES:
        return f"a peer offers at most {_MAX_SERVICES} services, not {len(hello.services)}"
    if 0.0 < hello.heartbeat < _MIN_HEARTBEAT:
        return f"the heartbeat must be at least {_MIN_HEARTBEAT:g} s, not {hello.heartbeat:g}"
    if hello.capacity < 1:
        return f"the capacity must be 1 or more, not {hello.capacity}"
    if not 0.0 <= hello.heartbeat < math.inf:
        return f"the heartbeat must be finite and not negative, not {hello.heartbeat}"
    return None


def _other_self(hello: Hello, event: Received, peer: Peer) -> str | None:
    """Return why who is known under its identity is not this one."""
    incarnation = event.header.incarnation
    if peer.name != hello.name:
        return f"this identity belongs to {peer.name!r}, not to {hello.name!r}"
    if peer.state is _JOINING:
        if incarnation == peer.incarnation:
            return None
        return f"{peer.name!r} is expected with incarnation {peer.incarnation}, not {incarnation}"
    if peer.user != event.user:
        return f"this identity belongs to {peer.name!r} of another user"
    if peer.services != _services_of(hello) or incarnation != peer.incarnation:
        return f"{peer.name!r} said hello before, with other services or incarnation"
    return None


def _name_taken(event: Received, holder: Peer) -> str | None:
    """Return why the name of another peer cannot be taken over."""
    name = holder.name
    if holder.user != event.user and not holder.expected:
        return f"the name {name!r} is taken by another user; choose another name"
    if not event.user and not holder.expected and holder.state is _READY:
        return (
            f"the name {name!r} is taken by a peer that is there; without keys nobody can "
            "prove to be the same one: choose another name, or wait until it is missed"
        )
    if holder.expected or event.header.incarnation <= holder.incarnation:
        return (
            f"the name {name!r} is taken by incarnation {holder.incarnation} of it; "
            "choose another name, or raise the incarnation"
        )
    return None


def _services_of(hello: Hello) -> tuple[str, ...]:
    """Return what the peer offers, each once."""
    return tuple(dict.fromkeys(hello.services))
