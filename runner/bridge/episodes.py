"""What a bridge does about each event of its clients and its runner: events in, effects out.

Works on the records of `episode_table.py`. Pure: no socket, clock, thread or process in this file;
`bridge.py` owns those, and checks spaces before anything comes here.

Rules:

- An episode belongs to the session that started it. Its id is used once, as long as it is
  remembered.
- Calls of one episode come one after another. If one comes while another waits for an action, the
  newest counts, unless it is refused: the waiting one fails, and its action is dropped.
- An action reaches the request that it was chosen for, or nobody. An observation whose action
  reaches nobody, or a client that says it had given up before, is void: the episode's next record
  says so. Of several void ones in a row that the runner has not seen only the first is shown.
- Behind a call for which there was no room, only the same one goes on where the episode was. Any
  other leaves a gap, over which there is no row; what is missing is not taken later.
- What was logged reaches the runner in its order, also when the episode has ended meanwhile.
- A request that comes again is answered again, and not done again. An answer for which there was no
  room is sent again, as long as it is remembered.
- Where ends are to be confirmed, a client is told of an episode's end when the runner says so.
- Whatever waits is answered once, by its deadline at the latest. What was done stays done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from envbus.actors.arrays.finite import FLOAT32_MAX
from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    RefusedError,
    RequestIdUsedError,
    SessionLostError,
)
from envbus.actors.external.protocol import EpisodeStarted, FragmentLogged
from envbus.bus.brief import brief
from envbus.bus.broker.deadlines import Pending
from envbus.bus.wire.messages import Failed, FailureCode
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.bridge.episode import Episode, Waiting
from envbus.runner.bridge.episode_table import (
    ENDED,
    LOGGED,
    NOT_JOINED,
    ClientSession,
    EpisodeTable,
)
from envbus.runner.bridge.rates import RateLimit
from envbus.runner.bridge.results import ByAgent, EpisodeFault, Record, acting
from envbus.runner.bridge.vocabulary import (
    Act,
    Admit,
    BridgeStatistics,
    Chosen,
    ClientCall,
    ClientFragment,
    ClientLost,
    Confirm,
    Drain,
    Effect,
    End,
    EpisodeLimits,
    Event,
    GiveUp,
    Join,
    LogReward,
    LogStep,
    Observe,
    Refuse,
    StartCall,
    Tick,
    Unsent,
)
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import EpisodeFigures

__all__ = ["MAX_ID_CHARS", "Episodes"]

#: Longest id of an episode, in characters.
MAX_ID_CHARS = 256
#: A client that does not wait for its answers may have this many times `max_queued` steps queued.
_OVERFLOW = 4
#: Bytes that the shortest message counts for: what is kept of it takes no less.
_LEAST_BYTES = 1024
#: Part of a client's budget that rewards and infos may fill. They wait until the next observations
#: of their episodes, which need the rest of it to come at all.
_REWARDS_PART = 0.75


#: What clients call their verbs.
_VERB_NAMES: dict[type, str] = {
    Observe: "get_action",
    LogStep: "log_action",
    LogReward: "log_returns",
    ClientFragment: "log_fragment",
    End: "end_episode",
}
#: No call has this digest.
_ANY_FRAGMENT = -1


class _NoRoomError(Exception):
    """A call would go beyond a limit. Nothing has changed by it, as by one that is refused."""


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
        limits = limits or EpisodeLimits()
        self._table = EpisodeTable(limits, make_id)
        self._rate = None if limits.max_rate is None else RateLimit(limits.max_rate)
        self._make_id = make_id
        self._is_stale = is_stale
        self._confirm_ends = confirm_ends
        # Any: each handler takes its own event; `handle` is what callers' types are checked by.
        self._verbs: dict[type, Callable[[ClientSession, Episode, Any, float], list[Effect]]] = {
            Observe: self._ask,
            LogStep: self._log_step,
            LogReward: self._log_reward,
            ClientFragment: self._log_fragment,
            End: self._end,
        }
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            **dict.fromkeys((StartCall, *self._verbs), self._on_call),
            Join: self._on_join,
            ClientLost: self._on_client_lost,
            Unsent: self._on_unsent,
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
        sessions = self._table.sessions
        deadline, expiry = self._table.pending.next_deadline(), sessions.next_expiry()
        if sessions.next_try is not None:
            deadline = sessions.next_try if deadline is None else min(deadline, sessions.next_try)
        if deadline is None or expiry is None:
            return expiry if deadline is None else deadline
        return min(deadline, expiry)

    def has_enough(self, min_envs: int) -> bool:
        """Whether so many, or all that are open, have something for the runner."""
        ready = len(self._table.ready)
        return ready >= min_envs or (0 < ready >= len(self._table.open))

    def is_idle(self) -> bool:
        """Whether there is neither a client nor anything that one has left."""
        table = self._table
        return not (table.sessions or table.open or table.ready or table.unconfirmed)

    def knows(self, peer: bytes) -> bool:
        """Whether a client is there, or gone and may come back to its session."""
        return self._table.sessions.held_by(peer) is not None

    def open_ids(self) -> list[str]:
        """Return the ids of the episodes that are not over."""
        return list(self._table.open)

    def figures(self) -> list[EpisodeFigures]:
        """Return what is told of the episodes that are not over."""
        by_secret = self._table.sessions.by_secret
        return [
            EpisodeFigures(
                episode_id=episode.episode_id,
                client="" if (session := by_secret(episode.session)) is None else session.name,
                is_there=session is not None and bool(session.peer),
                waits=episode.waiting is not None,
                queued=episode.num_queued,
                calls={_VERB_NAMES[verb]: count for verb, count in list(episode.calls.items())},
            )
            for episode in list(self._table.open.values())
        ]

    def unconfirmed_ids(self) -> list[str]:
        """Return the ids of the episodes whose ends are to be confirmed."""
        return list(self._table.unconfirmed)

    def collect(self, most: int | None = None) -> tuple[list[Record], list[Effect]]:
        """Take the oldest record of each episode that has one; and what follows from that.

        Args:
            most: Episodes to take one of, if not all; the next call begins with the others.
        """
        records: list[Record] = []
        effects: list[Effect] = []
        ready = iter(self._table.ready.items())
        again: dict[str, Episode] = {}
        try:
            for episode_id, episode in itertools.islice(ready, most):
                record = episode.take()
                records.append(record)
                session = self._table.sessions.by_secret(episode.session)
                if session is not None:
                    session.num_bytes -= record.size
                if record.held:
                    effects += self._table.resolve(record.held)
                if episode.num_queued:
                    again[episode_id] = episode
        except BaseException:  # memory ran out: none stays ready of which all was taken
            table = self._table
            table.ready = {i: episode for i, episode in table.ready.items() if episode.num_queued}
            raise
        self._table.ready = {**dict(ready), **again}
        return records, effects

    def holder(self, episode_id: str) -> tuple[bytes, str, str] | None:
        """Return peer (b"": it is gone), name and user of whose open episode this is."""
        episode = self._table.open.get(episode_id)
        if episode is None:
            return None
        session = self._table.owner(episode)
        return session.peer, session.name, session.user

    def awaited(self, episode_id: str) -> list[Any] | None:
        """Return the agents whose actions a client waits for; None: nobody waits."""
        episode = self._table.open.get(episode_id)
        waiting = None if episode is None else episode.waiting
        if waiting is None or not waiting.shown:
            return None
        content = waiting.record.content
        return acting(content["observations"], content["terminateds"], content["truncateds"])

    def statistics(self) -> BridgeStatistics:
        """Return the counts so far."""
        queued_bytes, most = self._table.sessions.queued_bytes()
        return msgspec.structs.replace(
            self._table.counts,
            queued_bytes_now=queued_bytes,
            most_queued_bytes_now=most,
            clients_now=len(self._table.sessions) - self._table.sessions.num_lost,
            lost_clients_now=self._table.sessions.num_lost,
            episodes_now=len(self._table.open),
            ready_now=len(self._table.ready),
            waiting_now=len(self._table.pending) - len(self._table.held),
            unconfirmed_now=len(self._table.unconfirmed),
            finished_now=len(self._table.finished),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: takes time."""
        self._table.check_invariants()

    # --- clients --------------------------------------------------------------------------

    def _on_join(self, event: Join, _now: float) -> list[Effect]:
        table = self._table
        peer, sessions = event.peer, table.sessions
        session = sessions.held_by(peer)
        if event.resume and (session is None or session.secret != event.resume):
            held, session = session, sessions.by_secret(event.resume)
            if session is None:
                text = (
                    "the session to be resumed is not there any more: its lease of "
                    f"{table.limits.lease:g} s is over, or the bridge was started again"
                )
                return table.refuse(event, SessionLostError(text))
            if held is not None:
                sessions.end(peer)
                self._give_up_episodes(held, FaultCause.LOST, "its client took another session")
        if session is None:
            if (full := self._no_room(event.user)) is not None:
                return table.overloaded(event, full)
            session = sessions.open(peer, event.name, event.user)
        elif session.peer != peer:
            # Otherwise a connection that comes and goes would fill the bridge with what it left.
            is_anew = not event.resume
            number = -1 if is_anew else event.request_id
            if number <= session.highest:
                table.forget_waiting(session)  # its requests' ids will stand for others
            if is_anew:
                why = f"its client {session.name} has joined anew"
                self._give_up_episodes(session, FaultCause.LOST, why)
                session.name = event.name
            sessions.move(session, peer, number)
            table.counts.resumed += not is_anew
        return [Admit(peer, event.request_id, session.secret, list(session.episodes))]

    def _no_room(self, user: str) -> str | None:
        """Return which limit leaves no place for a new session; None: there is one."""
        sessions, limits = self._table.sessions, self._table.limits
        most = limits.max_key_sessions
        if user and sessions.count(user) >= most and not sessions.make_room(user):
            self._table.counts.over_budget += 1
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
            self._table.sessions.lose(event.peer, now)
            return []
        session = self._table.sessions.end(event.peer)
        if session is not None:
            self._give_up_episodes(session, event.cause, event.reason)
        return []

    def _on_unsent(self, event: Unsent, now: float) -> list[Effect]:
        self._table.sessions.keep_back(event.peer, event.request_id, now)
        return []

    # --- calls of clients -----------------------------------------------------------------

    def _on_call(self, event: ClientCall, now: float) -> list[Effect]:
        table = self._table
        session = table.sessions.find(event.peer)
        if session is None:
            table.counts.refused += 1
            return [Refuse(event.peer, event.request_id, NOT_JOINED)]
        episode: Episode | None = None
        try:
            if event.request_id in session.answers or event.request_id in session.unanswered:
                return self._answer_again(session, event)
            if event.request_id <= session.forgotten:
                raise self._id_used(event)
            session.digest = event.digest
            if isinstance(event, StartCall):
                return self._start(session, event)
            assert isinstance(event, Observe | LogStep | LogReward | ClientFragment | End)
            episode = session.episodes.get(event.episode_id)
            if episode is None:
                raise table.unknown(event.episode_id)
            if event.not_taken is not None:
                table.counts.dropped_actions += episode.give_back(event.not_taken)
            if event.given_up is not None:
                episode.lack(event.given_up)
            if event.request_id < episode.gap_until:
                episode.come_too_late(event.request_id, _likeness(event))
                raise EpisodeError(
                    f"Episode {event.episode_id}: request {event.request_id} comes too late, as "
                    f"{episode.gap_until} was taken in its place."
                )
            if episode.misses and not isinstance(event, End):
                self._check_queue(episode)  # also what takes no place in it: its step is missing
            verb = type(event)
            effects = self._verbs[verb](session, episode, event, now)
            episode.calls[verb] = episode.calls.get(verb, 0) + 1
            return effects
        except RefusedError as error:
            return table.refuse(event, error)
        except _NoRoomError as error:
            if episode is not None:
                episode.miss(event.request_id, _likeness(event))
            return table.overloaded(event, str(error))

    def _answer_again(self, session: ClientSession, event: ClientCall) -> list[Effect]:
        answer = session.answers.get(event.request_id)
        digests = session.unanswered if answer is None else session.digests
        if event.digest != digests[event.request_id]:
            raise self._id_used(event)
        self._table.counts.resent += 1
        return [] if answer is None else self._table.answer(session, answer)

    def _id_used(self, event: ClientCall) -> RefusedError:
        return RequestIdUsedError(
            f"request id {event.request_id} came before in this session, for another request or "
            f"over {self._table.limits.max_answers} requests ago; count ids up, and use none again"
        )

    def _start(self, session: ClientSession, event: StartCall) -> list[Effect]:
        table = self._table
        episode_id = self._make_id() if event.episode_id is None else event.episode_id
        if episode_id in table.open:
            raise EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        if table.is_used_up(episode_id):
            raise table.finished_error(episode_id)
        if not 0 < len(episode_id) <= MAX_ID_CHARS or not episode_id.isprintable():
            raise EpisodeError(
                f"an episode's id has 1 to {MAX_ID_CHARS} characters, none of them a control "
                f"character, unlike {brief(episode_id)}"
            )
        if table.draining:
            raise _NoRoomError(
                "no more episodes begin here: the server ends when the running ones are over"
            )
        if len(table.open) >= table.limits.max_episodes:
            raise _NoRoomError(f"{len(table.open)} episodes are open, which is the limit; end some")
        limit = table.limits.max_client_episodes
        if len(session.episodes) >= limit:
            table.counts.over_budget += 1
            raise _NoRoomError(
                f"{len(session.episodes)} episodes of this client are open, which is the limit "
                f"(EpisodeLimits.max_client_episodes={limit}); end some"
            )
        self._check_budget(session, 0)
        episode = Episode(episode_id, session.secret, training_enabled=event.training_enabled)
        table.open[episode_id] = session.episodes[episode_id] = episode
        table.counts.episodes += 1
        reply = EpisodeStarted(episode_id=episode_id)
        return table.reply(session, event, reply)

    def _ask(
        self, session: ClientSession, episode: Episode, event: Observe, now: float
    ) -> list[Effect]:
        table = self._table
        self._check_budget(session, event.size)
        self._check_rate(session, now)
        effects = self._take(session, episode, event)
        size = self._charge(session, event)
        record = episode.observe(event.observation, size=size)
        number = table.wait(session, event, now)
        episode.waiting = Waiting(event.request_id, number, record, size)
        table.ready[episode.episode_id] = episode
        return effects

    def _log_step(
        self, session: ClientSession, episode: Episode, event: LogStep, now: float
    ) -> list[Effect]:
        self._check_queue(episode)
        self._check_budget(session, event.size)
        table = self._table
        effects = self._take(session, episode, event)
        size = self._charge(session, event)
        has_to_wait = self._has_to_wait(session, episode.num_queued + 1)
        held = table.hold(session, event, LOGGED, now) if has_to_wait else 0
        episode.observe(event.observation, off_policy=event.action, held=held, size=size)
        table.ready[episode.episode_id] = episode
        table.counts.logged_actions += 1
        if held:
            return effects
        return effects + table.reply(session, event, LOGGED)

    def _log_reward(
        self, session: ClientSession, episode: Episode, event: LogReward, _now: float
    ) -> list[Effect]:
        self._check_budget(session, event.size, part=_REWARDS_PART)
        self._check_rewards(episode, [(event.rewards, {})])
        effects = self._take(session, episode, event)
        episode.log(
            event.rewards,
            event.infos,
            event.terminateds,
            event.truncateds,
            size=self._charge(session, event),
        )
        return effects + self._table.reply(session, event, LOGGED)

    def _log_fragment(
        self, session: ClientSession, episode: Episode, event: ClientFragment, now: float
    ) -> list[Effect]:
        self._check_queue(episode)
        self._check_budget(session, event.size)
        table = self._table
        if event.first > episode.num_parts:
            raise EpisodeError(
                f"Episode {event.episode_id}: the fragment begins with step {event.first}, and "
                f"only {episode.num_parts} have come before."
            )
        parts = event.parts[episode.num_parts - event.first :]
        told = [
            (
                {} if part.reward is None else part.reward.rewards,
                {} if part.step is None else part.step.observation,
            )
            for part in parts
        ]
        self._check_rewards(episode, told)
        effects = self._take(session, episode, event)
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
            table.counts.local_actions += choice is not None
            table.counts.logged_actions += choice is None and bool(step.action)
        table.counts.stale_actions += stale
        episode.num_parts = max(episode.num_parts, event.first + len(event.parts))
        if size:
            episode.log({}, {}, {}, {}, size=size)
        reply = FragmentLogged(dropped=stale)
        if record is None:
            return effects + table.reply(session, event, reply)
        table.ready[episode.episode_id] = episode
        if not self._has_to_wait(session, episode.num_queued):
            return effects + table.reply(session, event, reply)
        record.held = table.hold(session, event, reply, now)
        return effects

    def _charge(self, session: ClientSession, event: ClientCall) -> int:
        """Return what a message counts for in its client's budget, from which it was taken."""
        size = max(event.size, _LEAST_BYTES)
        session.num_bytes += size
        return size

    def _has_to_wait(self, session: ClientSession, queued: int) -> bool:
        """Whether a client is answered only when the runner has taken what it has logged."""
        limits = self._table.limits
        return queued > limits.max_queued or 2 * session.num_bytes > limits.max_client_bytes

    def _check_budget(self, session: ClientSession, size: int, *, part: float = 1.0) -> None:
        """Refuse a message of so many bytes beyond a client's budget, or beyond a part of it."""
        budget = self._table.limits.max_client_bytes
        limit = int(part * budget)
        if session.num_bytes + max(size, _LEAST_BYTES) > limit:
            self._table.counts.over_budget += 1
            raise _NoRoomError(
                f"{session.num_bytes} bytes of this client wait for the runner, and this message "
                f"has {size}: the limit is {limit} of EpisodeLimits.max_client_bytes={budget}; "
                "wait, or go on to the next observations"
            )

    def _check_rate(self, session: ClientSession, now: float) -> None:
        """Refuse a request for an action of a client that asks too often."""
        if self._rate is None:
            return
        wait = self._rate.take(session.user or session.secret, now)
        if wait:
            self._table.counts.over_rate += 1
            raise _NoRoomError(
                f"this client asks for more than {self._rate.rate:g} actions per second, which is "
                f"the limit (EpisodeLimits.max_rate); ask again in {max(wait, 0.001):.3f} s"
            )

    def _check_rewards(self, episode: Episode, parts: list[tuple[ByAgent, ByAgent]]) -> None:
        """Refuse rewards that would add up to infinity in a row."""
        if episode.largest_sum(parts) > FLOAT32_MAX:
            raise EpisodeError(
                f"Episode {episode.episode_id}: rewards add up to more than float32 can express."
            )

    def _check_queue(self, episode: Episode) -> None:
        """Refuse steps of an episode for which far too many wait."""
        queued = episode.num_queued
        if queued >= _OVERFLOW * self._table.limits.max_queued:
            raise _NoRoomError(
                f"{queued} steps of episode {episode.episode_id} wait for the runner; wait"
            )

    def _end(
        self, session: ClientSession, episode: Episode, event: End, now: float
    ) -> list[Effect]:
        table = self._table
        effects: list[Effect] = []
        episode.follow(event.request_id, event.digest)
        table.close(session, episode, lost=False)
        if episode.waiting is not None:
            error = EpisodeFinishedError(
                f"Episode {episode.episode_id} was ended while it waited for an action."
            )
            effects = table.release(session, episode, error.failed())
            table.counts.superseded += 1
        if episode.known:
            size = self._charge(session, event)  # always: it is how a client gets rid of others
            episode.end(event.observation, event.terminateds, event.truncateds, size=size)
            table.ready[episode.episode_id] = episode
            table.counts.ended += 1
            if self._confirm_ends:
                table.unconfirmed[episode.episode_id] = table.hold(session, event, ENDED, now)
                return effects
        else:
            session.num_bytes -= episode.num_bytes
            table.counts.empty += 1
        return effects + table.reply(session, event, ENDED)

    def _take(self, session: ClientSession, episode: Episode, event: ClientCall) -> list[Effect]:
        """A call is taken: fail the one before if that waits for an action.

        An end does not: what waits may still be shown to the runner.
        """
        episode.follow(event.request_id, _likeness(event))
        episode.came = max(episode.came, event.request_id)
        if episode.waiting is None:
            return []
        table = self._table
        table.counts.superseded += 1
        error = EpisodeBusyError(
            f"Episode {episode.episode_id} got another call while it waited for an action; calls "
            "of one episode come one after another."
        )
        return table.release(session, episode, error.failed())

    # --- the runner and the clock -----------------------------------------------------------

    def _on_chosen(self, event: Chosen, now: float) -> list[Effect]:
        table = self._table
        episode = table.open.get(event.episode_id)
        waiting = None if episode is None else episode.waiting
        if episode is None or waiting is None or not waiting.shown:
            table.counts.dropped_actions += 1
            return []
        pending = table.pending.get(waiting.number)
        assert pending is not None, f"nobody waits in episode {event.episode_id}"
        if pending.deadline <= now:  # whoever asked has given up, though nobody looked since
            table.counts.dropped_actions += 1
            return self._on_tick(Tick(), now)
        table.pending.settle(waiting.number, b"")
        self.latency.add(now - (pending.deadline - pending.timeout))
        episode.waiting, episode.answered = None, waiting.request_id
        table.counts.actions += 1
        session = table.owner(episode)
        act = Act(session.peer, waiting.request_id, event.action, event.policy_version)
        return table.answer(session, act)

    def _on_give_up(self, event: GiveUp, _now: float) -> list[Effect]:
        table = self._table
        episode = table.open.get(event.episode_id)
        if episode is None or episode.waiting is None:
            return []
        table.counts.policy_errors += 1
        return table.release(table.owner(episode), episode, event.failed)

    def _on_confirm(self, event: Confirm, _now: float) -> list[Effect]:
        number = self._table.unconfirmed.pop(event.episode_id, None)
        return [] if number is None else self._table.resolve(number, event.failed)

    def _on_drain(self, _event: Drain, _now: float) -> list[Effect]:
        self._table.draining = True
        return []

    def _on_tick(self, _event: Tick, now: float) -> list[Effect]:
        table = self._table
        effects: list[Effect] = []
        for pending in table.pending.expire(now):
            if pending.wire_id in table.held:
                table.counts.held_timeouts += 1
                effects += table.resolve(pending.wire_id, _late(pending))
                continue
            episode = table.open[pending.service]
            why = (
                "the policy has not answered"
                if episode.waiting is not None and episode.waiting.shown
                else "the runner does not poll"
            )
            text = f"episode {pending.service}: no action within {pending.timeout:g} s; {why}"
            failed = Failed(code=FailureCode.TIMEOUT, message=text, peer="bridge")
            effects += table.release(table.owner(episode), episode, failed)
            table.counts.timeouts += 1
        for session in table.sessions.expire(now):
            why = f"its client {session.name} was gone for over {table.limits.lease:g} s"
            self._give_up_episodes(session, FaultCause.LOST, why)
        return effects + table.sessions.kept_back(now)

    def _give_up_episodes(self, session: ClientSession, cause: FaultCause, why: str) -> None:
        table = self._table
        for episode in list(session.episodes.values()):
            episode_id = episode.episode_id
            if episode.waiting is not None:
                table.pending.settle(episode.waiting.number, b"")
                session.num_bytes -= episode.withdraw()
            table.close(session, episode, lost=True)
            table.counts.faulty += 1
            if not episode.num_queued:
                table.ready.pop(episode_id, None)
            if episode.known:
                text = f"episode {episode_id}: {why}"
                fault = EpisodeFault(episode_id=episode_id, cause=cause, message=text)
                episode.break_off(fault)
                table.ready[episode_id] = episode
            else:  # the session may go on: its client has joined anew
                session.num_bytes -= episode.num_bytes


def _likeness(event: ClientCall) -> int:
    """Return what a call that is sent again has, and others of its episode hardly.

    Fragments are all alike: as their steps have numbers, one of another cut leaves no gap.
    """
    return _ANY_FRAGMENT if isinstance(event, ClientFragment) else event.digest


def _late(pending: Pending) -> Failed:
    """Return what a request is told that was done, and is not answered in time."""
    ended = pending.payload_type == End.__name__
    what = "its end was not confirmed" if ended else "the runner has not taken its steps"
    text = f"episode {pending.service}: {what} within {pending.timeout:g} s; what was sent counts"
    return Failed(code=FailureCode.TIMEOUT, message=text, peer="bridge")
