"""What a bridge knows of its clients and their episodes, and the steps that several rules share.

Which event leads to which step is decided in `episodes.py`. Pure.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from envbus.actors.external.elements import leaves
from envbus.actors.external.errors import (
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
)
from envbus.actors.external.protocol import EpisodeEnded, Logged
from envbus.bus.broker.deadlines import LOCAL, Pending, PendingRequests
from envbus.bus.wire.messages import Failed, FailureCode, Reply
from envbus.runner.bridge.episode import Episode
from envbus.runner.bridge.vocabulary import (
    Act,
    BridgeStatistics,
    ClientCall,
    ClientFragment,
    Effect,
    End,
    EpisodeLimits,
    Join,
    LogStep,
    Observe,
    Refuse,
    SendReply,
)

__all__ = ["ENDED", "LOGGED", "NOT_JOINED", "ClientSession", "EpisodeTable", "Sessions"]

LOGGED = Logged()
ENDED = EpisodeEnded()
#: What those are told that ask without a session.
NOT_JOINED = Failed(
    code=FailureCode.NOT_JOINED,
    message="join the bridge first, by a JoinBridge",
    peer="bridge",
)


#: Bytes of actions among the answers of one session that are remembered, beside the newest answer.
_MAX_ANSWER_BYTES = 1 << 24
#: Seconds until answers for which there was no room are sent again: at first, and at most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
#: Of one session so many at one go.
_MOST_AGAIN = 256


class ClientSession(msgspec.Struct, eq=False):
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
    #: Digests of requests that came, and are not answered yet: of those that wait for something.
    unanswered: dict[int, int] = msgspec.field(default_factory=dict)
    #: What requests were answered, the first answer first. Ordered, as the first key of a dict from
    #: which first keys were taken is behind all their gaps.
    answers: OrderedDict[int, SendReply | Act | Refuse] = msgspec.field(default_factory=OrderedDict)
    #: What the actions in `answers` take, in bytes.
    answer_bytes: int = 0
    #: Of the requests in `answers`; and of the one in hand.
    digests: dict[int, int] = msgspec.field(default_factory=dict)
    digest: int = 0
    #: Highest id of a request whose answer is not remembered any more.
    forgotten: int = -1
    #: Highest id of a request so far.
    highest: int = -1
    #: Bytes of its messages that wait for the runner.
    num_bytes: int = 0
    #: Requests in `answers` whose answer could not be sent, in the order in which that is tried.
    unsent: OrderedDict[int, None] = msgspec.field(default_factory=OrderedDict)
    #: When it is tried again, how long after the last time, and which came first then.
    try_at: float = 0.0
    pause: float = _SHORTEST_PAUSE
    tried: int = -1


class Sessions:
    """The sessions of one bridge, by peer and by secret. A connection has one, or has left one."""

    def __init__(self, make_secret: Callable[[], str], lease: float, max_answers: int) -> None:
        self._make_secret = make_secret
        self._lease = lease
        self._max_answers = max_answers
        self._by_secret: dict[str, ClientSession] = {}
        self._by_peer: dict[bytes, ClientSession] = {}
        #: Those without a connection, by the one they had; that which expires first comes first.
        self._lost: dict[bytes, ClientSession] = {}
        #: By peer, those that have unsent answers; and when one of them is tried again.
        self._full: dict[bytes, ClientSession] = {}
        self.next_try: float | None = None
        #: Look-ups by peer and by secret, without the cost of a method.
        self.find = self._by_peer.get
        self.by_secret = self._by_secret.get

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(self._by_secret.values())

    @property
    def num_lost(self) -> int:
        """Sessions whose client is gone and may come back."""
        return len(self._lost)

    def held_by(self, peer: bytes) -> ClientSession | None:
        """Return the session that a connection has, or has left."""
        return self._by_peer.get(peer) or self._lost.get(peer)

    def count(self, user: str) -> int:
        """Return how many sessions one public key has begun."""
        return sum(session.user == user for session in self._by_secret.values())

    def open(self, peer: bytes, name: str, user: str = "") -> ClientSession:
        """Begin a session; the peer must have none."""
        assert self.held_by(peer) is None, "the peer has a session"
        session = ClientSession(self._make_secret(), name, peer, user)
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

    def move(self, session: ClientSession, peer: bytes, request_id: int) -> None:
        """The session's client has come back, under this id or another one.

        Its answers are kept if it goes on counting its requests: one that begins anew, as another
        process does, must not be handed what its former self was told.
        """
        if session.peer:
            del self._by_peer[session.peer]
        else:
            del self._lost[session.left]
        self._forget_unsent(session)
        session.peer = peer
        self._by_peer[peer] = session
        if request_id <= session.highest:
            session.unanswered.clear()
            session.answers.clear()
            session.digests.clear()
            session.answer_bytes = 0
            session.highest = session.forgotten = -1

    def lose(self, peer: bytes, now: float) -> None:
        """A peer is gone; its session waits for it until the lease is over."""
        session = self._by_peer.pop(peer, None)
        if session is None:
            return
        self._forget_unsent(session)
        session.peer, session.left = b"", peer
        session.expires_at = now + self._lease
        self._lost[peer] = session

    def end(self, peer: bytes) -> ClientSession | None:
        """Forget and return the session of a peer that will not come back, if it has one.

        Its connection may have been lost before.
        """
        session = self._by_peer.pop(peer, None) or self._lost.pop(peer, None)
        if session is not None:
            self._forget_unsent(session)
            del self._by_secret[session.secret]
        return session

    def expire(self, now: float) -> list[ClientSession]:
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

    def note(
        self, session: ClientSession, request_id: int, answer: SendReply | Act | Refuse | None
    ) -> None:
        """Remember what a request was answered; None: that it came, and is not answered yet."""
        answers = session.answers
        if answer is None:
            session.unanswered[request_id] = session.digest
        elif request_id in answers:
            session.answer_bytes += _num_bytes(answer) - _num_bytes(answers[request_id])
            answers[request_id] = answer
        else:
            answers[request_id] = answer
            session.answer_bytes += _num_bytes(answer)
            session.digests[request_id] = session.unanswered.pop(request_id, session.digest)
        session.highest = max(session.highest, request_id)
        self.trim(session)

    def trim(self, session: ClientSession) -> None:
        """Forget the first answers beyond so many: one of each open episode may have been lost."""
        answers, most = session.answers, max(self._max_answers, len(session.episodes))
        while len(answers) > most or (
            session.answer_bytes > _MAX_ANSWER_BYTES and len(answers) > 1
        ):
            oldest, forgotten = answers.popitem(last=False)
            session.answer_bytes -= _num_bytes(forgotten)
            del session.digests[oldest]
            session.unsent.pop(oldest, None)
            session.forgotten = max(session.forgotten, oldest)

    def keep_back(self, peer: bytes, request_id: int, now: float) -> None:
        """There was no room for an answer: if it is remembered, it is sent again."""
        session = self.find(peer)
        if session is None or request_id not in session.answers:
            return
        if request_id == session.tried:  # there is none still
            session.pause = min(2 * session.pause, _LONGEST_PAUSE)
            session.try_at = now + session.pause
        elif not session.unsent:
            session.try_at = now + session.pause
        session.unsent[request_id] = None
        self._full[peer] = session
        self.next_try = min(session.try_at, self.next_try or session.try_at)

    def kept_back(self, now: float) -> list[Effect]:
        """Return the answers that are to be sent again now."""
        if self.next_try is None or now < self.next_try:
            return []
        again: list[Effect] = []
        for peer, session in list(self._full.items()):
            if session.try_at > now:
                continue
            if session.tried not in session.unsent:  # there was room meanwhile
                session.pause = _SHORTEST_PAUSE
            session.try_at = now + session.pause
            for number in list(itertools.islice(session.unsent, _MOST_AGAIN)):
                if not again or again[-1].peer != peer:
                    session.tried = number
                del session.unsent[number]
                answer = session.answers[number]
                again.append(
                    answer if answer.peer == peer else msgspec.structs.replace(answer, peer=peer)
                )
            if not session.unsent:
                del self._full[peer]
        self.next_try = min((session.try_at for session in self._full.values()), default=None)
        return again

    def _forget_unsent(self, session: ClientSession) -> None:
        """Its connection is another one soon, by which the client asks again."""
        self._full.pop(session.peer, None)
        session.unsent.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if the indices disagree."""
        there = {s.secret for s in self._by_peer.values()}
        lost = {s.secret for s in self._lost.values()}
        assert not there & lost, "a session is lost and there"
        assert there | lost == self._by_secret.keys(), "a session is nowhere"
        assert not self._by_peer.keys() & self._lost.keys(), "a connection has two sessions"
        for peer, session in self._by_peer.items():
            assert peer == session.peer, f"{session.name} is filed under another peer"
        for peer, session in self._lost.items():
            assert peer == session.left, f"{session.name} was left by another peer"
        for session in self._by_secret.values():
            most = max(self._max_answers, len(session.episodes))
            assert len(session.answers) <= most, "too many answers are kept"
            assert not session.answers.keys() & session.unanswered.keys(), "it waits and does not"
            assert session.answers.keys() == session.digests.keys(), "an answer has no digest"
            size = sum(map(_num_bytes, session.answers.values()))
            assert size == session.answer_bytes, "the bytes of the answers are others"
            assert session.unsent.keys() <= session.answers.keys(), "what is unsent is forgotten"
            is_full = self._full.get(session.peer) is session
            assert is_full or not session.unsent, "what is unsent stays so"
        assert self._full.keys() <= self._by_peer.keys(), "a connection that is gone is full"


