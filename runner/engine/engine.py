"""Asks envs, takes what comes of it, and has those that failed or were recycled begin anew.

The one engine below `ActorPool`, whose envs are served as they come, and `BusVectorEnv`, whose envs
step together (`vector/lockstep.py`). Leaves out what their callers see, and how actors are started
again (`workers/fleet.py`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import gymnasium
import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.blocks import Blocks
from envbus.actors.protocol import Finish, Rebuild, Reset, Step
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import EnvbusError, NoPeerError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import interruptible
from envbus.bus.wire.messages import Failed, FailureCode, Request, Tree
from envbus.runner.engine.env_faults import EnvFaults, FaultLog
from envbus.runner.engine.env_results import EnvResults
from envbus.runner.engine.env_states import EnvState, EnvStates
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import PartFigures, figures_of
from envbus.runner.monitoring.pictures import picture_of
from envbus.runner.monitoring.registry import show
from envbus.runner.workers.actions import STEP_ALL
from envbus.runner.workers.env_placement import EnvPlacement
from envbus.runner.workers.local_fleet import AnyFleet
from envbus.runner.workers.recycling import Recycling
from envbus.runner.workers.step_words import StepWords
from envbus.runner.workers.worker import (
    STRAY,
    Actor,
    ActorState,
    Gone,
    Lost,
    Ready,
    Replied,
    WorkerEvent,
)
from envbus.runner.workers.worker_group import WorkerGroupStatistics

__all__ = ["CallTicket", "Engine", "Given", "Statistics"]

#: Longest single wait, in seconds. After one that brought nothing it is looked whether what is
#: waited for is still under way.
_LONGEST_WAIT = 1.0
#: Id of a request that nobody was sent, or that has none; ids begin with 1.
_OF_NONE = 0
#: Seconds after which messages are looked for, though words tell all that is asked. Some of them in
#: a row bring an actor back, while others go on; that they are looked for costs nothing measurable.
_LOOK_INTERVAL = 0.005


class Statistics(WorkerGroupStatistics, frozen=True, kw_only=True):
    """Counts since the start."""

    #: Envs made anew in their actor, which went on; 0 before any.
    env_restarts: int
    #: Envs that are not made anew any more.
    envs_given_up: int
    #: How often an actor was asked to step by a word in shared memory instead of a message.
    steps_by_word: int
    #: By cause (`FaultCause`): envs whose episode a fault ended.
    faults: dict[str, int]


class CallTicket:
    """Stands for one request beside the steps and resets until its end is there."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.request_id = 0
        self.event: Replied[Actor] | Lost[Actor] | None = None


class _Tag(NamedTuple):
    """What a request is about."""

    #: What it belongs to: a round, by its number; or who waits for its end.
    of: int | CallTicket
    members: list[int]
    kind: type[Request[Any]]
    #: Whether it begins the life of envs that were made anew, which nobody has asked for.
    begins_incarnation: bool = False


class Given(NamedTuple):
    """What envs are to be reset by that are in no state for it yet."""

    #: By env that is to be reset so.
    seeds: dict[int, int | None]
    options: dict[str, Any] | None


