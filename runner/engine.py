"""Asks the envs of a pool, takes what comes of it, and has failed or recycled ones begin anew.

Leaves out what the caller sees (`pool.py`) and how actors are started again (`fleet.py`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from gymnasium.error import ClosedEnvironmentError

from envbus.actors.protocol import Finish, Rebuild, Reset, Step
from envbus.bus.broker import failure_to_error
from envbus.bus.errors import EnvbusError, NoPeerError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import interruptible
from envbus.bus.messages import Failed, FailureCode, Tree
from envbus.runner.actions import STEP_ALL
from envbus.runner.actor import Actor, ActorState
from envbus.runner.env_faults import EnvFaults
from envbus.runner.env_results import EnvResults
from envbus.runner.env_roster import EnvRoster
from envbus.runner.env_states import EnvState, EnvStates
from envbus.runner.faults import FaultCause
from envbus.runner.local_fleet import AnyFleet, LocalFleet
from envbus.runner.news import STRAY, Answer, Gone, Lost, News, Ready
from envbus.runner.step_words import StepWords

__all__ = ["Engine", "Ticket", "slots_of"]


#: Round, envs and kind of a request.
_Tag: TypeAlias = tuple[int, list[int], type[Reset | Rebuild | Step]]
#: Longest single wait, in seconds. After one that brought nothing it is looked whether what is
#: waited for is still under way.
_LONGEST_WAIT = 1.0
#: Seconds after which messages are looked for, though words tell all that is asked.
_LOOK_INTERVAL = 0.1


class Ticket:
    """Stands for one request about one env until its end is there."""

    def __init__(self) -> None:
        self.news: Answer[Actor] | Lost[Actor] | None = None


class Engine:
    """The requests of a pool. A round lasts until the caller resets all envs.

    Args:
        fleet: Whose actors, once started.
        roster: Who is hosted where.
        states: What envs are doing.
        results: What they have brought.
        faults: What has failed.

    Attributes:
        recycling: Whose turn it is to be exchanged; None: never anybody's.
    """

    def __init__(
        self,
        fleet: AnyFleet,
        roster: EnvRoster,
        states: EnvStates,
        results: EnvResults,
        faults: EnvFaults,
    ) -> None:
        self._fleet = fleet
        self._timeouts = fleet.config.timeouts
        self.recycling = fleet.recycling
        self._roster = roster
        self._states = states
        self._results = results
        self._faults = faults
        #: Number of the current reset; results that were asked for before it are dropped.
        self._round = 0
        #: Steps that were asked by words, and have not become requests: by index of the actor, the
        #: number, and the envs.
        self._words: StepWords | None = fleet.words
        self._by_word: dict[int, int] = {}
        if self._words is not None:
            results.read_records(self._words.infos)
        self._by_word_envs: dict[int, list[int]] = {}
        self._look_at = 0.0
        #: Requests in flight, by their first env: id, and tag.
        self._requests: dict[int, tuple[int, _Tag]] = {}
        disown_in_forks(self)

    def disown(self) -> None:
        """In a forked copy: the steps that were asked by words are the owner's to take."""
        self._words, self._by_word = None, {}

    # --- ask ---------------------------------------------------------------------------------

    def ask(
        self,
        actor: Actor,
        request: Reset | Rebuild | Step,
        members: list[int],
        timeout: float | None,
    ) -> None:
        """Send a request about the envs `members` of an actor; an end of it follows, or a fault."""
        if self._by_word:
            self.finish_words()
        self._ask(actor, request, members, timeout)

    def step_by_blocks(self, actor: Actor, members: list[int]) -> None:
        """Have all envs of an actor step, by actions in the blocks."""
        if self._words is None or actor.state is not ActorState.READY or self._fleet.closed:
            self.ask(actor, STEP_ALL, members, self._timeouts.step)
            return
        self._states.ask(members)
        self._by_word_envs[actor.index] = members
        self._by_word[actor.index] = self._words.ask_one(actor)

    def finish_words(self) -> None:
        """Have requests tell the ends of all steps that were asked by words."""
        numbers, self._by_word = self._by_word, {}
        for index, number in numbers.items():
            members = self._by_word_envs[index]
            self._states.settle(members)
            finish = Finish(number=number)
            self._ask(self._fleet.actors[index], finish, members, self._timeouts.step)

    def use_messages(self) -> None:
        """Ask for steps by messages only from now on, which wake who waits for a descriptor."""
        self.finish_words()
        self._words = None

    def _ask(
        self,
        actor: Actor,
        request: Reset | Rebuild | Step | Finish,
        members: list[int],
        timeout: float | None,
    ) -> None:
        tag = (self._round, members, Step if isinstance(request, Finish) else type(request))
        try:
            request_id = self._fleet.ask(actor, request, timeout=timeout, tag=tag)
        except NoPeerError:  # it left, and its exit has not been told yet
            self._faults.end_lives(members, self._fleet.why_gone(actor))
            return
        self._requests[members[0]] = (request_id, tag)
        self._states.ask(members)

    def step_all(self, members: list[int]) -> bool:
        """Have all envs of this process step at once, by the actions in the blocks.

        Returns:
            Whether what came of it stands in the blocks; else an end of it follows, or a fault.
        """
        assert isinstance(self._fleet, LocalFleet)
        is_settled = False
        try:
            is_settled = self._fleet.step_all((self._round, members, Step))
        finally:
            if not is_settled:
                self._states.ask(members)
        return is_settled

    def reset(
        self, env_ids: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> None:
        """Ask envs to begin new episodes; `seeds` are by env id, of all envs."""
        for actor, members in self._roster.by_actor(env_ids):
            own = [seeds[env_id] for env_id in members]
            request = Reset(
                slots=slots_of(actor, members),
                seeds=None if all(s is None for s in own) else Tree(own),
                options=None if options is None else Tree(options),
            )
            self.ask(actor, request, members, self._timeouts.reset)

    def remake(self, units: Sequence[range]) -> None:
        """Ask for envs that failed to be made anew, and reset."""
        due = [i for unit in units for i in unit if self._states[i] is EnvState.RECOVERING]
        for actor, members in self._roster.by_actor(due):
            if actor.state is not ActorState.READY:
                continue  # they are made anew with it
            seeds = self._faults.lives.seeds(members)
            request = Rebuild(
                slots=[env_id - actor.env_ids.start for env_id in members],
                seeds=None if seeds is None else Tree(seeds),
                close_timeout=self._timeouts.close,
            )
            self.ask(actor, request, members, self._timeouts.start)

    def drop_everything(self) -> None:
        """Begin a new round: what envs were asked before is forgotten."""
        self.finish_words()
        self._round += 1
        self._faults.drop_errors()
        for request_id, _ in self._requests.values():
            self._fleet.cancel(request_id)
        self._requests.clear()
        self._results.drop_infos()
        self._states.drop()

    # --- what came ---------------------------------------------------------------------------

    def take_news(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for news, and do what follows from it.

        Raises:
            ClosedEnvironmentError: A signal's handler has closed the pool meanwhile.
        """
        try:
            self._take_news(timeout)
        except EnvbusError as exc:
            if not self._fleet.closed:
                raise
            raise ClosedEnvironmentError("`ActorPool` was closed during this call.") from exc

    def _take_words(self, timeout: float) -> bool:
        """Take steps that words tell are done, and wait for one; return whether there was any."""
        words, numbers = self._words, self._by_word
        assert words is not None
        now = time.monotonic()
        if now >= self._look_at:  # so that processes and their memory are looked after
            self._look_at = now + _LOOK_INTERVAL
            return False
        with interruptible():  # nothing is taken yet
            found = words.wait_for_one(numbers, timeout)
        recycling = self.recycling
        for index, has_more in found.items():
            if has_more:
                return False
            del numbers[index]
            members = self._by_word_envs[index]
            if recycling is not None:
                recycling.count(index, len(members), self._results.count_ended(members))
            if words.infos.layout.forms:
                self._results.put_rows(members)
            self._states.bring(members)
        if not found:  # whoever only looks finds what there is
            return timeout <= 0.0
        return not self._faults.recovery

    def _take_news(self, timeout: float) -> None:
        if self._by_word:
            if self._take_words(timeout):
                if self.recycling is not None:
                    self.recycle()
                return
            self.finish_words()
        recovery = self._faults.recovery
        if recovery:
            wake_at = recovery.wake_at()
            if wake_at is not None:
                timeout = min(timeout, max(wake_at - time.monotonic(), 0.0))
        recycling = self.recycling
        if recycling is not None:
            timeout = min(timeout, max(recycling.hold_ends_at() - time.monotonic(), 0.0))
        found = False
        for news in self._fleet.poll(min(timeout, _LONGEST_WAIT)):
            found = True
            self._on_news(news)
        if timeout > 0.0 and not found:
            for stray in self._strays():
                self._on_news(stray)
        if recovery:
            self.remake(recovery.due(time.monotonic()))
        self.recycle()

    def _strays(self) -> list[Lost[Actor]]:
        """Return the requests whose ends were lost, as in `Lockstep`."""
        failed = Failed(code=FailureCode.TIMEOUT, message=STRAY)
        return [
            Lost(self._roster.actor_of(tag[1][0]), tag, failed)
            for request_id, tag in self._requests.values()
            if not self._fleet.is_asked(request_id)
        ]

    def _on_news(self, news: News[Actor]) -> None:
        if type(news) is Answer:
            self._on_answer(news)
        elif type(news) is Lost:
            self._on_lost(news)
        elif type(news) is Gone:
            self._faults.on_gone(news)
        elif type(news) is Ready:
            self._on_ready(news.actor)

    def _settle(self, news: Answer[Actor] | Lost[Actor]) -> list[int] | None:
        """Take the end of a request; return whose it was, if it is one of this round."""
        round_number, members, _ = news.tag
        if round_number != self._round:
            if type(round_number) is Ticket:
                round_number.news = news
            return None
        self._requests.pop(members[0], None)
        self._states.settle(members)
        found: list[int] = members
        return found

    def _on_answer(self, news: Answer[Actor]) -> None:
        members = self._settle(news)
        if members is None:
            return
        actor, result, kind = news.actor, news.reply, news.tag[2]
        self._results.put(members, result, is_step=kind is Step)
        if kind is Step and self._words is not None and result.infos is not None:
            self._words.learn(dict(zip(members, result.infos.value, strict=True)))
        if kind is Step and self.recycling is not None:
            ended = self._results.count_ended(members)
            self.recycling.count(actor.index, len(members), ended)
        failed = {actor.env_ids.start + error.slot for error in result.errors}
        self._states.offer([i for i in members if i not in failed] if failed else members)
        if failed:
            self._faults.on_env_errors(actor, result)
        elif kind is not Step:
            self._faults.works(members)
        if kind is Rebuild:
            self._faults.runs_again([i for i in members if i not in failed])

    def _on_lost(self, news: Lost[Actor]) -> None:
        members = self._settle(news)
        if members is None:
            return
        if news.failed.code in (FailureCode.PEER_LOST, FailureCode.NO_PEER):
            self._faults.end_lives(members, news.failed.message, news.cause)
        elif news.failed.code is not FailureCode.TIMEOUT:
            self._faults.add_error(failure_to_error(news.failed, 0))
        elif self._faults.recovery is not None:
            reason = f"{news.actor.describe()} did not answer in time: {news.failed.message}"
            # Nothing else ends a step that never returns.
            self._fleet.kill(news.actor, FaultCause.TIMEOUT, news.failed.message)
            self._faults.end_lives(members, reason, FaultCause.TIMEOUT)
        else:
            names = ", ".join(map(str, members))
            self._faults.add_error(
                multiprocessing.TimeoutError(
                    f"env(s) {names} did not answer in time: {news.failed.message}"
                )
            )

    def _on_ready(self, actor: Actor) -> None:
        """An actor runs again: its envs begin new episodes."""
        members = [i for i in actor.env_ids if self._states[i] is not EnvState.LOST]
        if self._faults.recovery is not None:
            self._faults.recovery.works(members, time.monotonic())
        self._states.resume(members)
        self._faults.runs_again(members)
        seeds = self._faults.lives.seeds(members)
        request = Reset(
            slots=slots_of(actor, members), seeds=None if seeds is None else Tree(seeds)
        )
        self.ask(actor, request, members, self._timeouts.reset)

    # --- recycling ---------------------------------------------------------------------------

    def recycle(self) -> None:
        """Hold back the envs of the actor whose turn it is, and exchange it once all are held.

        The next first observation of an env that was held comes by itself, as after a fault.
        """
        recycling = self.recycling
        if recycling is None:
            return
        now = time.monotonic()
        index = recycling.turn(now)
        if index is None:
            return
        actor = self._fleet.actors[index]
        if actor.state is not ActorState.READY:
            return  # it was killed, and ends
        if now >= recycling.hold_ends_at():
            self.stop_holding()
            return
        states, has_ended = self._states, self._results.has_ended
        for unit in actor.units():
            if all(states[i] is EnvState.IDLE and has_ended(i) for i in unit):
                states.hold(unit)
        at_rest = (EnvState.HELD, EnvState.RECOVERING, EnvState.LOST)
        found = [states[env_id] for env_id in actor.env_ids]
        if EnvState.HELD in found and all(state in at_rest for state in found):
            members = [i for i in actor.env_ids if states[i] is not EnvState.LOST]
            for env_id in members:
                states.recover(env_id)
            self._faults.lives.begin(members)
            self._fleet.recycle(actor)

    def stop_holding(self) -> None:
        """Let the actor whose turn it is go on, and its held envs begin their next episodes."""
        recycling = self.recycling
        assert recycling is not None
        recycling.pass_turn(time.monotonic())
        for actor, members in self._roster.by_actor(self._states.those(EnvState.HELD)):
            self.ask(actor, Reset(slots=slots_of(actor, members)), members, self._timeouts.reset)


def slots_of(actor: Actor, members: list[int]) -> list[int] | None:
    """Return the slots of an actor's envs, which are in order; None for all of them."""
    if len(members) == len(actor.env_ids):
        return None
    return [env_id - actor.env_ids.start for env_id in members]
