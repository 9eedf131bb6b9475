"""What a bridge knows of its clients' episodes, and the steps that several rules share. Pure.

Which event leads to which step is decided in `verbs.py` and `episodes.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from envbus.actors.external.errors import (
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
)
from envbus.actors.external.protocol import EpisodeEnded, Logged
from envbus.bus.invariants import expect
from envbus.bus.messages import Failed, FailureCode, Reply
from envbus.bus.pending import LOCAL, Pending, PendingRequests
from envbus.runner.bridge.episode import Episode
from envbus.runner.bridge.sessions import Session, Sessions
from envbus.runner.bridge.vocabulary import (
    Act,
    Answer,
    Ask,
    BridgeStatistics,
    Effect,
    End,
    EpisodeLimits,
    Fragment,
    LogStep,
    Refuse,
)

__all__ = ["ENDED", "LOGGED", "NOT_JOINED", "Book"]

LOGGED = Logged()
ENDED = EpisodeEnded()
#: What those are told that ask without a session.
NOT_JOINED = Failed(
    code=FailureCode.NOT_JOINED,
    message="join the bridge first, by a JoinBridge",
    peer="bridge",
)


class Held(msgspec.Struct, frozen=True, gc=False):
    """A request that was done, and is answered later."""

    session: str
    request_id: int
    reply: Reply


class Book:
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

    def close(self, session: Session, episode: Episode, *, lost: bool) -> None:
        """An episode is over; its id is used up."""
        episode.over = True
        del self.open[episode.episode_id], session.episodes[episode.episode_id]
        self.finished[episode.episode_id] = lost, session.secret
        session.finished.append(episode.episode_id)
        if len(session.finished) > self.limits.max_client_finished:
            self.finished.pop(session.finished.popleft(), None)
        elif len(self.finished) > self.limits.max_finished:
            _, (_, secret) = self.finished.popitem(last=False)
            if (owner := self.sessions.by_secret(secret)) is not None:
                owner.finished.popleft()  # the oldest of all is its owner's oldest

    def release(self, session: Session, episode: Episode, failed: Failed) -> list[Effect]:
        """Fail who waits for an action, and take back or mark the observation."""
        waiting = episode.waiting
        assert waiting is not None, f"nobody waits in episode {episode.episode_id}"
        self.pending.settle(waiting.number, b"")
        session.num_bytes -= episode.withdraw()
        if not episode.num_queued:
            self.ready.pop(episode.episode_id, None)
        return self.answer(session, Refuse(session.peer, waiting.request_id, failed))

    def wait(self, session: Session, event: Ask | LogStep | Fragment | End, now: float) -> int:
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
        self, session: Session, event: LogStep | Fragment | End, reply: Reply, now: float
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
        return self.answer(session, Answer(b"", held.request_id, held.reply))

    def forget_waiting(self, session: Session) -> None:
        """Nobody waits any more for what was asked in a session, which goes on."""
        for number in [n for n, held in self.held.items() if held.session == session.secret]:
            del self.held[number]
            self.pending.settle(number, b"")
        gone = Failed(code=FailureCode.PEER_LOST, message="its client has begun anew")
        for episode in session.episodes.values():
            if episode.waiting is not None:
                self.release(session, episode, gone)

    def answer(self, session: Session, answer: Answer | Act | Refuse) -> list[Effect]:
        """Remember an answer, and send it if its client is there."""
        self.sessions.note(session, answer.request_id, answer)
        if not session.peer:
            return []
        if answer.peer != session.peer:
            answer = msgspec.structs.replace(answer, peer=session.peer)
        return [answer]

    def refuse(self, peer: bytes, request_id: int, error: RefusedError) -> list[Effect]:
        """Answer a request that was not done, and is not remembered."""
        self.counts.refused += 1
        return [Refuse(peer, request_id, error.failed())]

    def fail(self, peer: bytes, request_id: int, code: FailureCode, text: str) -> list[Effect]:
        """As `refuse`, for what is not about an episode."""
        self.counts.refused += 1
        return [Refuse(peer, request_id, Failed(code=code, message=text, peer="bridge"))]

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
            expect(session is not None, f"episode {episode_id} belongs to nobody")
            expect(
                session is not None and session.episodes.get(episode_id) is episode,
                f"episode {episode_id} is not its client's",
            )
            expect(not episode.over, f"episode {episode_id} is open and over")
            expect(episode_id not in self.finished, f"episode {episode_id} is open and finished")
            expect(session is not None and session.num_bytes >= 0, "bytes were given back twice")
            expect(
                (self.ready.get(episode_id) is episode) == bool(episode.num_queued),
                "a record is forgotten",
            )
            if episode.waiting is not None:
                waiting.add(episode.waiting.number)
        expect(
            waiting | self.held.keys() == {pending.wire_id for pending in self.pending.unsettled()},
            "an episode waits without a deadline, or the other way round",
        )
        expect(all(episode.num_queued for episode in self.ready.values()), "nothing is ready")
        expect(len(self.finished) <= self.limits.max_finished, "too many ids are remembered")
        by_session: dict[str, list[str]] = {}
        for episode_id, (_, secret) in self.finished.items():
            by_session.setdefault(secret, []).append(episode_id)
        for session in self.sessions:
            own = by_session.get(session.secret, [])
            expect(list(session.finished) == own, f"{session.name} has finished other episodes")
            expect(len(own) <= self.limits.max_client_finished, "too many ids of one client")
        expect(not self.unconfirmed.keys() & self.open.keys(), "an episode is open and ended")
