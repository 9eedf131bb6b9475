"""Who is there: names, identities, incarnations and leases of the peers.

```
JOINING ──hello──▶ READY ◀──any frame── SUSPECT
                     └──half a lease of silence──▲
any state ──goodbye, exit, full lease, takeover──▶ GONE
```

Pure: no socket, clock, thread or process in this file. Peers that are GONE are forgotten here.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator

import msgspec

__all__ = ["Peer", "PeerState", "Peers"]

#: Overdue requests remembered per peer, to tell late answers from duplicates. A peer with more
#: than these is past help.
_MAX_OVERDUE = 64


class PeerState(enum.Enum):
    """Where a peer is in its life."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class Peer(msgspec.Struct, gc=False, eq=False):
    """One life of one process on the bus."""

    #: Routing id.
    identity: bytes
    name: str
    incarnation: int
    state: PeerState
    services: tuple[str, ...] = ()
    #: Requests of services it wants in flight at one time.
    capacity: int = 1
    #: Seconds of silence after which it is gone; 0: its process is watched instead.
    lease: float = 0.0
    #: When the last frame of it came, in seconds of the caller's clock.
    heard: float = 0.0
    #: Whether the broker's owner started it; then nobody can take its name over.
    expected: bool = False
    #: Public key of who said its hello; "" without keys.
    user: str = ""
    #: Requests it holds.
    in_flight: int = 0
    #: Requests that ended without its answer, which it may still be working on.
    overdue: dict[int, None] = msgspec.field(default_factory=dict)

    @property
    def load(self) -> int:
        """Requests it is probably working on."""
        return self.in_flight + len(self.overdue)

    def add_overdue(self, wire_id: int) -> None:
        """Remember that it may still answer this request."""
        self.overdue[wire_id] = None
        if len(self.overdue) > _MAX_OVERDUE:
            del self.overdue[next(iter(self.overdue))]


class Peers:
    """The peers that are not GONE, by identity and by name."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._leased: dict[bytes, Peer] = {}
        #: How many have said hello with each public key.
        self._users: dict[str, int] = {}
        # No lease can be half over before this. Frames only move leases on, so it stays valid
        # when one comes, and `judge` makes it exact again.
        self._next_check = math.inf
        #: Look-up by identity, without the cost of a method: this runs once per message.
        self.find = self._peers.get

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def by_name(self, name: str) -> Peer | None:
        """Return the peer that has the name, joining ones included."""
        return self._names.get(name)

    def add(self, peer: Peer) -> None:
        """Add a joining peer. Its identity and name must be free."""
        assert peer.state is PeerState.JOINING, f"{peer.name} is {peer.state.value} already"
        assert peer.identity not in self._peers, f"the identity of {peer.name} is in use"
        assert peer.name not in self._names, f"the name {peer.name} is in use"
        self._peers[peer.identity] = peer
        self._names[peer.name] = peer

    def of_user(self, user: str) -> int:
        """Return how many peers have said hello with this public key."""
        return self._users.get(user, 0)

    def on_hello(
        self,
        peer: Peer,
        *,
        services: tuple[str, ...],
        capacity: int,
        lease: float,
        now: float,
        user: str = "",
    ) -> None:
        """A joining peer is there now."""
        assert peer.state is PeerState.JOINING, f"hello is not legal in state {peer.state.value}"
        peer.state = PeerState.READY
        peer.services = services
        peer.capacity = capacity
        peer.lease = lease
        peer.heard = now
        peer.user = user
        if user:
            self._users[user] = self.of_user(user) + 1
        if lease > 0:
            self._leased[peer.identity] = peer
            self._next_check = min(self._next_check, _next_check(peer))

    def remove(self, peer: Peer) -> None:
        """Forget a peer; it is GONE."""
        del self._peers[peer.identity]
        del self._names[peer.name]
        self._leased.pop(peer.identity, None)
        if peer.user:
            self._users[peer.user] -= 1
            if not self._users[peer.user]:
                del self._users[peer.user]
        peer.state = PeerState.GONE

    def judge(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """Return the peers that became SUSPECT, and those whose lease is over.

        The latter are not removed here: their requests have to be failed too.
        """
        if now < self._next_check:
            return [], []
        suspected: list[Peer] = []
        expired: list[Peer] = []
        next_check = math.inf
        for peer in self._leased.values():
            if now >= peer.heard + peer.lease:
                expired.append(peer)
                continue
            if peer.state is PeerState.READY and now >= peer.heard + peer.lease / 2:
                peer.state = PeerState.SUSPECT
                suspected.append(peer)
            next_check = min(next_check, _next_check(peer))
        self._next_check = next_check
        return suspected, expired

    def next_check(self) -> float | None:
        """Return a time before which `judge` has nothing to do, or None if it never has."""
        return None if self._next_check == math.inf else self._next_check

    def count(self, state: PeerState) -> int:
        """Return how many peers are in that state."""
        return sum(peer.state is state for peer in self._peers.values())

    def on_heard(self, peer: Peer, now: float) -> bool:
        """A sign of life came; return whether it healed a SUSPECT peer."""
        peer.heard = now
        if peer.state is not PeerState.SUSPECT:
            return False
        peer.state = PeerState.READY
        # It is READY again, so half its lease counts again, which may be before `_next_check`.
        self._next_check = min(self._next_check, _next_check(peer))
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError if the indices disagree."""
        assert {peer.name: peer for peer in self} == self._names, (
            "the index by name differs from the peers"
        )
        users = Counter(peer.user for peer in self if peer.user)
        assert users == self._users, "the peers of a key are counted wrongly"
        for identity, peer in self._peers.items():
            assert identity == peer.identity, f"{peer.name} is filed under another identity"
            assert peer.state is not PeerState.GONE, f"{peer.name} is gone and still known"
            assert peer.in_flight >= 0, f"{peer.name} holds {peer.in_flight} requests"
            assert len(peer.overdue) <= _MAX_OVERDUE, f"{peer.name} has too many overdue ids"
            leased = peer.state is not PeerState.JOINING and peer.lease > 0
            assert (identity in self._leased) == leased, f"{peer.name} is in no list of leases"
            if leased:
                assert self._next_check <= _next_check(peer), f"{peer.name} is checked too late"
        assert self._leased.keys() <= self._peers.keys(), "a peer that is gone has a lease"


def _next_check(peer: Peer) -> float:
    return peer.heard + (peer.lease if peer.state is PeerState.SUSPECT else peer.lease / 2)
