"""What a bridge does about each event of its clients and its runner: events in, effects out.

Composes `book.py` and `verbs.py`. Pure: no socket, clock, thread or process in this file;
`bridge.py` owns those, and checks spaces before anything comes here.

Rules:

- An episode belongs to the session that started it. Its id is used once, as long as it is
  remembered.
- Calls of one episode come one after another. If one comes while another waits for an action, the
  newest counts: the waiting one fails, and its action is dropped.
- An action reaches the request that it was chosen for, or nobody. An observation whose action
  reaches nobody, or a client that says it had given up before, is void: the episode's next record
  says so. Of several void ones in a row that the runner has not seen only the first is shown.
- What was logged reaches the runner in its order, also when the episode has ended meanwhile.
- A request that comes again is answered again, and not done again.
- Where ends are to be confirmed, a client is told of an episode's end when the runner says so.
- Whatever waits is answered once, by its deadline at the latest. What was done stays done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from envbus.actors.external.errors import SessionLostError
from envbus.bus.messages import Failed, FailureCode
from envbus.bus.pending import Pending
from envbus.runner.bridge.book import Book
from envbus.runner.bridge.episode import Episode, acting
from envbus.runner.bridge.results import EpisodeFault
from envbus.runner.bridge.sessions import Session
from envbus.runner.bridge.verbs import Verbs
from envbus.runner.bridge.vocabulary import (
    Act,
    Ask,
    BridgeStatistics,
    Chosen,
    ClientLost,
    Confirm,
    Drain,
    Effect,
    End,
    EpisodeLimits,
    Event,
    Fragment,
    GiveUp,
    Join,
    LogReward,
    LogStep,
    Record,
    Start,
    Tick,
    Welcome,
)
from envbus.runner.faults import FaultCause
from envbus.runner.latency import LatencyHistogram

__all__ = ["Episodes"]


class Episodes:
    """The episodes of all clients of one bridge.

    `handle` never blocks and never raises for what a client does; AssertionError is a bug of the
    caller or of this class.

    Args:
        limits: None: the defaults.
        make_id: Returns an episode id, or a secret, that nobody can guess; a new one each time.
        is_stale: Whether the weights of a version of a policy, by id, are too old for rows.
        confirm_ends: Hold back the answer to an `End` of which the runner is shown something until
            a `Confirm` of that episode.

    Attributes:
        latency: From when somebody asked for an action until it was given, of all that were.
    """

    def __init__(
        self,
        limits: EpisodeLimits | None,
        make_id: Callable[[], str],
        *,
        is_stale: Callable[[str, int], bool] = lambda _policy_id, _version: False,
        confirm_ends: bool = False,
    ) -> None:
        self.latency = LatencyHistogram()
        self._book = Book(limits or EpisodeLimits(), make_id)
        verb = Verbs(self._book, make_id, is_stale, confirm_ends=confirm_ends).handle
        # Any: each handler takes its own event; `handle` is what callers' types are checked by.
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            Start: verb,
            Ask: verb,
            LogStep: verb,
            LogReward: verb,
            Fragment: verb,
            End: verb,
            Join: self._on_join,
            ClientLost: self._on_client_lost,
            Chosen: self._on_chosen,
            GiveUp: self._on_give_up,
            Confirm: self._on_confirm,
            Drain: self._on_drain,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return what to do about `event`, in order.

        Args:
            event: What happened.
            now: Seconds of the caller's monotonic clock; must not go back.
        """
        return self._handlers[type(event)](event, now)

    def wake_at(self) -> float | None:
        """Return by when a `Tick` is due, or None if nothing will be."""
        deadline, expiry = self._book.pending.next_deadline(), self._book.sessions.next_expiry()
        if deadline is None or expiry is None:
            return expiry if deadline is None else deadline
        return min(deadline, expiry)

    def has_enough(self, min_envs: int) -> bool:
        """Whether so many, or all that are open, have something for the runner."""
        ready = len(self._book.ready)
        return ready >= min_envs or (0 < ready >= len(self._book.open))

    def is_idle(self) -> bool:
        """Whether there is neither a client nor anything that one has left."""
        book = self._book
        return not (book.sessions or book.open or book.ready or book.unconfirmed)

    def open_ids(self) -> list[str]:
        """Return the ids of the episodes that are not over."""
        return list(self._book.open)

    def unconfirmed_ids(self) -> list[str]:
        """Return the ids of the episodes whose ends are to be confirmed."""
        return list(self._book.unconfirmed)

    def collect(self) -> tuple[list[Record], list[Effect]]:
        """Take the oldest record of each episode that has one; and what follows from that."""
        records: list[Record] = []
        effects: list[Effect] = []
        rest: dict[str, Episode] = {}
        for episode_id, episode in self._book.ready.items():
            record = episode.take()
            records.append(record)
            session = self._book.sessions.by_secret(episode.session)
            if session is not None:
                session.num_bytes -= record.size
            if record.held:
                effects += self._book.resolve(record.held)
            if episode.num_queued:
                rest[episode_id] = episode
        self._book.ready = rest
        return records, effects

    def awaited(self, episode_id: str) -> list[Any] | None:
        """Return the agents whose actions a client waits for; None: nobody waits."""
        episode = self._book.open.get(episode_id)
        waiting = None if episode is None else episode.waiting
        return acting(waiting.record) if waiting is not None and waiting.shown else None

    def statistics(self) -> BridgeStatistics:
        """Return the counts so far."""
        queued_bytes, most = self._book.sessions.queued_bytes()
        return msgspec.structs.replace(
            self._book.counts,
            queued_bytes_now=queued_bytes,
            most_queued_bytes_now=most,
            clients_now=len(self._book.sessions) - self._book.sessions.num_lost,
            lost_clients_now=self._book.sessions.num_lost,
            episodes_now=len(self._book.open),
            ready_now=len(self._book.ready),
            waiting_now=len(self._book.pending) - len(self._book.held),
            unconfirmed_now=len(self._book.unconfirmed),
            finished_now=len(self._book.finished),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self._book.check_invariants()

    # --- clients --------------------------------------------------------------------------

    def _on_join(self, event: Join, _now: float) -> list[Effect]:
        book = self._book
        peer, sessions = event.peer, book.sessions
        session = sessions.held_by(peer)
        if event.resume and (session is None or session.secret != event.resume):
            held, session = session, sessions.by_secret(event.resume)
            if session is None:
                text = (
                    "the session to be resumed is not there any more: its lease of "
                    f"{book.limits.lease:g} s is over, or the bridge was started again"
                )
                return book.refuse(peer, event.request_id, SessionLostError(text))
            if held is not None:
                sessions.end(peer)
                self._give_up_episodes(held, FaultCause.LOST, "its client took another session")
        if session is None:
            if (full := self._no_room(event.user)) is not None:
                return book.fail(peer, event.request_id, FailureCode.OVERLOADED, full)
            session = sessions.open(peer, event.name, event.user)
        elif session.peer != peer:
            # Otherwise a connection that comes and goes would fill the bridge with what it left.
            is_anew = not event.resume
            number = -1 if is_anew else event.request_id
            if number <= session.highest:
                book.forget_waiting(session)  # its requests' ids will stand for others
            if is_anew:
                why = f"its client {session.name} has joined anew"
                self._give_up_episodes(session, FaultCause.LOST, why)
                session.name = event.name
            sessions.move(session, peer, number)
            book.counts.resumed += not is_anew
        return [Welcome(peer, event.request_id, session.secret, list(session.episodes))]

    def _no_room(self, user: str) -> str | None:
        """Return which limit leaves no place for a new session; None: there is one."""
        sessions, limits = self._book.sessions, self._book.limits
        most = limits.max_key_sessions
        if user and sessions.count(user) >= most and not sessions.make_room(user):
            self._book.counts.over_budget += 1
            return (
                f"{most} clients with this public key are known, which is the limit "
                f"(EpisodeLimits.max_key_sessions={most})"
            )
        most = limits.max_sessions
        if len(sessions) >= most and not sessions.make_room():
            return f"{most} clients are known, which is the limit (EpisodeLimits.max_sessions)"
        return None

    def _on_client_lost(self, event: ClientLost, now: float) -> list[Effect]:
        if event.cause is None:
            self._book.sessions.lose(event.peer, now)
            return []
        session = self._book.sessions.end(event.peer)
        if session is not None:
            self._give_up_episodes(session, event.cause, event.reason)
        return []

    # --- the runner and the clock -----------------------------------------------------------

    def _on_chosen(self, event: Chosen, now: float) -> list[Effect]:
        book = self._book
        episode = book.open.get(event.episode_id)
        waiting = None if episode is None else episode.waiting
        if episode is None or waiting is None or not waiting.shown:
            book.counts.dropped_actions += 1
            return []
        pending = book.pending.get(waiting.number)
        assert pending is not None, f"nobody waits in episode {event.episode_id}"
        if pending.deadline <= now:  # whoever asked has given up, though nobody looked since
            book.counts.dropped_actions += 1
            return self._on_tick(Tick(), now)
        book.pending.settle(waiting.number, b"")
        self.latency.add(now - (pending.deadline - pending.timeout))
        episode.waiting, episode.answered = None, waiting.request_id
        book.counts.actions += 1
        session = book.sessions.by_secret(episode.session)
        assert session is not None, f"episode {event.episode_id} belongs to nobody"
        act = Act(session.peer, waiting.request_id, event.action, event.policy_version)
        return book.answer(session, act)

    def _on_give_up(self, event: GiveUp, _now: float) -> list[Effect]:
        book = self._book
        episode = book.open.get(event.episode_id)
        if episode is None or episode.waiting is None:
            return []
        session = book.sessions.by_secret(episode.session)
        assert session is not None, f"episode {event.episode_id} belongs to nobody"
        book.counts.policy_errors += 1
        return book.release(session, episode, event.failed)

    def _on_confirm(self, event: Confirm, _now: float) -> list[Effect]:
        number = self._book.unconfirmed.pop(event.episode_id, None)
        return [] if number is None else self._book.resolve(number, event.failed)

    def _on_drain(self, _event: Drain, _now: float) -> list[Effect]:
        self._book.draining = True
        return []

    def _on_tick(self, _event: Tick, now: float) -> list[Effect]:
        book = self._book
        effects: list[Effect] = []
        for pending in book.pending.expire(now):
            if pending.wire_id in book.held:
                book.counts.held_timeouts += 1
                effects += book.resolve(pending.wire_id, _late(pending))
                continue
            episode = book.open[pending.service]
            session = book.sessions.by_secret(episode.session)
            assert session is not None, f"episode {pending.service} belongs to nobody"
            why = (
                "the policy has not answered"
                if episode.waiting is not None and episode.waiting.shown
                else "the runner does not poll"
            )
            text = f"episode {pending.service}: no action within {pending.timeout:g} s; {why}"
            failed = Failed(code=FailureCode.TIMEOUT, message=text, peer="bridge")
            effects += book.release(session, episode, failed)
            book.counts.timeouts += 1
        for session in book.sessions.expire(now):
            why = f"its client {session.name} was gone for over {book.limits.lease:g} s"
            self._give_up_episodes(session, FaultCause.LOST, why)
        return effects

    def _give_up_episodes(self, session: Session, cause: FaultCause, why: str) -> None:
        book = self._book
        for episode in list(session.episodes.values()):
            episode_id = episode.episode_id
            if episode.waiting is not None:
                book.pending.settle(episode.waiting.number, b"")
                episode.withdraw()
            book.close(session, episode, lost=True)
            book.counts.faulty += 1
            if not episode.num_queued:
                book.ready.pop(episode_id, None)
            if episode.known:
                text = f"episode {episode_id}: {why}"
                fault = EpisodeFault(episode_id=episode_id, cause=cause, message=text)
                episode.break_off(fault)
                book.ready[episode_id] = episode


def _late(pending: Pending) -> Failed:
    """Return what a request is told that was done, and is not answered in time."""
    ended = pending.payload_type == End.__name__
    what = "its end was not confirmed" if ended else "the runner has not taken its steps"
    text = f"episode {pending.service}: {what} within {pending.timeout:g} s; what was sent counts"
    return Failed(code=FailureCode.TIMEOUT, message=text, peer="bridge")
