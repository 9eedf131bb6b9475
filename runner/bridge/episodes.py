"""What a bridge does about each event of its clients and its runner: events in, effects out.

Composes `episode.py` and `sessions.py`. Pure: no socket, clock, thread or process in this file;
`bridge.py` owns those, and checks spaces before anything comes here.

Rules:

- An episode belongs to the session that started it. Its id is used once, as long as it is
  remembered.
- Calls of one episode come one after another. If one comes while another waits for an action, the
  newest counts: the waiting one fails, and its action is dropped.
- An action reaches the request that it was chosen for, or nobody. An observation whose action
  reaches nobody is void: it is taken back if the runner has not seen it, else the episode's next
  record says so.
- What was logged reaches the runner in its order, also when the episode has ended meanwhile.
- A request that comes again is answered again, and not done again.
- Where ends are to be confirmed, a client is told of an episode's end when the runner says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
    SessionLostError,
)
from envbus.actors.external.protocol import (
    EpisodeEnded,
    EpisodeStarted,
    FragmentLogged,
    Logged,
)
from envbus.bus.invariants import expect
from envbus.bus.messages import Failed, FailureCode
from envbus.bus.pending import LOCAL, Pending, PendingRequests
from envbus.runner.bridge.episode import Episode, Waiting, acting
from envbus.runner.bridge.results import EpisodeFault
from envbus.runner.bridge.sessions import Session, Sessions
from envbus.runner.bridge.vocabulary import (
    Act,
    Answer,
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
    Refuse,
    Start,
    Tick,
    Welcome,
)
from envbus.runner.faults import FaultCause
from envbus.runner.latency import LatencyHistogram

__all__ = ["Episodes"]

#: Longest id of an episode, in characters.
MAX_ID_CHARS = 256
#: A client that does not wait for its answers may have this many times `max_queued` steps queued.
_OVERFLOW = 4
Verb: TypeAlias = Start | Ask | LogStep | LogReward | Fragment | End
_LOGGED = Logged()
_ENDED = EpisodeEnded()


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
        self._is_stale = is_stale
        self._limits = limits = limits or EpisodeLimits()
        self._confirm_ends = confirm_ends
        self.latency = LatencyHistogram()
        self._draining = False
        #: By episode that has ended: session and request that wait for the confirmation.
        self._unconfirmed: dict[str, tuple[str, int]] = {}
        self._make_id = make_id
        self._sessions = Sessions(make_id, limits.lease, limits.max_answers)
        self._open: dict[str, Episode] = {}
        #: Ids that are used up, oldest first, and whether the episode was lost.
        self._finished: dict[str, bool] = {}
        #: Those with records for the runner, in the order in which they got them.
        self._ready: dict[Episode, None] = {}
        self._pending = PendingRequests()
        self._numbers = 0
        self._counts = BridgeStatistics()
        # Any: each handler takes its own event; `handle` is what callers' types are checked by.
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            Start: self._on_verb,
            Ask: self._on_verb,
            LogStep: self._on_verb,
            LogReward: self._on_verb,
            Fragment: self._on_verb,
            End: self._on_verb,
            Join: self._on_join,
            ClientLost: self._on_client_lost,
            Chosen: self._on_chosen,
            GiveUp: self._on_give_up,
            Confirm: self._on_confirm,
            Drain: self._on_drain,
            Tick: self._on_tick,
        }
        self._verbs: dict[type, Callable[[Session, Episode, Any, float], list[Effect]]] = {
            Ask: self._ask,
            LogStep: self._log_step,
            LogReward: self._log_reward,
            Fragment: self._log_fragment,
            End: self._end,
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
        deadline, expiry = self._pending.next_deadline(), self._sessions.next_expiry()
        if deadline is None or expiry is None:
            return expiry if deadline is None else deadline
        return min(deadline, expiry)

    @property
    def num_ready(self) -> int:
        """Episodes with something for the runner."""
        return len(self._ready)

    @property
    def num_open(self) -> int:
        """Episodes that are not over."""
        return len(self._open)

    def open_ids(self) -> list[str]:
        """Return the ids of the episodes that are not over."""
        return list(self._open)

    def unconfirmed_ids(self) -> list[str]:
        """Return the ids of the episodes whose ends are to be confirmed."""
        return list(self._unconfirmed)

    def collect(self) -> tuple[list[Record], list[Effect]]:
        """Take the oldest record of each episode that has one; and what follows from that."""
        records: list[Record] = []
        effects: list[Effect] = []
        rest: dict[Episode, None] = {}
        for episode in self._ready:
            record = episode.take()
            records.append(record)
            if record.held:
                session = self._sessions.by_secret(episode.session)
                if session is not None:
                    effects += self._answer(
                        session, Answer(b"", record.held, record.reply or _LOGGED)
                    )
            if episode.num_queued:
                rest[episode] = None
        self._ready = rest
        return records, effects

    def awaited(self, episode_id: str) -> list[Any] | None:
        """Return the agents whose actions a client waits for; None: nobody waits."""
        episode = self._open.get(episode_id)
        waiting = None if episode is None else episode.waiting
        return acting(waiting.record) if waiting is not None and waiting.shown else None

    def statistics(self) -> BridgeStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(
            self._counts,
            clients_now=len(self._sessions) - self._sessions.num_lost,
            lost_clients_now=self._sessions.num_lost,
            episodes_now=len(self._open),
            ready_now=len(self._ready),
            waiting_now=len(self._pending),
            unconfirmed_now=len(self._unconfirmed),
            finished_now=len(self._finished),
        )

    # --- clients --------------------------------------------------------------------------

    def _on_join(self, event: Join, now: float) -> list[Effect]:
        peer = event.peer
        present = self._sessions.find(peer)
        if event.resume and (present is None or present.secret != event.resume):
            session = self._sessions.by_secret(event.resume)
            if session is None:
                text = (
                    "the session to be resumed is not there any more: its lease of "
                    f"{self._limits.lease:g} s is over, or the bridge was started again"
                )
                return self._refuse(peer, event.request_id, SessionLostError(text))
            if present is not None:  # it gives up what it has: nobody can come back to that
                self._sessions.lose(peer, now)
            self._sessions.move(session, peer, event.request_id)
            self._counts.resumed += 1
            present = session
        if present is None:
            if len(self._sessions) >= self._limits.max_sessions:
                text = f"{len(self._sessions)} clients are known, which is the limit"
                return self._fail(peer, event.request_id, FailureCode.OVERLOADED, text)
            present = self._sessions.open(peer, event.name)
        return [Welcome(peer, event.request_id, present.secret, list(present.episodes))]

    def _on_client_lost(self, event: ClientLost, now: float) -> list[Effect]:
        self._sessions.lose(event.peer, now)
        return []

    # --- verbs ----------------------------------------------------------------------------

    def _on_verb(self, event: Verb, now: float) -> list[Effect]:
        session = self._sessions.find(event.peer)
        if session is None:
            text = "join the bridge first, by a JoinBridge"
            return self._fail(event.peer, event.request_id, FailureCode.PROTOCOL, text)
        if event.request_id in session.answers:
            self._counts.resent += 1
            answer = session.answers[event.request_id]
            return [] if answer is None else self._answer(session, answer)
        if type(event) is Start:
            return self._start(session, event)
        assert event.episode_id is not None, "only a Start may leave the id open"
        episode = session.episodes.get(event.episode_id)
        if episode is None:
            return self._refuse(event.peer, event.request_id, self._unknown(event.episode_id))
        verb = self._verbs[type(event)]
        if episode.waiting is None:
            return verb(session, episode, event, now)
        if type(event) is End:  # what waits may still be shown to the runner
            return verb(session, episode, event, now)
        return self._supersede(session, episode) + verb(session, episode, event, now)

    def _start(self, session: Session, event: Start) -> list[Effect]:
        episode_id = self._make_id() if event.episode_id is None else event.episode_id
        error: RefusedError | None = None
        if episode_id in self._open:
            error = EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        elif episode_id in self._finished:
            error = self._finished_error(episode_id)
        elif not 0 < len(episode_id) <= MAX_ID_CHARS:
            error = EpisodeError(f"an episode's id has 1 to {MAX_ID_CHARS} characters")
        if error is not None:
            return self._refuse(event.peer, event.request_id, error)
        if self._draining:
            text = "no more episodes begin here: the server ends when the running ones are over"
            return self._fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        if len(self._open) >= self._limits.max_episodes:
            text = f"{len(self._open)} episodes are open, which is the limit; end some"
            return self._fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        episode = Episode(episode_id, session.secret, training_enabled=event.training_enabled)
        self._open[episode_id] = session.episodes[episode_id] = episode
        self._counts.episodes += 1
        reply = EpisodeStarted(episode_id=episode_id)
        return self._answer(session, Answer(event.peer, event.request_id, reply))

    def _ask(self, session: Session, episode: Episode, event: Ask, now: float) -> list[Effect]:
        record = episode.observe(event.observation)
        self._numbers = number = self._numbers + 1
        episode.waiting = Waiting(event.request_id, number, record)
        timeout = event.timeout
        self._pending.open(
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
        self._sessions.note(session, event.request_id, None)
        self._ready[episode] = None
        return []

    def _log_step(
        self, session: Session, episode: Episode, event: LogStep, _now: float
    ) -> list[Effect]:
        queued, most = episode.num_queued, self._limits.max_queued
        if queued >= _OVERFLOW * most:
            text = f"{queued} steps of episode {event.episode_id} wait for the runner; wait"
            return self._fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        held = event.request_id if queued >= most else 0
        episode.observe(event.observation, off_policy=event.action, held=held)
        self._ready[episode] = None
        self._counts.logged_actions += 1
        if held:
            self._sessions.note(session, held, None)
            return []
        return self._answer(session, Answer(event.peer, event.request_id, _LOGGED))

    def _log_reward(
        self, session: Session, episode: Episode, event: LogReward, _now: float
    ) -> list[Effect]:
        episode.log(event.rewards, event.infos, event.terminateds, event.truncateds)
        return self._answer(session, Answer(event.peer, event.request_id, _LOGGED))

    def _log_fragment(
        self, session: Session, episode: Episode, event: Fragment, _now: float
    ) -> list[Effect]:
        queued, most = episode.num_queued, self._limits.max_queued
        if queued >= _OVERFLOW * most:
            text = f"{queued} steps of episode {event.episode_id} wait for the runner; wait"
            return self._fail(event.peer, event.request_id, FailureCode.OVERLOADED, text)
        if event.first > episode.num_parts:
            text = (
                f"Episode {event.episode_id}: the fragment begins with step {event.first}, and "
                f"only {episode.num_parts} have come before."
            )
            return self._refuse(event.peer, event.request_id, EpisodeError(text))
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
            self._counts.local_actions += choice is not None
            self._counts.logged_actions += choice is None
        self._counts.stale_actions += stale
        episode.num_parts = max(episode.num_parts, event.first + len(event.parts))
        reply = FragmentLogged(dropped=stale)
        if record is None:
            return self._answer(session, Answer(event.peer, event.request_id, reply))
        self._ready[episode] = None
        if episode.num_queued <= most:
            return self._answer(session, Answer(event.peer, event.request_id, reply))
        record.held, record.reply = event.request_id, reply
        self._sessions.note(session, event.request_id, None)
        return []

    def _end(self, session: Session, episode: Episode, event: End, _now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._close(session, episode, lost=False)
        if episode.waiting is not None:
            error = EpisodeFinishedError(
                f"Episode {episode.episode_id} was ended while it waited for an action."
            )
            effects = self._release(session, episode, error.failed())
            self._counts.superseded += 1
        if episode.known:
            episode.end(event.observation, event.terminateds, event.truncateds)
            self._ready[episode] = None
            self._counts.ended += 1
            if self._confirm_ends:
                self._unconfirmed[episode.episode_id] = session.secret, event.request_id
                self._sessions.note(session, event.request_id, None)
                return effects
        else:
            self._counts.empty += 1
        return effects + self._answer(session, Answer(event.peer, event.request_id, _ENDED))

    # --- the runner and the clock -----------------------------------------------------------

    def _on_chosen(self, event: Chosen, now: float) -> list[Effect]:
        episode = self._open.get(event.episode_id)
        waiting = None if episode is None else episode.waiting
        if episode is None or waiting is None or not waiting.shown:
            self._counts.dropped_actions += 1
            return []
        pending = self._pending.get(waiting.number)
        assert pending is not None, f"nobody waits in episode {event.episode_id}"
        if pending.deadline <= now:  # whoever asked has given up, though nobody looked since
            self._counts.dropped_actions += 1
            return self._on_tick(Tick(), now)
        self._pending.settle(waiting.number, b"")
        self.latency.add(now - (pending.deadline - pending.timeout))
        episode.waiting = None
        self._counts.actions += 1
        session = self._sessions.by_secret(episode.session)
        assert session is not None, f"episode {event.episode_id} belongs to nobody"
        act = Act(session.peer, waiting.request_id, event.action, event.policy_version)
        return self._answer(session, act)

    def _on_give_up(self, event: GiveUp, _now: float) -> list[Effect]:
        episode = self._open.get(event.episode_id)
        if episode is None or episode.waiting is None:
            return []
        session = self._sessions.by_secret(episode.session)
        assert session is not None, f"episode {event.episode_id} belongs to nobody"
        self._counts.policy_errors += 1
        return self._release(session, episode, event.failed)

    def _on_confirm(self, event: Confirm, _now: float) -> list[Effect]:
        held = self._unconfirmed.pop(event.episode_id, None)
        session = None if held is None else self._sessions.by_secret(held[0])
        if held is None or session is None:
            return []
        if event.failed is not None:
            return self._answer(session, Refuse(b"", held[1], event.failed))
        return self._answer(session, Answer(b"", held[1], _ENDED))

    def _on_drain(self, _event: Drain, _now: float) -> list[Effect]:
        self._draining = True
        return []

    def _on_tick(self, _event: Tick, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for pending in self._pending.expire(now):
            episode = self._open[pending.service]
            session = self._sessions.by_secret(episode.session)
            assert session is not None, f"episode {pending.service} belongs to nobody"
            why = (
                "the policy has not answered"
                if episode.waiting is not None and episode.waiting.shown
                else "the runner does not poll"
            )
            text = f"episode {pending.service}: no action within {pending.timeout:g} s; {why}"
            failed = Failed(code=FailureCode.TIMEOUT, message=text, peer="bridge")
            effects += self._release(session, episode, failed)
            self._counts.timeouts += 1
        for session in self._sessions.expire(now):
            self._give_up_session(session)
        return effects

    def _give_up_session(self, session: Session) -> None:
        for episode in list(session.episodes.values()):
            episode_id = episode.episode_id
            if episode.waiting is not None:
                self._pending.settle(episode.waiting.number, b"")
                episode.withdraw()
            self._close(session, episode, lost=True)
            self._counts.faulty += 1
            if not episode.num_queued:
                self._ready.pop(episode, None)
            if episode.known:
                text = (
                    f"episode {episode_id}: its client {session.name} was gone for over "
                    f"{self._limits.lease:g} s"
                )
                fault = EpisodeFault(episode_id=episode_id, cause=FaultCause.LOST, message=text)
                episode.break_off(fault)
                self._ready[episode] = None

    # --- parts ------------------------------------------------------------------------------

    def _supersede(self, session: Session, episode: Episode) -> list[Effect]:
        """Another call comes for an episode that waits for an action."""
        self._counts.superseded += 1
        error = EpisodeBusyError(
            f"Episode {episode.episode_id} got another call while it waited for an action; calls "
            "of one episode come one after another."
        )
        return self._release(session, episode, error.failed())

    def _release(self, session: Session, episode: Episode, failed: Failed) -> list[Effect]:
        """Fail who waits for an action, and take back or mark the observation."""
        waiting = episode.waiting
        assert waiting is not None, f"nobody waits in episode {episode.episode_id}"
        self._pending.settle(waiting.number, b"")
        episode.withdraw()
        if not episode.num_queued:
            self._ready.pop(episode, None)
        return self._answer(session, Refuse(session.peer, waiting.request_id, failed))

    def _close(self, session: Session, episode: Episode, *, lost: bool) -> None:
        episode.over = True
        del self._open[episode.episode_id], session.episodes[episode.episode_id]
        self._finished[episode.episode_id] = lost
        if len(self._finished) > self._limits.max_finished:
            del self._finished[next(iter(self._finished))]

    def _answer(self, session: Session, answer: Answer | Act | Refuse) -> list[Effect]:
        """Remember an answer, and send it if its client is there."""
        self._sessions.note(session, answer.request_id, answer)
        if not session.peer:
            return []
        if answer.peer != session.peer:
            answer = msgspec.structs.replace(answer, peer=session.peer)
        return [answer]

    def _unknown(self, episode_id: str) -> RefusedError:
        if episode_id in self._finished:
            return self._finished_error(episode_id)
        if episode_id in self._open:
            text = f"Episode {episode_id} not found: it belongs to another client."
            return EpisodeNotFoundError(text)
        return EpisodeNotFoundError(f"Episode {episode_id} not found.")

    def _finished_error(self, episode_id: str) -> RefusedError:
        if self._finished[episode_id]:
            return EpisodeLostError(
                f"Episode {episode_id} has been given up: its client was gone for over "
                f"{self._limits.lease:g} s."
            )
        return EpisodeFinishedError(f"Episode {episode_id} has already completed.")

    def _refuse(self, peer: bytes, request_id: int, error: RefusedError) -> list[Effect]:
        self._counts.refused += 1
        return [Refuse(peer, request_id, error.failed())]

    def _fail(self, peer: bytes, request_id: int, code: FailureCode, text: str) -> list[Effect]:
        self._counts.refused += 1
        return [Refuse(peer, request_id, Failed(code=code, message=text, peer="bridge"))]

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self._sessions.check_invariants()
        self._pending.check_invariants()
        waiting = set()
        for episode_id, episode in self._open.items():
            session = self._sessions.by_secret(episode.session)
            expect(session is not None, f"episode {episode_id} belongs to nobody")
            expect(
                session is not None and session.episodes.get(episode_id) is episode,
                f"episode {episode_id} is not its client's",
            )
            expect(not episode.over, f"episode {episode_id} is open and over")
            expect(episode_id not in self._finished, f"episode {episode_id} is open and finished")
            expect((episode in self._ready) == bool(episode.num_queued), "a record is forgotten")
            if episode.waiting is not None:
                waiting.add(episode.waiting.number)
        expect(
            waiting == {pending.wire_id for pending in self._pending.unsettled()},
            "an episode waits without a deadline, or the other way round",
        )
        expect(all(episode.num_queued for episode in self._ready), "nothing is ready")
        expect(len(self._finished) <= self._limits.max_finished, "too many ids are remembered")
        expect(not self._unconfirmed.keys() & self._open.keys(), "an episode is open and ended")