class Engine:
    """The requests of all envs. A round lasts until its owner drops all that was asked.

    Args:
        owner: Class name of whose engine it is, for messages.
        fleet: Whose actors, once started.
        space: The observation space of one env.
        blocks: Arrays of all envs.
        mode: What happens at the end of an episode.
        all_or_nothing: Raise when an env is given up, also where faults are not raised.
        as_they_come: Each actor's envs are served by themselves: asked to step by a word of its
            own, and held back for each other where it is to be recycled.

    Attributes:
        owner, fleet, mode: As they were given.
        placement: Who is hosted where.
        states: What envs are doing.
        results: What they have brought.
        faults: What has failed.
        recycling: Whose turn it is to be exchanged; None: never anybody's.
        waits: Envs whose next life does not begin before `begin_incarnations` is called, since
            their caller is to be told first.
        failed_wait: Whether those join them whose faults are still to be told.
        given: What a caller wants the next resets of envs to be.
        unasked: Envs whose episodes have begun by themselves, until they are asked again: what
            is sent to them before their first rows are received came too late.
    """

    def __init__(
        self,
        owner: str,
        fleet: AnyFleet,
        space: gymnasium.Space[Any],
        blocks: Blocks,
        mode: AutoresetMode,
        *,
        all_or_nothing: bool,
        as_they_come: bool,
    ) -> None:
        policy = fleet.config.restart_policy
        self._log = FaultLog(fleet.config.hooks)
        self.placement = EnvPlacement(fleet.actors)
        self.states = EnvStates(fleet.num_envs)
        # Pools tell of the exchange of an actor by a row of its own.
        has_cuts = policy is not None or (fleet.recycling is not None and not as_they_come)
        self.results = EnvResults(
            space,
            fleet.num_envs,
            blocks,
            tells_cuts=has_cuts and mode is AutoresetMode.SAME_STEP,
            remembers=policy is not None,
            remote=self.placement.remote_envs,
        )
        self.faults = EnvFaults(
            self.placement,
            self.states,
            self.results,
            self._log,
            policy,
            all_or_nothing=all_or_nothing,
        )
        if fleet.words is not None:
            self.results.read_records(fleet.words.infos)
        self.owner = owner
        self.mode = mode
        self._action_blocks = blocks.actions
        self._holds = as_they_come
        #: Whether the last row of an episode shows the first observation of the next.
        self._shows_next = mode is AutoresetMode.SAME_STEP
        self.waits: Collection[int] = ()
        self.failed_wait = False
        self.given = Given({}, None)
        self.unasked: set[int] = set()
        self.fleet = fleet
        self._timeouts = fleet.config.timeouts
        self.recycling = fleet.recycling
        #: Number of the current reset; results that were asked for before it are dropped.
        self._round = 0
        #: Steps that were asked by words, and have not become requests: by index of the actor, the
        #: number, and the envs.
        self._words = fleet.words if as_they_come else None
        self._by_word: dict[int, int] = {}
        self._by_word_envs: dict[int, list[int]] = {}
        self._look_at = 0.0
        #: Requests beside them that are in flight.
        self._tickets: set[CallTicket] = set()
        #: Requests in flight, by their first env: id, and tag.
        self._requests: dict[int, tuple[int, _Tag]] = {}
        self._is_copy = False
        disown_in_forks(self)
        show(self, owner)

    def disown(self) -> None:
        """In a forked copy: the steps that were asked by words are the owner's to take."""
        self._words, self._by_word = None, {}
        self._is_copy = True

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

    def step(
        self,
        env_ids: Sequence[int],
        singles: Mapping[int, Any] | None,
        pack: Callable[[list[Any]], Any] = list,
    ) -> None:
        """Ask envs to step.

        Args:
            env_ids: Which.
            singles: Their actions; None: those that stand in the blocks.
            pack: Makes of those of an actor's envs what is sent.
        """
        if self.unasked:
            self.unasked.difference_update(env_ids)
        for actor, members in self.placement.by_actor(env_ids):
            actor.env_steps += len(members)
            slots = _slots_of(actor, members)
            if singles is not None:
                picked = pack([singles[env_id] for env_id in members])
                request = Step(slots=slots, actions=Tree(picked))
            elif not actor.reads_blocks:
                assert self._action_blocks is not None
                arrays = [leaf[members] for leaf in self._action_blocks]
                request = Step(slots=slots, action_arrays=arrays)
            elif slots is not None:
                request = Step(slots=slots)
            elif self._words is not None and actor.state is ActorState.READY:
                self._step_by_word(self._words, actor, members)
                continue
            else:
                request = STEP_ALL
            self.ask(actor, request, members, self._timeouts.step)

    def _step_by_word(self, words: StepWords, actor: Actor, members: list[int]) -> None:
        """Have all envs of an actor step, by actions in the blocks."""
        if self.fleet.closed:
            self.ask(actor, STEP_ALL, members, self._timeouts.step)
            return
        number = words.begin()
        self.states.ask(members)
        # Noted before: where an exception breaks the asking off, a message asks.
        self._by_word_envs[actor.index], self._by_word[actor.index] = members, number
        words.ask_one(actor, number)

    def finish_words(self) -> None:
        """Have requests tell the ends of all steps that were asked by words."""
        numbers, self._by_word = self._by_word, {}
        for index, number in numbers.items():
            members = self._by_word_envs[index]
            finish = Finish(number=number)
            self._ask(self.fleet.actors[index], finish, members, self._timeouts.step)

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
        *,
        begins_incarnation: bool = False,
    ) -> None:
        kind = Step if isinstance(request, Finish) else type(request)
        tag = _Tag(self._round, members, kind, begins_incarnation)
        if actor.state in (ActorState.BUILDING, ActorState.BUILT):
            # The life that was to be asked has ended, which is told soon; the next one has no rows.
            self.faults.end_incarnations(members, f"{actor.name} has ended, and is started again")
            return
        try:
            request_id = self.fleet.ask(actor, request, timeout=timeout, tag=tag)
        except NoPeerError:  # it left, and its exit has not been told yet
            self.faults.end_incarnations(members, self.fleet.why_gone(actor))
            return
        self._requests[members[0]] = (request_id, tag)
        self.states.ask(members)

    def ask_beside(self, actor: Actor, request: Request[Any], timeout: float | None) -> CallTicket:
        """Ask an actor something beside the steps and resets of its envs.

        Raises:
            NoPeerError: It is not there.
            EncodeError: The request cannot be sent.
        """
        ticket = CallTicket(actor)
        tag = _Tag(ticket, [], type(request))
        ticket.request_id = self.fleet.ask(actor, request, timeout=timeout, tag=tag)
        self._tickets.add(ticket)
        return ticket

    def drop_beside(self, ticket: CallTicket) -> None:
        """Forget such a request."""
        self._tickets.discard(ticket)
        self.fleet.cancel(ticket.request_id)

    def finish_step(self, number: int, missing: Container[int], timeout: float | None) -> None:
        """Have requests tell the end of a step that all actors were asked for by words.

        The envs are PENDING.

        Args:
            number: The step's.
            missing: Who has not stepped, or has more to tell, by index.
            timeout: Seconds that they have left.
        """
        for actor in self.fleet.actors:
            members = list(actor.env_ids)
            if actor.index in missing:
                self._ask(actor, Finish(number=number), members, timeout)
            else:  # all stands in the rows and records
                if self.recycling is not None:
                    self._count(self.recycling, actor.index, members)
                self.results.put_rows(members)
                self.states.offer(members)

    def _count(self, recycling: Recycling, index: int, members: list[int]) -> None:
        """Take in that envs of an actor have stepped."""
        recycling.count(index, len(members), self.results.count_ended(members))

    def step_all(self, members: list[int]) -> bool:
        """Have all envs of this process step at once, by the actions in the blocks.

        Returns:
            Whether what came of it stands in the blocks; else an end of it follows, or a fault.
        """
        in_place, is_settled = self.fleet.in_place, False
        self.fleet.actors[0].env_steps += len(members)
        self.unasked.clear()
        assert in_place is not None
        tag = _Tag(self._round, members, Step)
        try:
            is_settled = in_place.step_all(tag)
        finally:
            if not is_settled:
                self._requests[members[0]] = (_OF_NONE, tag)
                self.states.ask(members)
        return is_settled

    def reset(
        self, env_ids: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None
    ) -> None:
        """Ask envs to begin new episodes; `seeds` are by env id, of all envs."""
        self.unasked.difference_update(env_ids)
        for actor, members in self.placement.by_actor(env_ids):
            own = [seeds[env_id] for env_id in members]
            request = Reset(
                slots=_slots_of(actor, members),
                seeds=None if all(s is None for s in own) else Tree(own),
                options=None if options is None else Tree(options),
            )
            self.ask(actor, request, members, self._timeouts.reset)

    def remake(self, units: Sequence[range]) -> None:
        """Ask for envs that failed to be made anew."""
        due = [i for unit in units for i in unit if self.states[i] is EnvState.RECOVERING]
        for actor, members in self.placement.by_actor(due):
            if actor.state is ActorState.READY:  # else they are made anew with it
                request = Rebuild(
                    slots=[env_id - actor.env_ids.start for env_id in members],
                    close_timeout=self._timeouts.close,
                )
                self.ask(actor, request, members, self._timeouts.start)

    def is_waiting(self, env_id: int) -> bool:
        """Return whether an env that fails, or was made anew, waits for `begin_incarnations`."""
        return env_id in self.waits or (self.failed_wait and self.faults.is_untold(env_id))

    def begin_incarnations(self, env_ids: Sequence[int]) -> None:
        """Ask those of some envs that were made anew, and not reset, for their first episodes."""
        states = self.states
        fresh = [i for i in env_ids if states[i] is EnvState.FRESH and not self.is_waiting(i)]
        for actor, members in self.placement.by_actor(fresh):
            given = self.given
            seeds = self.faults.incarnations.seeds(members) or [None] * len(members)
            own = [
                derived if (seed := given.seeds.get(env_id)) is None else seed
                for env_id, derived in zip(members, seeds, strict=True)
            ]
            is_asked = given.options is not None and any(i in given.seeds for i in members)
            request = Reset(
                slots=_slots_of(actor, members),
                seeds=None if all(s is None for s in own) else Tree(own),
                options=Tree(given.options) if is_asked else None,
            )
            self.unasked.update(members)
            self._ask(actor, request, members, self._timeouts.reset, begins_incarnation=True)

    def let_go(self, strange: Mapping[int, str]) -> None:
        """Let actors go by whose envs something has come that cannot be; their ends follow.

        Args:
            strange: By env: what, for people.
        """
        for env_id, what in strange.items():
            actor = self.placement.actor_of(env_id)
            if actor.state is ActorState.READY:  # else it has ended meanwhile
                text = f"{actor.describe()} is let go, as it has answered what cannot be: {what}"
                self.fleet.kill(actor, reason=text)

    def drop_everything(self) -> None:
        """Begin a new round: what envs were asked before is forgotten."""
        self.finish_words()
        self._round += 1
        self.faults.drop_errors()
        for request_id, _ in self._requests.values():
            self.fleet.cancel(request_id)
        self._requests.clear()
        self.results.drop_infos()
        self.states.drop()

    def give_up(self, *, incarnations: bool) -> None:
        """Forget the steps and resets that are under way; who is made anew goes on.

        Args:
            incarnations: Also the resets that begin the lives of envs, which are to begin anew
            then.
        """
        for first, (request_id, tag) in list(self._requests.items()):
            if tag.kind is Rebuild or (tag.begins_incarnation and not incarnations):
                continue
            del self._requests[first]
            self.fleet.cancel(request_id)
            self.states.settle(tag.members)
            if tag.begins_incarnation:
                self.states.freshen(tag.members)

    def missing(self) -> list[Actor]:
        """Return the actors some of whose envs have not answered, or are being made anew."""
        found = [actor for actor, _ in self.placement.by_actor(self.states.late())]
        return found

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        fleet, recovery = self.fleet, self.faults.recovery
        return Statistics(
            **msgspec.structs.asdict(fleet.statistics()),
            env_restarts=0 if recovery is None else recovery.restarts(),
            envs_given_up=0 if recovery is None else len(self.faults.lost),
            steps_by_word=0 if fleet.words is None else fleet.words.asked,
            faults=self._log.counts(),
        )

    def figures(self, name: str) -> PartFigures:
        """Return what a window shows; called by another thread than uses the engine."""
        counts, levels = figures_of(self.statistics())
        words = self.fleet.words
        rounds = 0 if words is None else words.rounds
        asked = {self.placement.actor_of(first).index for first in list(self._requests)}
        for index, number in dict(self._by_word).items():
            if words is not None and words.is_busy(index, number):
                asked.add(index)
        if words is not None and not self._holds:  # all are asked together
            asked.update(words.missing())
        processes = [
            actor.figures(
                busy=actor.index in asked,
                env_steps=actor.env_steps + rounds * len(actor.env_ids),
            )
            for actor in self.fleet.actors
        ]
        counts["env_steps"] = sum(process.env_steps for process in processes)
        levels["envs"] = self.fleet.num_envs
        return PartFigures(
            name=name,
            kind=self.owner,
            counts=counts,
            levels=levels,
            processes=processes,
            faults=sorted([*self._log.recent, *self.fleet.recent_ends()], key=attrgetter("at")),
            restarts=self.fleet.config.restart_policy is not None,
        )

    def picture(self, env_id: int) -> npt.NDArray[np.uint8] | None:
        """Return an env's last observation as a picture; None: it is none. As `figures`."""
        if not 0 <= env_id < self.fleet.num_envs:
            return None
        return picture_of(self.results.observations.arrays(env_id))

    # --- what came ---------------------------------------------------------------------------

    def take_events(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for events, and do what follows from them.

        Raises:
            ClosedEnvironmentError: A signal's handler has closed all meanwhile.
            ClosedError: This is a forked copy.
        """
        try:
            self._take_events(timeout)
        except EnvbusError as exc:
            if not self.fleet.closed or self._is_copy:
                raise
            text = f"`{self.owner}` was closed during this call."
            raise ClosedEnvironmentError(text) from exc

    def _take_words(self, timeout: float) -> bool:
        """Take steps that words tell are done, and wait for one; return whether there was any."""
        words, numbers = self._words, self._by_word
        assert words is not None
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_INTERVAL
            return False
        with interruptible():  # nothing is taken yet
            found = words.wait_for_one(numbers, timeout)
        for index, has_more in found.items():
            if has_more:
                return False
            del numbers[index]
            members = self._by_word_envs[index]
            if self.recycling is not None:
                self._count(self.recycling, index, members)
            if words.infos.layout.forms:
                self.results.put_rows(members)
            self.states.offer(members)
        if not found:  # whoever only looks finds what there is
            return timeout <= 0.0
        return not self.faults.recovery

    def _take_events(self, timeout: float) -> None:
        if self._by_word:
            if self._take_words(timeout):
                if self.recycling is not None:
                    self.recycle()
                return
            self.finish_words()
        recovery = self.faults.recovery
        if recovery:
            wake_at = recovery.wake_at()
            if wake_at is not None:
                timeout = min(timeout, max(wake_at - time.monotonic(), 0.0))
        if self._holds and self.recycling is not None:
            timeout = min(timeout, max(self.recycling.hold_ends_at() - time.monotonic(), 0.0))
        found = False
        for event in self.fleet.poll(min(timeout, _LONGEST_WAIT)):
            found = True
            self._on_event(event)
        if timeout > 0.0 and not found:
            for stray in self._strays():
                self._on_event(stray)
        if recovery:
            self.remake(recovery.due(time.monotonic()))
        self.recycle()

    def _strays(self) -> list[Lost[Actor]]:
        """Return the requests whose ends were lost, as in `Lockstep`."""
        failed = Failed(code=FailureCode.TIMEOUT, message=STRAY)
        asked = [
            (self.placement.actor_of(tag.members[0]), tag, request_id)
            for request_id, tag in self._requests.values()
        ]
        asked += [(it.actor, _Tag(it, [], Request), it.request_id) for it in self._tickets]
        strays = [
            Lost(actor, tag, failed, actor.incarnation)
            for actor, tag, request_id in asked
            if not self.fleet.is_asked(request_id)
        ]
        self.states.offer_again()
        noted = {env_id for _, tag in self._requests.values() for env_id in tag.members}
        of_none = [i for i in self.states.those(EnvState.PENDING) if i not in noted]
        for actor, members in self.placement.by_actor(of_none):
            tag = _Tag(self._round, members, Step)
            self._requests[members[0]] = (_OF_NONE, tag)
            strays.append(Lost(actor, tag, failed, actor.incarnation))
        return strays

    def _on_event(self, event: WorkerEvent[Actor]) -> None:
        if type(event) is Replied:
            self._on_answer(event)
        elif type(event) is Lost:
            self._on_lost(event)
        elif type(event) is Gone:
            self.faults.on_gone(event)
        elif type(event) is Ready:
            self._on_ready(event.actor)

    def _settle(self, event: Replied[Actor] | Lost[Actor]) -> list[int] | None:
        """Take the end of a request; return whose it was, if it is one of this round.

        They stay PENDING until it is told: else one that is broken off here would have none.
        """
        tag: _Tag | None = event.tag
        if tag is None:  # nobody waits for it
            return None
        if type(tag.of) is CallTicket:
            self._tickets.discard(tag.of)
            # Without its tag, which holds the ticket: the garbage collection does not look into
            # events, so that such a ring would stay for ever.
            tag.of.event = msgspec.structs.replace(event, tag=None)
            return None
        if tag.of != self._round:
            return None
        noted = self._requests.get(tag.members[0])
        if noted is None or noted[1] is not tag:  # an exception came before it was noted
            return None
        del self._requests[tag.members[0]]
        return tag.members

    def _on_answer(self, event: Replied[Actor]) -> None:
        members = self._settle(event)
        if members is None:
            return
        actor, result, kind = event.actor, event.reply, event.tag.kind
        failed: set[int] = set()
        if result.errors:
            failed = {actor.env_ids.start + error.slot for error in result.errors}
        good = [i for i in members if i not in failed] if failed else members
        if kind is not Rebuild:
            self.results.put(members, result, is_step=kind is Step, failed=failed)
            self.states.offer(good)
            self.states.settle([i for i in members if i in failed])
        else:
            self.states.settle(members)
        if kind is Step:
            if self._words is not None and result.infos is not None:
                self._words.learn(dict(zip(members, result.infos.value, strict=True)))
            if self.recycling is not None:
                self._count(self.recycling, actor.index, members)
        elif kind is Reset and self.given.seeds:
            for env_id in members:
                self.given.seeds.pop(env_id, None)
        if kind is Reset:  # before what others failed of: of a vector env that is its end, too
            self.faults.works(good)
        if failed:
            self.faults.on_env_errors(actor, result)
        if kind is Rebuild:
            self._on_made(good)

    def _on_lost(self, event: Lost[Actor]) -> None:
        members = self._settle(event)
        is_gone = event.failed.code in (FailureCode.PEER_LOST, FailureCode.NO_PEER)
        if members is None:
            if is_gone and event.tag is not None and type(event.tag.of) is CallTicket:
                # Whoever is told of it may ask for what follows before the exit is told.
                self.faults.end_incarnations(event.actor.env_ids, event.failed.message, event.cause)
            return
        self.states.settle(members)
        if is_gone:
            self.faults.end_incarnations(members, event.failed.message, event.cause)
        elif self._lacks_memory(event):
            reason = f"{event.actor.describe()} has no memory left: {event.failed.message}"
            # It would fail again and again: what its envs hold is not let go otherwise.
            self.fleet.kill_late(event, FaultCause.MEMORY)
            self.faults.end_incarnations(members, reason, FaultCause.MEMORY)
        elif event.failed.code is not FailureCode.TIMEOUT:
            self.faults.add_error(failure_to_error(event.failed, 0))
        elif self.faults.recovery is not None:
            reason = f"{event.actor.describe()} did not answer in time: {event.failed.message}"
            # Nothing else ends a step that never returns.
            self.fleet.kill_late(event)
            self.faults.end_incarnations(members, reason, FaultCause.TIMEOUT)
        else:
            names = ", ".join(map(str, members))
            error = multiprocessing.TimeoutError(
                f"env(s) {names} did not answer in time: {event.failed.message}"
            )
            self.faults.add_error(error, late=event.actor)
            if event.tag.begins_incarnation:
                self.states.freshen(members)

    def _lacks_memory(self, lost: Lost[Actor]) -> bool:
        """Return whether an actor that is started again had none for its own work, as its reply."""
        has_none = lost.failed.remote_type.endswith("MemoryError")  # NumPy has one of its own
        is_made_anew = self.faults.recovery is not None and not self.fleet.config.is_local
        return has_none and is_made_anew

    def _on_ready(self, actor: Actor) -> None:
        """An actor runs again: its envs begin new episodes."""
        members = [i for i in actor.env_ids if self.states[i] is not EnvState.LOST]
        if self.faults.recovery is not None:
            self.faults.recovery.works(members, time.monotonic())
        self._on_made(members)

    def _on_made(self, members: list[int]) -> None:
        """Envs were made anew: their lives begin, if their caller knows of the end of the last."""
        self.states.freshen(members)
        self.faults.runs_again(members)
        self.begin_incarnations(members)

    # --- recycling ---------------------------------------------------------------------------

    def recycle(self) -> None:
        """Hold back the envs of the actor whose turn it is, and exchange it once all are held.

        The next first observation of an env that was held comes by itself, as after a fault.
        """
        recycling = self.recycling
        if recycling is None or not self._holds:
            return
        now = time.monotonic()
        index = recycling.turn(now)
        if index is None:
            return
        actor = self.fleet.actors[index]
        if actor.state is not ActorState.READY:
            return  # it was killed, and ends
        if now >= recycling.hold_ends_at():
            self.stop_holding()
            return
        states, has_ended = self.states, self.results.has_ended
        for unit in actor.units():
            if all(states[i] is EnvState.IDLE and has_ended(i) for i in unit):
                states.hold(unit)
        at_rest = (EnvState.HELD, EnvState.RECOVERING, EnvState.LOST)
        found = [states[env_id] for env_id in actor.env_ids]
        if EnvState.HELD in found and all(state in at_rest for state in found):
            self._leave_unplayed(states.those(EnvState.HELD))
            self.exchange(actor)

    def exchange(self, actor: Actor) -> None:
        """Have an actor that is asked nothing leave for a fresh one, whose envs begin episodes."""
        members = [i for i in actor.env_ids if self.states[i] is not EnvState.LOST]
        for env_id in members:
            self.states.recover(env_id)
        self.faults.incarnations.begin(members)
        self.fleet.recycle(actor)

    def stop_holding(self) -> None:
        """Let the actor whose turn it is go on, and its held envs begin their next episodes."""
        recycling = self.recycling
        assert recycling is not None
        recycling.pass_turn(time.monotonic())
        held = self.states.those(EnvState.HELD)
        if self._shows_next:
            self.faults.incarnations.begin(held)
        self._leave_unplayed(held)
        self.unasked.update(held)
        for actor, members in self.placement.by_actor(held):
            self.ask(actor, Reset(slots=_slots_of(actor, members)), members, self._timeouts.reset)

    def _leave_unplayed(self, held: list[int]) -> None:
        """These envs have shown an episode that is not played: no fault cuts it off any more."""
        if self.results.cut is not None:
            self.results.cut.on_reset(held)


def _slots_of(actor: Actor, members: list[int]) -> list[int] | None:
    """Return the slots of an actor's envs, which are in order; None for all of them."""
    if len(members) == len(actor.env_ids):
        return None
    return [env_id - actor.env_ids.start for env_id in members]
