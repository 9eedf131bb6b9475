"""Who the clients of a bridge are: sessions, their leases, what they were answered. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import msgspec

from envbus.bus.invariants import expect
from envbus.runner.bridge.episode import Episode
from envbus.runner.bridge.vocabulary import Act, Answer, Refuse

__all__ = ["Session", "Sessions"]


class Session(msgspec.Struct, eq=False):
    """One client's stay, over as many connections as it takes."""

    secret: str
    name: str
    #: Its present connection; b"": it has none.
    peer: bytes
    #: Public key of who began it; "" without keys.
    user: str = ""
    #: Its last connection, if it has none.
    left: bytes = b""
    #: When it is given up, if it has none.
    expires_at: float = 0.0
    #: Its open episodes.
    episodes: dict[str, Episode] = msgspec.field(default_factory=dict)
    #: Ids of its finished episodes that are remembered, oldest first.
    finished: deque[str] = msgspec.field(default_factory=deque)
    #: What requests were answered, oldest first; None: not yet. Ordered, as the first key of a dict
    #: from which first keys were taken is behind all their gaps.
    answers: OrderedDict[int, Answer | Act | Refuse | None] = msgspec.field(
        default_factory=OrderedDict
    )
    #: Of the requests in `answers`; and of the one in hand.
    digests: dict[int, int] = msgspec.field(default_factory=dict)
    digest: int = 0
    #: Highest id of a request whose answer is not remembered any more.
    forgotten: int = -1
    #: Highest id of a request so far.
    highest: int = -1
    #: Bytes of its messages that wait for the runner.
    num_bytes: int = 0


class Sessions:
    """The sessions of one bridge, by peer and by secret. A connection has one, or has left one."""

    def __init__(self, make_secret: Callable[[], str], lease: float, max_answers: int) -> None:
        self._make_secret = make_secret
        self._lease = lease
        self._max_answers = max_answers
        self._by_secret: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        #: Those without a connection, by the one they had; that which expires first comes first.
        self._lost: dict[bytes, Session] = {}
        #: Look-ups by peer and by secret, without the cost of a method.
        self.find = self._by_peer.get
        self.by_secret = self._by_secret.get

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_secret.values())

    @property
    def num_lost(self) -> int:
        """Sessions whose client is gone and may come back."""
        return len(self._lost)

    def held_by(self, peer: bytes) -> Session | None:
        """Return the session that a connection has, or has left."""
        return self._by_peer.get(peer) or self._lost.get(peer)

    def count(self, user: str) -> int:
        """Return how many sessions one public key has begun."""
        return sum(session.user == user for session in self._by_secret.values())

    def open(self, peer: bytes, name: str, user: str = "") -> Session:
        """Begin a session; the peer must have none."""
        expect(self.held_by(peer) is None, "the peer has a session")
        session = Session(self._make_secret(), name, peer, user)
        self._by_secret[session.secret] = self._by_peer[peer] = session
        return session

    def make_room(self, user: str = "") -> bool:
        """Forget the oldest session whose client is gone and has left no episode, if any.

        Args:
            user: Only one of this public key; "": any.
        """
        for session in self._lost.values():
            if not session.episodes and user in ("", session.user):
                del self._lost[session.left], self._by_secret[session.secret]
                return True
        return False

    def queued_bytes(self) -> tuple[int, int]:
        """Return the bytes that wait for the runner: of all, and of the one that has most."""
        sizes = [session.num_bytes for session in self._by_secret.values()]
        return sum(sizes), max(sizes, default=0)

    def move(self, session: Session, peer: bytes, request_id: int) -> None:
        """The session's client has come back, under this id or another one.

        Its answers are kept if it goes on counting its requests: one that begins anew, as another
        process does, must not be handed what its former self was told.
        """
        if session.peer:
            del self._by_peer[session.peer]
        else:
            del self._lost[session.left]
        session.peer = peer
        self._by_peer[peer] = session
        if request_id <= session.highest:
            session.answers.clear()
            session.digests.clear()
            session.highest = session.forgotten = -1

    def lose(self, peer: bytes, now: float) -> None:
        """A peer is gone; its session waits for it until the lease is over."""
        session = self._by_peer.pop(peer, None)
        if session is None:
            return
        session.peer, session.left = b"", peer
        session.expires_at = now + self._lease
        self._lost[peer] = session

    def end(self, peer: bytes) -> Session | None:
        """Forget and return the session of a peer that will not come back, if it has one.

        Its connection may have been lost before.
        """
        session = self._by_peer.pop(peer, None) or self._lost.pop(peer, None)
        if session is not None:
            del self._by_secret[session.secret]
        return session

    def expire(self, now: float) -> list[Session]:
        """Forget and return the sessions whose lease is over."""
        expired = []
        for session in self._lost.values():
            if session.expires_at > now:
                break
            expired.append(session)
        for session in expired:
            del self._lost[session.left], self._by_secret[session.secret]
        return expired

    def next_expiry(self) -> float | None:
        """Return when `expire` has something to do; None: nobody is lost."""
        for session in self._lost.values():
            return session.expires_at
        return None

    def note(self, session: Session, request_id: int, answer: Answer | Act | Refuse | None) -> None:
        """Remember what a request was answered; None: that it came, and is not answered yet."""
        answers = session.answers
        if request_id in answers:
            answers[request_id] = answer
            return
        if request_id <= session.forgotten:  # it has waited for too long to be remembered
            return
        if request_id > session.highest:
            session.highest = request_id
        answers[request_id] = answer
        session.digests[request_id] = session.digest
        if len(answers) > self._max_answers:
            oldest, _ = answers.popitem(last=False)
            del session.digests[oldest]
            if oldest > session.forgotten:
                session.forgotten = oldest

    def check_invariants(self) -> None:
        """Raise AssertionError if the indices disagree."""
        there = {s.secret for s in self._by_peer.values()}
        lost = {s.secret for s in self._lost.values()}
        expect(not there & lost, "a session is lost and there")
        expect(there | lost == self._by_secret.keys(), "a session is nowhere")
        expect(not self._by_peer.keys() & self._lost.keys(), "a connection has two sessions")
        for peer, session in self._by_peer.items():
            expect(peer == session.peer, f"{session.name} is filed under another peer")
        for peer, session in self._lost.items():
            expect(peer == session.left, f"{session.name} was left by another peer")
        for session in self._by_secret.values():
            expect(len(session.answers) <= self._max_answers, "too many answers are kept")
            expect(session.answers.keys() == session.digests.keys(), "an answer has no digest")
