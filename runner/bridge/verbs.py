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
    RequestIdUsedError,
)
from envbus.actors.external.protocol import EpisodeStarted, FragmentLogged
from envbus.bus.brief import brief
from envbus.bus.messages import FailureCode
from envbus.runner.bridge.book import ENDED, LOGGED, NOT_JOINED, Book
from envbus.runner.bridge.episode import MAX_REWARD, Episode, Waiting
from envbus.runner.bridge.sessions import Session
from envbus.runner.bridge.vocabulary import (
    Answer,
    Ask,
    ByAgent,
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
#: Bytes that the shortest message counts for: what is kept of it takes no less.
_LEAST_BYTES = 1024
Counted: TypeAlias = Ask | LogStep | LogReward | Fragment | End
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
            if event.digest != session.digests[event.request_id]:
                return self._refuse_id(event)
            book.counts.resent += 1
            answer = session.answers[event.request_id]
            return [] if answer is None else book.answer(session, answer)
        if event.request_id <= session.forgotten:
            return self._refuse_id(event)
        session.digest = event.digest
        if type(event) is Start:
            return self._start(session, event)
        assert event.episode_id is not None, "only a Start may leave the id open"
        episode = session.episodes.get(event.episode_id)
        if episode is None:
            return book.refuse(event.peer, event.request_id, book.unknown(event.episode_id))
        verb = self._verbs[type(event)]
        if not isinstance(event, Start | Fragment) and event.not_taken is not None:
            book.counts.dropped_actions += episode.give_back(event.not_taken)
        if episode.waiting is None:
            return verb(session, episode, event, now)
        if type(event) is End:  # what waits may still be shown to the runner
            return verb(session, episode, event, now)
        return self._supersede(session, episode) + verb(session, episode, event, now)

    def _refuse_id(self, event: Verb) -> list[Effect]:
        text = (
            f"request id {event.request_id} came before in this session, for another request or "
            f"over {self._book.limits.max_answers} requests ago; count ids up, and use none again"
        )
        return self._book.refuse(event.peer, event.request_id, RequestIdUsedError(text))

    def _start(self, session: Session, event: Start) -> list[Effect]:
        book = self._book
        episode_id = self._make_id() if event.episode_id is None else event.episode_id
        error: RefusedError | None = None
        if episode_id in book.open:
            error = EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        elif book.is_used_up(episode_id):
            error = book.finished_error(episode_id)
        elif not 0 < len(episode_id) <= MAX_ID_CHARS or not episode_id.isprintable():
            error = EpisodeError(
                f"an episode's id has 1 to {MAX_ID_CHARS} characters, none of them a control "
                f"character, unlike {brief(episode_id)}"
            )
        if error is not None:
            return book.refuse(event.peer, event.request_id, error)
        if book.draining:
            text = "no more episodes begin here: the server ends when the running ones are over"
            return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        if len(book.open) >= book.limits.max_episodes:
            text = f"{len(book.open)} episodes are open, which is the limit; end some"
            return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        limit = book.limits.max_client_episodes
        if len(session.episodes) >= limit:
            book.counts.over_budget += 1
            text = (
                f"{len(session.episodes)} episodes of this client are open, which is the limit "
                f"(EpisodeLimits.max_client_episodes={limit}); end some"
            )
            return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        if (refusal := self._over_budget(session, event, 0)) is not None:
            return refusal
        episode = Episode(episode_id, session.secret, training_enabled=event.training_enabled)
        book.open[episode_id] = session.episodes[episode_id] = episode
        book.counts.episodes += 1
        reply = EpisodeStarted(episode_id=episode_id)
        return book.answer(session, Answer(event.peer, event.request_id, reply))

    def _ask(self, session: Session, episode: Episode, event: Ask, now: float) -> list[Effect]:
        book = self._book
        if (refusal := self._over_budget(session, event, event.size)) is not None:
            return refusal
        size = self._charge(session, event)
        record = episode.observe(event.observation, size=size)
        number = book.wait(session, event, now)
        episode.asked = event.request_id
        episode.waiting = Waiting(event.request_id, number, record, size)
        book.ready[episode.episode_id] = episode
        return []

    def _log_step(
        self, session: Session, episode: Episode, event: LogStep, now: float
    ) -> list[Effect]:
        if (refusal := self._overflow(session, episode, event)) is not None:
            return refusal
        book = self._book
        size = self._charge(session, event)
        has_to_wait = self._has_to_wait(session, episode.num_queued + 1)
        held = book.hold(session, event, LOGGED, now) if has_to_wait else 0
        episode.observe(event.observation, off_policy=event.action, held=held, size=size)
        book.ready[episode.episode_id] = episode
        book.counts.logged_actions += 1
        if held:
            return []
        return book.answer(session, Answer(event.peer, event.request_id, LOGGED))

    def _log_reward(
        self, session: Session, episode: Episode, event: LogReward, _now: float
    ) -> list[Effect]:
        refusal = self._over_budget(session, event, event.size)
        if refusal is None:
            refusal = self._too_much_reward(episode, event, [(event.rewards, {})])
        if refusal is not None:
            return refusal
        episode.log(
            event.rewards,
            event.infos,
            event.terminateds,
            event.truncateds,
            size=self._charge(session, event),
        )
        return self._book.answer(session, Answer(event.peer, event.request_id, LOGGED))

    def _log_fragment(
        self, session: Session, episode: Episode, event: Fragment, now: float
    ) -> list[Effect]:
        if (refusal := self._overflow(session, episode, event)) is not None:
            return refusal
        book = self._book
        if event.first > episode.num_parts:
            text = (
                f"Episode {event.episode_id}: the fragment begins with step {event.first}, and "
                f"only {episode.num_parts} have come before."
            )
            return book.refuse(event.peer, event.request_id, EpisodeError(text))
        parts = event.parts[episode.num_parts - event.first :]
        told = [
            (
                {} if part.reward is None else part.reward.rewards,
                {} if part.step is None else part.step.observation,
            )
            for part in parts
        ]
        if (refusal := self._too_much_reward(episode, event, told)) is not None:
            return refusal
        record: Record | None = None
        stale = 0
        size = self._charge(session, event)
        for part in parts:
            reward, step, choice = part.reward, part.step, part.choice
            if reward is not None:
                episode.log(reward.rewards, reward.infos, reward.terminateds, reward.truncateds)
            if step is None:
                continue
            is_stale = choice is not None and self._is_stale(
                choice.policy_id, choice.policy_version
            )
            # Nobody has acted, as far as rows are concerned.
            chosen = {} if is_stale else step.action
            record = episode.observe(step.observation, off_policy=chosen, size=size)
            size = 0  # all of it is the first record's
            record.choice = None if is_stale else choice
            stale += is_stale
            book.counts.local_actions += choice is not None
            book.counts.logged_actions += choice is None
        book.counts.stale_actions += stale
        episode.num_parts = max(episode.num_parts, event.first + len(event.parts))
        if size:
            episode.log({}, {}, {}, {}, size=size)
        reply = FragmentLogged(dropped=stale)
        if record is None:
            return book.answer(session, Answer(event.peer, event.request_id, reply))
        book.ready[episode.episode_id] = episode
        if not self._has_to_wait(session, episode.num_queued):
            return book.answer(session, Answer(event.peer, event.request_id, reply))
        record.held = book.hold(session, event, reply, now)
        return []

    def _charge(self, session: Session, event: Counted) -> int:
        """Return what a message counts for in its client's budget, from which it was taken."""
        size = max(event.size, _LEAST_BYTES)
        session.num_bytes += size
        return size

    def _has_to_wait(self, session: Session, queued: int) -> bool:
        """Whether a client is answered only when the runner has taken what it has logged."""
        limits = self._book.limits
        return queued > limits.max_queued or 2 * session.num_bytes > limits.max_client_bytes

    def _over_budget(self, session: Session, event: Verb, size: int) -> list[Effect] | None:
        """Refuse what is beyond a client's budget; None: there is room."""
        book, limit = self._book, self._book.limits.max_client_bytes
        if session.num_bytes + max(size, _LEAST_BYTES) <= limit:
            return None
        book.counts.over_budget += 1
        text = (
            f"{session.num_bytes} bytes of this client wait for the runner, and this message has "
            f"{size}: the limit is EpisodeLimits.max_client_bytes={limit}; wait"
        )
        return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)

    def _too_much_reward(
        self,
        episode: Episode,
        event: LogReward | Fragment,
        parts: list[tuple[ByAgent, ByAgent]],
    ) -> list[Effect] | None:
        """Refuse rewards that would add up to infinity in a row; None: they may come."""
        if episode.largest_sum(parts) <= MAX_REWARD:
            return None
        text = f"Episode {event.episode_id}: rewards add up to more than float32 can express."
        return self._book.refuse(event.peer, event.request_id, EpisodeError(text))

    def _overflow(
        self, session: Session, episode: Episode, event: LogStep | Fragment
    ) -> list[Effect] | None:
        """Refuse steps of an episode for which far too many wait already; None: they may come."""
        book, queued = self._book, episode.num_queued
        if queued < _OVERFLOW * book.limits.max_queued:
            return self._over_budget(session, event, event.size)
        text = f"{queued} steps of episode {event.episode_id} wait for the runner; wait"
        return book.fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)

    def _end(self, session: Session, episode: Episode, event: End, now: float) -> list[Effect]:
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
            size = self._charge(session, event)  # always: it is how a client gets rid of others
            episode.end(event.observation, event.terminateds, event.truncateds, size=size)
            book.ready[episode.episode_id] = episode
            book.counts.ended += 1
            if self._confirm_ends:
                book.unconfirmed[episode.episode_id] = book.hold(session, event, ENDED, now)
                return effects
        else:
            session.num_bytes -= episode.num_bytes
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
