"""What goes into the broker's core and what comes out: events, effects, settings, statistics.

Vocabulary only; what follows from an event is decided in `core.py`, and effects are
performed by the shell, `loop.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number, positive_int
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Failed, FailureCode, Header, Hello

__all__ = [
    "MAX_HEARTBEAT",
    "Accepted",
    "Ask",
    "BrokerConfig",
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

#: `BrokerConfig.max_heartbeat` of a broker that strangers can join, in seconds: with four of them
#: to a lease, one that vanished is forgotten after four minutes at the latest.
MAX_HEARTBEAT = 60.0

# gc=False: none of these can be part of a reference cycle, and many are made per step.

# --- events ---------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, gc=False):
    """The owner of the broker wants to send a request.

    Answered by `[Accepted, ...]` or by `[Refused]`.
    """

    #: Routing id of a peer (bytes), or name of a service or peer (str).
    to: bytes | str
    payload_type: str
    #: Seconds until it fails; positive and finite. Time in the backlog counts.
    timeout: float
    #: Payload, then raw buffers. Kept until the request is sent.
    frames: Frames


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message with a readable header came in."""

    #: Routing id of the sender, as given by the transport.
    peer: bytes
    header: Header
    #: Payload, then raw buffers.
    frames: Frames
    #: Of a hello: who sent it, by the public key that the transport has checked; "" without keys.
    user: str = ""


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """Frames came in that could not be decoded."""

    peer: bytes
    reason: str
    #: What the sender is told: `PROTOCOL`, or `VERSION` for a header of another version.
    code: FailureCode = FailureCode.PROTOCOL
    #: The sender's request id, or 0 if it could not be read.
    request_id: int = 0


class PeerGone(msgspec.Struct, frozen=True, gc=False):
    """The peer's process exited, or the transport cannot reach it any more."""

    peer: bytes
    #: For people, e.g. `"exit code 9"`.
    reason: str


class Unsendable(msgspec.Struct, frozen=True, gc=False):
    """A `Send` could not be performed: unknown peer, or its queue is full."""

    peer: bytes
    #: That of the `Send`.
    wire_id: int
    code: FailureCode
    message: str