def _num_bytes(answer: SendReply | Act | Refuse) -> int:
    """Return what an answer holds that its size is not known of beforehand: an action."""
    if type(answer) is not Act:
        return 0
    size = 0
    for item in leaves(answer.action):
        if isinstance(item, np.ndarray):
            size += item.nbytes
        elif isinstance(item, str | bytes):
            size += len(item)
    return size


class Held(msgspec.Struct, frozen=True, gc=False):
    """A request that was done, and is answered later."""

    session: str
    request_id: int
    reply: Reply


class EpisodeTable:
    """The episodes of one bridge, whose they are, and who waits for what.

    Args:
        limits: Of all that is kept here.
        make_secret: Of a session; see `Sessions`.

    Attributes:
        sessions: The clients, and what they were answered.
        open: Episodes that are not over.
        finished: Ids that are used up, oldest first; whether the episode was lost, and whose it
            was.
        unconfirmed: By episode that has ended: number of the request that waits for its
            confirmation.
        ready: By id, episodes with records for the runner, in the order in which they got them.
        pending: Deadlines of those who wait for an action, or for what is in `held`.
        held: By number among the pending ones: requests that are answered when the runner has taken
            a record, or confirmed an end, or when their time is over.
        counts: Since the start.
        draining: Whether no more episodes begin.
    """

    def __init__(self, limits: EpisodeLimits, make_secret: Callable[[], str]) -> None:
        self.limits = limits
        self.sessions = Sessions(make_secret, limits.lease, limits.max_answers)
        self.open: dict[str, Episode] = {}
        self.finished: OrderedDict[str, tuple[bool, str]] = OrderedDict()
        self.unconfirmed: dict[str, int] = {}
        self.ready: dict[str, Episode] = {}
        self.pending = PendingRequests()
        self.held: dict[int, Held] = {}
        self._numbers = 0
        self.counts = BridgeStatistics()
        self.draining = False

    def close(self, session: ClientSession, episode: Episode, *, lost: bool) -> None:
        """An episode is over; its id is used up."""
        episode.over = True
        del self.open[episode.episode_id], session.episodes[episode.episode_id]
        self.sessions.trim(session)
        self.finished[episode.episode_id] = lost, session.secret
        session.finished.append(episode.episode_id)
        if len(session.finished) > self.limits.max_client_finished:
            self.finished.pop(session.finished.popleft(), None)
        elif len(self.finished) > self.limits.max_finished:
            _, (_, secret) = self.finished.popitem(last=False)
            if (owner := self.sessions.by_secret(secret)) is not None:
                owner.finished.popleft()  # the oldest of all is its owner's oldest

    def release(self, session: ClientSession, episode: Episode, failed: Failed) -> list[Effect]:
        """Fail who waits for an action, and take back or mark the observation."""
        waiting = episode.waiting
        assert waiting is not None, f"nobody waits in episode {episode.episode_id}"
        self.pending.settle(waiting.number, b"")
        session.num_bytes -= episode.withdraw()
        if not episode.num_queued:
            self.ready.pop(episode.episode_id, None)
        return self.answer(session, Refuse(session.peer, waiting.request_id, failed))

    def wait(
        self, session: ClientSession, event: Observe | LogStep | ClientFragment | End, now: float
    ) -> int:
        """Open a deadline for a request that is not answered at once; return its number."""
        self._numbers = number = self._numbers + 1
        timeout, verb = event.timeout, type(event).__name__
        deadline = now + timeout
        self.pending.open(
            Pending(LOCAL, event.request_id, number, b"", event.episode_id, deadline, timeout, verb)
        )
        self.sessions.note(session, event.request_id, None)
        return number

    def hold(
        self,
        session: ClientSession,
        event: LogStep | ClientFragment | End,
        reply: Reply,
        now: float,
    ) -> int:
        """As `wait`, for a request that was done: `resolve` answers it."""
        number = self.wait(session, event, now)
        self.held[number] = Held(session.secret, event.request_id, reply)
        return number

    def resolve(self, number: int, failed: Failed | None = None) -> list[Effect]:
        """Answer a held request, unless it was answered; with its reply if nothing has failed."""
        held = self.held.pop(number, None)
        session = None if held is None else self.sessions.by_secret(held.session)
        self.pending.settle(number, b"")
        if held is None or session is None:
            return []
        if failed is not None:
            return self.answer(session, Refuse(b"", held.request_id, failed))
        return self.answer(session, SendReply(b"", held.request_id, held.reply))

    def forget_waiting(self, session: ClientSession) -> None:
        """Nobody waits any more for what was asked in a session, which goes on."""
        for number in [n for n, held in self.held.items() if held.session == session.secret]:
            del self.held[number]
            self.pending.settle(number, b"")
        gone = Failed(code=FailureCode.PEER_LOST, message="its client has begun anew")
        for episode in session.episodes.values():
            episode.begin_anew()
            if episode.waiting is not None:
                self.release(session, episode, gone)

    def answer(self, session: ClientSession, answer: SendReply | Act | Refuse) -> list[Effect]:
        """Remember an answer, and send it if its client is there."""
        self.sessions.note(session, answer.request_id, answer)
        if not session.peer:
            return []
        if answer.peer != session.peer:
            answer = msgspec.structs.replace(answer, peer=session.peer)
        return [answer]

    def reply(self, session: ClientSession, call: ClientCall, reply: Reply) -> list[Effect]:
        """As `answer`, for a call that was done."""
        return self.answer(session, SendReply(call.peer, call.request_id, reply))

    def refuse(self, asked: ClientCall | Join, error: RefusedError) -> list[Effect]:
        """Answer a request that was not done, and is not remembered."""
        self.counts.refused += 1
        return [Refuse(asked.peer, asked.request_id, error.failed())]

    def overloaded(self, asked: ClientCall | Join, text: str) -> list[Effect]:
        """As `refuse`, for what there is no room for."""
        self.counts.refused += 1
        failed = Failed(code=FailureCode.OVERLOADED, message=text, peer="bridge")
        return [Refuse(asked.peer, asked.request_id, failed)]

    def owner(self, episode: Episode) -> ClientSession:
        """Return whose an open episode is."""
        session = self.sessions.by_secret(episode.session)
        assert session is not None, f"episode {episode.episode_id} belongs to nobody"
        return session

    def is_used_up(self, episode_id: str) -> bool:
        """Whether an episode of that id is over, as far as is remembered.

        That of one of which the runner was not shown all is never forgotten.
        """
        return (
            episode_id in self.finished
            or episode_id in self.unconfirmed
            or (episode_id in self.ready and episode_id not in self.open)
        )

    def unknown(self, episode_id: str) -> RefusedError:
        """Return why a client cannot use an id."""
        if self.is_used_up(episode_id):
            return self.finished_error(episode_id)
        if episode_id in self.open:
            text = f"Episode {episode_id} not found: it belongs to another client."
            return EpisodeNotFoundError(text)
        return EpisodeNotFoundError(f"Episode {episode_id} not found.")

    def finished_error(self, episode_id: str) -> RefusedError:
        """Return what became of an episode whose id is used up."""
        lost, _ = self.finished.get(episode_id, (False, ""))
        if lost:
            return EpisodeLostError(
                f"Episode {episode_id} has been given up: its client was gone for over "
                f"{self.limits.lease:g} s, or joined anew."
            )
        return EpisodeFinishedError(f"Episode {episode_id} has already completed.")

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self.sessions.check_invariants()
        self.pending.check_invariants()
        waiting = set()
        for episode_id, episode in self.open.items():
            session = self.sessions.by_secret(episode.session)
            assert session is not None, f"episode {episode_id} belongs to nobody"
            assert session.episodes.get(episode_id) is episode, (
                f"episode {episode_id} is not its client's"
            )
            assert not episode.over, f"episode {episode_id} is open and over"
            assert episode_id not in self.finished, f"episode {episode_id} is open and finished"
            assert (self.ready.get(episode_id) is episode) == bool(episode.num_queued), (
                "a record is forgotten"
            )
            if episode.waiting is not None:
                waiting.add(episode.waiting.number)
        assert waiting | self.held.keys() == {
            pending.wire_id for pending in self.pending.unsettled()
        }, "an episode waits without a deadline, or the other way round"
        assert all(episode.num_queued for episode in self.ready.values()), "nothing is ready"
        assert len(self.finished) <= self.limits.max_finished, "too many ids are remembered"
        by_session: dict[str, list[str]] = {}
        for episode_id, (_, secret) in self.finished.items():
            by_session.setdefault(secret, []).append(episode_id)
        pending_ids = {pending.request_id for pending in self.pending.unsettled()}
        held = {id(one): one for one in (*self.open.values(), *self.ready.values())}.values()
        for session in self.sessions:
            size = sum(one.held_bytes for one in held if one.session == session.secret)
            assert size == session.num_bytes, "bytes are given back twice, or never"
            assert session.unanswered.keys() <= pending_ids, "a request waits without a deadline"
            own = by_session.get(session.secret, [])
            assert list(session.finished) == own, f"{session.name} has finished other episodes"
            assert len(own) <= self.limits.max_client_finished, "too many ids of one client"
        assert not self.unconfirmed.keys() & self.open.keys(), "an episode is open and ended"
