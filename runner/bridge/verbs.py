"""What clients ask of a bridge about their episodes, and what follows. Pure.

Works on the records of `book.py`; the rules are listed in `episodes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    RefusedError,
)
from envbus.actors.external.protocol import EpisodeStarted, FragmentLogged
from envbus.bus.messages import FailureCode
from envbus.bus.pending import LOCAL, Pending
from envbus.runner.bridge.book import ENDED, LOGGED, NOT_JOINED, Book
from envbus.runner.bridge.episode import Episode, Waiting
from envbus.runner.bridge.sessions import Session
from envbus.runner.bridge.vocabulary import (
    Answer,
    Ask,
    Effect,
    End,
    Fragment,
    LogReward,
    LogStep,
    Record,
    Refuse,
    Start,
)

__all__ = ["MAX_ID_CHARS", "Verb", "Verbs"]

#: Longest id of an episode, in characters.
MAX_ID_CHARS = 256
#: A client that does not wait for its answers may have this many times `max_queued` steps queued.
_OVERFLOW = 4
Verb: TypeAlias = Start | Ask | LogStep | LogReward | Fragment | End


class Verbs:
    """The calls of clients.

    Args:
        book: What is known, and changed here.
        make_id: As for `Episodes`.
        is_stale: As for `Episodes`.
        confirm_ends: As for `Episodes`.
    """

    def __init__(
        self,
        book: Book,
        make_id: Callable[[], str],
        is_stale: Callable[[str, int], bool],
        *,
        confirm_ends: bool,
    ) -> None:
        self._book = book
        self._make_id = make_id
        self._is_stale = is_stale
        self._confirm_ends = confirm_ends
        self._numbers = 0
        # Any: each handler takes its own event; `handle` is what callers' types are checked by.
        self._verbs: dict[type, Callable[[Session, Episode, Any, float], list[Effect]]] = {
            Ask: self._ask,
            LogStep: self._log_step,
            LogReward: self._log_reward,
            Fragment: self._log_fragment,
            End: self._end,
        }

    def handle(self, event: Verb, now: float) -> list[Effect]:
        """Return what to do about a call, in order."""
        book = self._book
        session = book.sessions.find(event.peer)
        if session is None:
            book.counts.refused += 1
            return [Refuse(event.peer, event.request_id, NOT_JOINED)]
        if event.request_id in session.answers:
            book.counts.resent += 1
            answer = session.answers[event.request_id]
            return [] if answer is None else book.answer(session, answer)
        if type(event) is Start:
            return self._start(session, event)
        assert event.episode_id is not None, "only a Start may leave the id open"
        episode = session.episodes.get(event.episode_id)
        if episode is None:
            return book.refuse(event.peer, event.request_id, book.unknown(event.episode_id))
        verb = self._verbs[type(event)]
        if episode.waiting is None:
            return verb(session, episode, event, now)
        if type(event) is End:  # what waits may still be shown to the runner
            return verb(session, episode, event, now)
        return self._supersede(session, episode) + verb(session, episode, event, now)

    def _start(self, session: Session, event: Start) -> list[Effect]:
        book = self._book
        episode_id = self._make_id() if event.episode_id is None else event.episode_id
        error: RefusedError | None = None
        if episode_id in book.open:
            error = EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        elif episode_id in book.finished:
            error = book.finished_error(episode_id)
        elif not 0 < len(episode_id) <= MAX_ID_CHARS:
            error = EpisodeError(f"an episode's id has 1 to {MAX_ID_CHARS} characters")
        if error is not None:
            return book.refuse(event.peer, event.request_id, error)
        if book.draining:
            text = "no more episodes begin here: the server ends when the running ones are over"
            return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        if len(book.open) >= book.limits.max_episodes:
            text = f"{len(book.open)} episodes are open, which is the limit; end some"
            return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        episode = Episode(episode_id, session.secret, training_enabled=event.training_enabled)
        book.open[episode_id] = session.episodes[episode_id] = episode
        book.counts.episodes += 1
        reply = EpisodeStarted(episode_id=episode_id)
        return book.answer(session, Answer(event.peer, event.request_id, reply))

    def _ask(self, session: Session, episode: Episode, event: Ask, now: float) -> list[Effect]:
        book = self._book
        record = episode.observe(event.observation)
        self._numbers = number = self._numbers + 1
        episode.waiting = Waiting(event.request_id, number, record)
        timeout = event.timeout
        book.pending.open(
            Pending(
                LOCAL,
                event.request_id,
                number,
                b"",
                event.episode_id,
                now + timeout,
                timeout,
                "GetAction",
            )
        )
        book.sessions.note(session, event.request_id, None)
        book.ready[episode] = None
        return []

    def _log_step(
        self, session: Session, episode: Episode, event: LogStep, _now: float
    ) -> list[Effect]:
        if (refusal := self._overflow(episode, event)) is not None:
            return refusal
        book = self._book
        held = event.request_id if episode.num_queued >= book.limits.max_queued else 0
        episode.observe(event.observation, off_policy=event.action, held=held)
        book.ready[episode] = None
        book.counts.logged_actions += 1
        if held:
            book.sessions.note(session, held, None)
            return []
        return book.answer(session, Answer(event.peer, event.request_id, LOGGED))

    def _log_reward(
        self, session: Session, episode: Episode, event: LogReward, _now: float
    ) -> list[Effect]:
        episode.log(event.rewards, event.infos, event.terminateds, event.truncateds)
        return self._book.answer(session, Answer(event.peer, event.request_id, LOGGED))

    def _log_fragment(
        self, session: Session, episode: Episode, event: Fragment, _now: float
    ) -> list[Effect]:
        if (refusal := self._overflow(episode, event)) is not None:
            return refusal
        book = self._book
        if event.first > episode.num_parts:
            text = (
                f"Episode {event.episode_id}: the fragment begins with step {event.first}, and "
                f"only {episode.num_parts} have come before."
            )
            return book.refuse(event.peer, event.request_id, EpisodeError(text))
        record: Record | None = None
        stale = 0
        for part in event.parts[episode.num_parts - event.first :]:
            reward, step, choice = part.reward, part.step, part.choice
            if reward is not None:
                episode.log(reward.rewards, reward.infos, reward.terminateds, reward.truncateds)
            if step is None:
                continue
            is_stale = choice is not None and self._is_stale(
                choice.policy_id, choice.policy_version
            )
            # Nobody has acted, as far as rows are concerned.
            record = episode.observe(step.observation, off_policy={} if is_stale else step.action)
            record.choice = None if is_stale else choice
            stale += is_stale
            book.counts.local_actions += choice is not None
            book.counts.logged_actions += choice is None
        book.counts.stale_actions += stale
        episode.num_parts = max(episode.num_parts, event.first + len(event.parts))
        reply = FragmentLogged(dropped=stale)
        if record is None:
            return book.answer(session, Answer(event.peer, event.request_id, reply))
        book.ready[episode] = None
        if episode.num_queued <= book.limits.max_queued:
            return book.answer(session, Answer(event.peer, event.request_id, reply))
        record.held, record.reply = event.request_id, reply
        book.sessions.note(session, event.request_id, None)
        return []

    def _overflow(self, episode: Episode, event: LogStep | Fragment) -> list[Effect] | None:
        """Refuse steps of an episode for which far too many wait already; None: they may come."""
        book, queued = self._book, episode.num_queued
        if queued < _OVERFLOW * book.limits.max_queued:
            return None
        text = f"{queued} steps of episode {event.episode_id} wait for the runner; wait"
        return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)

    def _end(self, session: Session, episode: Episode, event: End, _now: float) -> list[Effect]:
        book = self._book
        effects: list[Effect] = []
        book.close(session, episode, lost=False)
        if episode.waiting is not None:
            error = EpisodeFinishedError(
                f"Episode {episode.episode_id} was ended while it waited for an action."
            )
            effects = book.release(session, episode, error.failed())
            book.counts.superseded += 1
        if episode.known:
            episode.end(event.observation, event.terminateds, event.truncateds)
            book.ready[episode] = None
            book.counts.ended += 1
            if self._confirm_ends:
                book.unconfirmed[episode.episode_id] = session.secret, event.request_id
                book.sessions.note(session, event.request_id, None)
                return effects
        else:
            book.counts.empty += 1
        return effects + book.answer(session, Answer(event.peer, event.request_id, ENDED))

    def _supersede(self, session: Session, episode: Episode) -> list[Effect]:
        """Another call comes for an episode that waits for an action."""
        book = self._book
        book.counts.superseded += 1
        error = EpisodeBusyError(
            f"Episode {episode.episode_id} got another call while it waited for an action; calls "
            "of one episode come one after another."
        )
        return book.release(session, episode, error.failed())