class Expect(msgspec.Struct, frozen=True, gc=False):
    """A child was started that will say hello under this identity.

    From now on its name is reserved: a peer of another identity cannot take it.
    """

    peer: bytes
    name: str
    incarnation: int


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """The owner no longer wants the answer. The peer is not interrupted."""

    wire_id: int


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The socket was drained: judge deadlines and leases now."""


Event: TypeAlias = Ask | Received | Malformed | PeerGone | Unsendable | Expect | Cancel | Tick

# --- effects --------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The `Ask` is pending and will end in exactly one `Complete` or `FailLocal`."""

    wire_id: int


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The `Ask` failed at once; nothing was sent."""

    #: `NO_PEER` or `OVERLOADED`.
    code: FailureCode
    message: str


class Send(msgspec.Struct, frozen=True, gc=False):
    """Encode `header` and send `[header, *frames]` to `peer`."""

    peer: bytes
    header: Header
    frames: Frames
    #: Id of the request that this carries to its holder; 0 for anything else.
    wire_id: int = 0


class Complete(msgspec.Struct, frozen=True, gc=False):
    """A local request has its reply. `header.kind` is always REPLY."""

    wire_id: int
    header: Header
    frames: Frames


class FailLocal(msgspec.Struct, frozen=True, gc=False):
    """A local request ended without a reply: here, or by a FAILURE of its holder."""

    wire_id: int
    failed: Failed


class PeerReady(msgspec.Struct, frozen=True, gc=False):
    """A peer said hello and may be asked."""

    peer: bytes
    hello: Hello
    incarnation: int
    #: Its public key, in Z85, where the broker asks for keys; else "".
    user: str = ""


class PeerLeft(msgspec.Struct, frozen=True, gc=False):
    """A peer, ready or expected, is gone. The failures of what it held follow in the list."""

    peer: bytes
    name: str
    reason: str


class Notify(msgspec.Struct, frozen=True, gc=False):
    """A notice or request for the owner of the broker, from a peer that said hello.

    To answer a request, the owner sends a REPLY or FAILURE with `header.request_id` to `peer`;
    its deadline is the owner's to keep.
    """

    peer: bytes
    header: Header
    frames: Frames


class Log(msgspec.Struct, frozen=True, gc=False):
    """A line for the log."""

    #: One of `logging`'s numbers.
    level: int
    message: str


Effect: TypeAlias = (
    Accepted | Refused | Send | Complete | FailLocal | PeerReady | PeerLeft | Notify | Log
)

# --- settings and statistics ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerConfig:
    """Limits of one broker.

    Raises:
        ConfigError: A limit is unusable.
    """

    #: Requests in flight towards one peer. Under the default high-water mark of a ZeroMQ
    #: socket (1000), so that this limit, which says why, is met first.
    max_in_flight_per_peer: int = 256
    #: Requests that wait for a free peer, per service. Requests of one peer do not wait if it has
    #: so many, and `max_in_flight_per_peer` more, unsettled.
    max_backlog: int = 1024
    #: Peers that may be known at one time; bounds what strangers can make us remember. Where there
    #: are keys, half of them may have one key: it must not shut out the others.
    max_peers: int = 4096
    #: A lease is this many heartbeats; two may be lost before a peer is suspected.
    liveness: float = 4.0
    #: Told to peers in `Welcome`; enforced by the codec.
    max_message_bytes: int = 1 << 30
    #: Whether an owner answers what is sent to the broker itself (`Notify`), and nothing is passed
    #: on from peer to peer. If not, requests to the broker itself fail with `NO_PEER`.
    embedded: bool = True
    #: Name of the owner: a request or notice to it is one to the broker itself. No peer can take
    #: it, nor offer it. "": it has none.
    owner: str = ""
    #: Longest interval between signs of life, in seconds, that a peer may choose whose process
    #: nobody here watches; infinite: it need not give any, and is never missed if it vanishes.
    max_heartbeat: float = math.inf
    #: Payload types that are not passed on from peer to peer; those that control a peer never are.
    blocked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("max_in_flight_per_peer", "max_backlog", "max_peers", "max_message_bytes"):
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))
        check_number("max_heartbeat", self.max_heartbeat, over=0.0)
        if not 1.0 < self.liveness < math.inf:
            raise ConfigError(
                f"liveness must be finite and over 1 heartbeat, not {self.liveness!r}; "
                "otherwise peers expire between two heartbeats"
            )

    @property
    def max_user_peers(self) -> int:
        """Peers of one public key that may be known at one time."""
        return (self.max_peers + 1) // 2


class BrokerStatistics(msgspec.Struct, kw_only=True):
    """Counts of one broker. Those without `now` only grow."""

    #: Requests accepted, and how they ended.
    accepted: int = 0
    replies: int = 0
    failures: int = 0
    timeouts: int = 0
    lost: int = 0
    cancelled: int = 0
    #: Requests refused at once.
    overloaded: int = 0
    no_peer: int = 0
    #: Answers that were dropped: after time-out or cancellation / to a settled request /
    #: to a request that another peer holds / to an id that was never given out.
    late_replies: int = 0
    duplicate_replies: int = 0
    foreign_replies: int = 0
    unknown_replies: int = 0
    #: Frames of a former incarnation / of peers that did not say hello.
    stale_frames: int = 0
    stranger_frames: int = 0
    malformed: int = 0
    #: Requests whose id the same peer still had in flight; dropped.
    duplicate_requests: int = 0
    #: Notices to nobody; answers whose asker could not be reached.
    dropped_notices: int = 0
    unsendable: int = 0
    #: Requests and notices that are not passed on: of a type that is blocked, or, by an embedded
    #: broker, of any.
    blocked: int = 0
    #: Peers that said hello and are heard from / are silent for half a lease / are expected.
    ready_peers_now: int = 0
    suspect_peers_now: int = 0
    joining_peers_now: int = 0
    #: Requests sent and not settled / waiting for a free peer.
    in_flight_now: int = 0
    backlog_now: int = 0
    #: Connections that were refused for their keys, or broken off in the handshake. Counted by
    #: the transport, where it asks for keys.
    refused_connections: int = 0
    #: Messages that were not sent since their peer does not read: bytes, or messages, waited for it
    #: already. Bytes that wait for such peers now.
    unread: int = 0
    queued_bytes_now: int = 0
