"""Whether a peer that says hello may join those who are there.

Pure: no socket, clock, thread or process in this file, and nothing is changed by asking.
"""

from __future__ import annotations

import math

from envbus.bus.messages import Hello
from envbus.bus.peers import Peers, PeerState
from envbus.bus.routing import Router

__all__ = ["objection", "services_of"]

#: Longest name of a peer or service, and most services of one peer: more is a mistake, or meant
#: to fill our memory.
_MAX_NAME_CHARS = 256
_MAX_SERVICES = 64
#: Shortest interval between signs of life, in seconds: no sender keeps a shorter one.
_MIN_HEARTBEAT = 0.01


def services_of(hello: Hello) -> tuple[str, ...]:
    """Return what the peer offers, each once."""
    return tuple(dict.fromkeys(hello.services))


def objection(
    hello: Hello,
    identity: bytes,
    incarnation: int,
    user: str,
    peers: Peers,
    router: Router,
    *,
    max_heartbeat: float = math.inf,
    owner: str = "",
) -> str | None:
    """Return why the peer cannot join, for people, or None if it can.

    A name belongs to one peer at a time. A higher incarnation of the same user takes it over,
    unless the broker's owner started the holder; without keys, when the holder has been silent for
    half its lease. Services and names are told apart by nothing but
    themselves, so none may be both, except that a peer may be called like its own service.

    Args:
        hello: What it says of itself.
        identity: Its routing id.
        incarnation: From its header.
        user: Its public key; "" without keys.
        peers: Those who are there.
        router: The services that are there.
        max_heartbeat: Longest interval between signs of life, in seconds, of a peer that was not
            announced by the owner; infinite: it need not give any.
        owner: Name of the broker's owner; "": it has none.
    """
    return (
        _made_up(identity)
        or _malformed(hello)
        or _owners(hello, owner)
        or _other_self(hello, identity, incarnation, user, peers)
        or _name_taken(hello, identity, incarnation, user, peers)
        or _never_missed(hello, identity, peers, max_heartbeat)
        or _name_is_service(hello, peers, router)
    )


def _made_up(identity: bytes) -> str | None:
    """A ROUTER makes up an id for who has none, and for what a connection that was lost has left.

    What the latter says of itself is out of date: its sender is there, or comes, under its own id.
    """
    if not identity.startswith(b"\0"):
        return None
    return (
        "a peer has a routing id of its own (ZMQ_ROUTING_ID), which does not begin with a zero "
        "byte; set one before connecting, and keep it"
    )


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


def _owners(hello: Hello, owner: str) -> str | None:
    if owner and owner in (hello.name, *hello.services):
        return f"the name {owner!r} is that of this broker's owner; choose another name"
    return None


def _other_self(
    hello: Hello, identity: bytes, incarnation: int, user: str, peers: Peers
) -> str | None:
    peer = peers.find(identity)
    if peer is None:
        return None
    if peer.name != hello.name:
        return f"this identity belongs to {peer.name!r}, not to {hello.name!r}"
    if peer.state is not PeerState.JOINING and peer.user != user:
        return f"this identity belongs to {peer.name!r} of another user"
    if peer.state is PeerState.JOINING:
        if incarnation != peer.incarnation:
            return (
                f"{peer.name!r} is expected with incarnation {peer.incarnation}, not {incarnation}"
            )
    elif peer.services != services_of(hello) or incarnation != peer.incarnation:
        return f"{peer.name!r} said hello before, with other services or incarnation"
    return None


def _name_taken(
    hello: Hello, identity: bytes, incarnation: int, user: str, peers: Peers
) -> str | None:
    holder = peers.by_name(hello.name)
    if holder is None or holder.identity == identity:
        return None
    if holder.user != user and not holder.expected:
        return f"the name {hello.name!r} is taken by another user; choose another name"
    if not user and not holder.expected and holder.state is PeerState.READY:
        return (
            f"the name {hello.name!r} is taken by a peer that is there; without keys nobody can "
            "prove to be the same one: choose another name, or wait until it is missed"
        )
    if holder.expected or incarnation <= holder.incarnation:
        return (
            f"the name {hello.name!r} is taken by incarnation {holder.incarnation} of it; "
            "choose another name, or raise the incarnation"
        )
    return None


def _never_missed(hello: Hello, identity: bytes, peers: Peers, max_heartbeat: float) -> str | None:
    """Nobody watches the process of a peer that comes by itself: only its silence tells."""
    peer = peers.find(identity)
    if (peer is not None and peer.expected) or max_heartbeat == math.inf:
        return None
    if not 0.0 < hello.heartbeat <= max_heartbeat:
        return (
            f"this broker asks for a heartbeat over 0 and of at most {max_heartbeat:g} s, not "
            f"{hello.heartbeat:g}: it would not miss a peer that vanished"
        )
    return None


def _name_is_service(hello: Hello, peers: Peers, router: Router) -> str | None:
    if hello.name in router and hello.name not in hello.services:
        return f"the name {hello.name!r} is that of a service; choose another name"
    for service in hello.services:
        other = peers.by_name(service)
        if other is not None and service != hello.name and service not in other.services:
            return f"the service {service!r} has the name of a peer; choose another name"
    return None
