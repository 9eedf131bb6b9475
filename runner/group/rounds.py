"""The processes of a group's runners: how each comes up, what it is asked, and what came of it.

Leaves out how much each is asked for (`sampling/config.py`), and for how long a caller waits
(`env_runner_group.py`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from gymnasium import Space

from envbus.actors.spaces import spaces
from envbus.bus.broker.events import PeerReady
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import NoPeerError, TransportError
from envbus.bus.memory.arena import Arena
from envbus.bus.process.pipe import PipeCodec
from envbus.bus.wire.messages import FailureCode, Request, Tree
from envbus.runner.engine.seeding import Life, restart_seed
from envbus.runner.errors import FaultCause
from envbus.runner.group.host import ENTRY
from envbus.runner.group.joining import RunnerFault, RunnerPart
from envbus.runner.group.protocol import (
    Applied,
    EnvsMade,
    MakeEnvs,
    MakeRunner,
    Pushed,
    PushWeights,
    RunnerMade,
    RunnerSpec,
    Taken,
    TakeSample,
)
from envbus.runner.group.sample_memory import MOST_SLOTS, JointMemory, SharedSlot, fetch
from envbus.runner.policies.connectors import Connector
from envbus.runner.policies.policy import Weights
from envbus.runner.policies.policy_map import check_known
from envbus.runner.sampling.config import Quota, worker_index
from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.worker import ActorState, Gone, Lost, Replied, WorkerHandle
from envbus.runner.workers.worker_group import Stage, WorkerGroup

__all__ = ["Rounds", "RunnerProcess", "RunnerState", "RunnerWorkerGroup", "Ticket"]

#: Seconds for a passed descriptor that was sent before the message that names it.
_PASSED_TIMEOUT = 10.0
logger = logging.getLogger("envbus.runner.group")


class RunnerProcess(WorkerHandle):
    """What a group knows of one runner."""

    def __init__(self, index: int, parts: RunnerSpec) -> None:
        super().__init__("runner", index)
        self.parts = parts
        #: 0 until its envs have been made once.
        self.num_envs = 0
        #: Id in the group of its env 0.
        self.first_env = 0

    def _holds(self) -> list[str]:
        if not self.num_envs:
            return []
        return [f"envs {self.first_env}-{self.first_env + self.num_envs - 1}"]


class RunnerWorkerGroup(WorkerGroup[RunnerProcess]):
    """The processes of a group."""

    def __init__(self, parts: Sequence[RunnerSpec], config: FleetConfig) -> None:
        runners = [RunnerProcess(index, part) for index, part in enumerate(parts)]
        self._made: RunnerMade | None = None
        super().__init__(runners, config, ENTRY)

    def start(self) -> None:
        """Start all runners and have their envs made, side by side.

        Raises:
            StartError: A process ended, or was not ready within `timeouts.start`.
            EncodeError: Something that a runner is made of cannot be pickled.
            RemoteError: A factory, an env or the runner's constructor raised.
        """
        self.start_all(until=ActorState.BUILT)
        first = 0
        for actor in self.actors:
            actor.first_env = first
            first += actor.num_envs
            with contextlib.suppress(NoPeerError):  # the event of its end follows
                self._make(actor)
        self.wait_for_all(ActorState.READY)
        self._is_up = True

    @property
    def num_envs(self) -> int:
        """Envs of all runners, once started."""
        return sum(actor.num_envs for actor in self.actors)

    def spaces(self) -> dict[Any, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the runner has told that came last."""
        assert self._made is not None
        return {
            agent_id: (spaces.from_plain(observation), spaces.from_plain(action))
            for agent_id, (observation, action) in self._made.spaces.value.items()
        }

    def first_versions(self) -> dict[str, int]:
        """Return the policies' versions of the runner that came last."""
        assert self._made is not None
        return dict(self._made.policy_versions)

    def elsewhere(self) -> list[str]:
        """Return the policies whose weights are not the runners' to set."""
        assert self._made is not None
        return self._made.elsewhere

    def check(self, request: Request[Any]) -> None:
        """Raise EncodeError for a request that cannot be sent."""
        codec = self.actors[0].codec  # of whichever, in whichever life
        assert isinstance(codec, PipeCodec)
        codec.check(request)

    # --- how a runner comes up: its envs are made, then, when it is known which, itself ---------

    def _start(self, actor: RunnerProcess) -> None:
        self._connections.launch(actor)
        assert actor.child is not None
        # Samples are copied when they are joined, and need not be before.
        actor.codec = PipeCodec(actor.child.pipe)

    def _on_hello(self, outcome: PeerReady) -> None:
        actor = self._connections.actor_of(outcome.peer)
        if actor is not None:
            actor.state = ActorState.BUILDING
            request = MakeEnvs(index=actor.index, parts=Tree(actor.parts))
            timeout = self.config.timeouts.start
            with self._telling(actor):
                self._requests.ask(actor, request, timeout=timeout, tag=Stage.BUILD)

    def _on_stage(self, answer: Replied[RunnerProcess]) -> bool:
        actor, reply = answer.actor, answer.reply
        if isinstance(reply, RunnerMade):
            actor.state = ActorState.READY
            self._made = reply
            return True
        assert isinstance(reply, EnvsMade)
        if self._is_up and reply.num_envs != actor.num_envs:
            reason = f"it came back with {reply.num_envs} envs, and had {actor.num_envs}"
            logger.error("%s: %s", actor.describe(), reason)
            self._connections.kill(actor, reason=reason)
            return False
        actor.num_envs = reply.num_envs
        actor.state = ActorState.BUILT
        if self._is_up:
            self._make(actor)
        return False

    def _make(self, actor: RunnerProcess) -> None:
        config = actor.parts.config
        seed = None if config.seed is None else config.seed + actor.first_env
        if actor.incarnation:
            seed = restart_seed(seed, actor.index, actor.incarnation, Life.RUNNER)
        index = worker_index(config.worker_index, actor.index, actor.incarnation, len(self.actors))
        request = MakeRunner(seed=seed, worker_index=index)
        with self._telling(actor):
            self._requests.ask(actor, request, timeout=self.config.timeouts.start, tag=Stage.MAP)


class RunnerState:
    """What one runner was asked, and what it has not been told yet."""

    def __init__(self) -> None:
        #: What it was asked to sample, until that is taken, and since when (monotonic).
        self.owed: Quota | None = None
        self.asked_at = 0.0
        #: What it has sampled and nobody has taken.
        self.part: RunnerPart | None = None
        #: Where its present life places large columns, and the number of the passed descriptor with
        #: that.
        self.memory: Arena | None = None
        self.passed = 0
        #: Memories with slots that its present life knows, and the slot of the sample it is asked
        #: for: number of the memory, 0 for none.
        self.known_slots: list[int] = []
        self.slot = 0
        #: Memories with earlier slots where it may have left rows that it goes on with.
        self.former_slots: list[int] = []
        #: Which weights, and which merged states of connectors, it was sent last.
        self.weights_sent = 0
        self.connectors_sent = 0
        #: By policy: what its present life has taken over last.
        self.weights_held: dict[str, tuple[Weights, int]] = {}
        #: Whether it has not confirmed weights: then it is not sent newer ones but before a
        #: request, so that they do not pile up in front of one that is at work for long.
        self.is_pushing = False
        #: Its present life's policies, as it has told last; None: not yet.
        self.policy_ids: set[str] | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether it is asked for a sample and has not answered."""
        return self.owed is not None and self.part is None

    def begin_life(self) -> None:
        """Its process has ended; what it had delivered stays."""
        if self.part is None:
            self.owed = None
        self.weights_sent = self.connectors_sent = 0
        self.weights_held.clear()
        self.is_pushing = False
        self.memory, self.passed = None, 0
        self.known_slots = []
        self.policy_ids = None

    def may_have(self, policy_ids: Iterable[str]) -> bool:
        """Return whether it has one of these policies, as far as is known."""
        return self.policy_ids is None or not self.policy_ids.isdisjoint(policy_ids)


class Ticket:
    """Stands for one question to several runners, until each has answered or cannot.

    Args:
        weights_version: As in `_Sampling`.
    """

    def __init__(self, weights_version: int) -> None:
        self.weights_version = weights_version
        self.open: set[int] = set()
        self.values: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}


@dataclass(frozen=True, eq=False)
class _Sampling:
    """Stands for one request for a sample."""

    #: The slot that its rows may be in: number of the memory, 0 for none.
    slot: int
    #: Of what was set last before it was sent.
    weights_version: int


@dataclass(frozen=True, eq=False)
class _Pushing:
    """Stands for one request to take weights."""

    version: int
    weights: dict[str, tuple[Weights, int]]


class Rounds:
    """Asks the runners of a worker group, and takes in what they answer.

    Args:
        connectors: The caller's, who may switch their `update`; copies of them merge what those
            of the runners learn.
        sample_timeout: Seconds after which a runner that samples is taken for hung; None: never.

    Attributes:
        states: By index of the runner.
        joint: Where runners can write side by side.
        errors: What samples and weights have led to in runners, to be raised.
        faults: Ends of runners that nobody was told of yet.
    """

    def __init__(
        self,
        worker_group: RunnerWorkerGroup,
        connectors: Mapping[str, Connector],
        versions: Mapping[str, int],
        sample_timeout: float | None,
    ) -> None:
        self._worker_group = worker_group
        self._sample_timeout = sample_timeout
        self.states = [RunnerState() for _ in worker_group.actors]
        self.joint = JointMemory()
        self.errors: list[Exception] = []
        self.faults: list[RunnerFault] = []
        self._given = connectors
        self._connectors = copy.deepcopy(dict(connectors))
        self.connector_states = {name: one.get_state() for name, one in connectors.items()}
        #: Counts up with each change of them.
        self._connectors_version = 0
        #: What was set last and not refused, and under which versions; not of policies that were
        #: added and that no runner has any more.
        self.weights: dict[str, tuple[Weights, int]] = {}
        #: What a runner has taken over last, by which push.
        self._taken_over: dict[str, tuple[int, tuple[Weights, int]]] = {}
        self._first_versions = dict(versions)
        self.versions = dict(versions)
        self._weights_version = 0
        #: What no number of an episode, and of a sample, has reached in any runner; and what no new
        #: one may be below, of a state that was taken over. The rest of an id is the runner's.
        self.ids_reached = self._first_ids = (0, 0)
        #: Of what the last error of a push was that was told: other runners fail alike.
        self._refused_version = 0
        #: Policies that a runner had no more when it was sent weights: each is logged once.
        self._absent: set[str] = set()

    # --- who can be asked --------------------------------------------------------------------

    def ready(self) -> list[RunnerProcess]:
        """Return the runners that run and are not on their way out."""
        return [actor for actor in self._worker_group.actors if actor.state is ActorState.READY]

    def lost(self) -> list[RunnerProcess]:
        """Return the runners that are not started again any more."""
        return [actor for actor in self._worker_group.actors if actor.state is ActorState.LOST]

    def sampling(self) -> list[int]:
        """Return the runners that are asked for a sample and have not answered."""
        return [i for i, state in enumerate(self.states) if state.is_sampling]

    def delivered(self) -> list[int]:
        """Return the runners that have delivered what nobody has taken."""
        return [i for i, state in enumerate(self.states) if state.part is not None]

    def present_versions(self) -> dict[str, int]:
        """Return the versions of policies that a runner has, or had, if all were given up.

        As far as is known: one that is being started is taken to have all.
        """
        actors = self._worker_group.actors
        living = [actor for actor in actors if actor.state is not ActorState.LOST] or actors
        states = [self.states[actor.index] for actor in living]
        return {
            name: version
            for name, version in self.versions.items()
            if any(state.may_have([name]) for state in states)
        }

    # --- ask ---------------------------------------------------------------------------------

    def ask_sample(
        self,
        actor: RunnerProcess,
        quota: Quota,
        *,
        timeout: float | None,
        force_reset: bool,
        explore: bool | None,
        slot: SharedSlot | None = None,
    ) -> bool:
        """Have a runner sample; return whether it could be asked."""
        state = self.states[actor.index]
        if slot is not None:
            state.slot = slot.number
            self.joint.lend(slot.number, actor.index)
            slot = self._announced(actor, slot)
        states = None
        if self.connector_states and state.connectors_sent != self._connectors_version:
            states = Tree(self.connector_states)
        request = TakeSample(
            num_env_steps=quota.num_env_steps,
            num_episodes=quota.num_episodes,
            timeout=timeout,
            force_reset=force_reset,
            explore=explore,
            connectors=states,
            updates={name: one.update for name, one in self._given.items()},
            slot=slot,
            held=state.passed,
            ids=self._first_ids,
        )
        patience = self._sample_timeout
        if patience is not None and timeout is not None:
            patience = max(patience, timeout)
        if not self._ask(actor, request, patience, _Sampling(state.slot, self._weights_version)):
            self._leave_slots(actor)
            return False
        state.owed, state.asked_at = quota, time.monotonic()
        state.connectors_sent = self._connectors_version
        return True

    def ask_all(
        self, actors: Iterable[RunnerProcess], request: Request[Any], timeout: float | None
    ) -> Ticket:
        """Ask runners to call a function, or for a sign of life."""
        ticket = Ticket(self._weights_version)
        for actor in actors:
            if self._ask(actor, request, timeout, ticket):
                ticket.open.add(actor.index)
        return ticket

    def set_weights(
        self, weights: Mapping[str, Weights], version: int | Mapping[str, int] | None
    ) -> None:
        """Send weights to all runners, without waiting for anybody.

        The version is that of all, or by policy id; None: per policy, the one after the present.

        Raises:
            ConfigError: There is no such policy. Nothing was sent.
            EncodeError: Some cannot be sent. Nothing was.
        """
        check_known(weights, self.versions)
        copies = {policy_id: copy.deepcopy(values) for policy_id, values in weights.items()}
        self.check_weights(copies)
        for policy_id, values in copies.items():
            if isinstance(version, Mapping):
                fresh = version[policy_id]
            else:
                fresh = self.versions[policy_id] + 1 if version is None else version
            # A runner that starts again later gets them too.
            self.weights[policy_id] = values, fresh
            self.versions[policy_id] = fresh
        self._weights_version += 1
        for actor in self.ready():
            if not self.states[actor.index].is_pushing:
                self._push(actor)

    def check_weights(self, weights: Mapping[str, Weights]) -> None:
        """See that weights can be sent: else whatever is asked later would fail, as they go first.

        Raises:
            EncodeError: Some cannot.
        """
        pairs = {policy_id: (values, 0) for policy_id, values in weights.items()}
        self._worker_group.check(PushWeights(weights=Tree(pairs)))

    def check_connectors(self, states: Mapping[str, Any]) -> None:
        """Look whether runners' connectors will take these states over.

        Raises:
            Exception: What one raises that does not.
        """
        for name, connector in self._connectors.items():
            copy.deepcopy(connector).set_state(states[name])

    def set_connectors(self, states: Mapping[str, Any]) -> None:
        """Have runners take over states of connectors before their next samples."""
        self.connector_states = copy.deepcopy(dict(states))
        self._connectors_version += 1

    def go_on_from(self, next_eps_id: int, num_samples: int) -> None:
        """Have runners number later episodes and samples from these on."""
        self._note_ids((next_eps_id, num_samples))
        self._first_ids = self.ids_reached

    def parts(self) -> list[RunnerPart]:
        """Return what runners have delivered and nobody has taken."""
        return [state.part for state in self.states if state.part is not None]

    def take(self, parts: Sequence[RunnerPart]) -> None:
        """Somebody has these `parts` now; merge what their connectors have learnt."""
        for part in parts:
            state = self.states[part.runner]
            state.owed = state.part = None
        if parts and self._connectors:
            self.connector_states = {
                name: connector.merge(
                    self.connector_states[name], [part.report.connectors[name] for part in parts]
                )
                for name, connector in self._connectors.items()
            }
            self._connectors_version += 1

    def let_go(self) -> None:
        """Nothing more comes: close what rows were in. Samples that the caller has stay."""
        for state in self.states:
            state.part = state.memory = None
        self.joint.let_go()

    def _announced(self, actor: RunnerProcess, slot: SharedSlot) -> SharedSlot | None:
        """See that a runner knows the memory of a slot; None: it cannot be told."""
        known = self.states[actor.index].known_slots
        if slot.number in known:
            return slot
        assert actor.child is not None
        number = actor.child.pipe.next_number()
        try:
            actor.child.pipe.send_fd(number, self.joint.fd(slot.number))
        except TransportError:  # it is gone, or hangs: which of both will be told
            return None
        known.append(slot.number)
        del known[:-MOST_SLOTS]
        return msgspec.structs.replace(slot, passed=number)

    def _leave_slots(self, actor: RunnerProcess, *, but_last: bool = False) -> None:
        """A runner writes to its slots no more, or only to the last one."""
        state = self.states[actor.index]
        for number in state.former_slots:
            self.joint.release(number, actor.index)
        state.former_slots = [state.slot] if but_last and state.slot else []
        if not but_last:
            self.joint.release(state.slot, actor.index)
        state.slot = 0

    def _push(self, actor: RunnerProcess) -> None:
        state = self.states[actor.index]
        if state.weights_sent == self._weights_version:
            return
        try:
            # What it has already would undo what functions have set there since.
            held, own = state.weights_held, self.weights
            fresh = {name: pair for name, pair in own.items() if held.get(name) is not pair}
            if fresh:
                pushing = _Pushing(self._weights_version, fresh)
                request = PushWeights(weights=Tree(fresh))
                self._worker_group.ask(actor, request, timeout=None, tag=pushing)
                state.is_pushing = True
        except NoPeerError:
            return
        state.weights_sent = self._weights_version

    def _ask(
        self,
        actor: RunnerProcess,
        request: Request[Any],
        timeout: float | None,
        tag: Ticket | _Sampling,
    ) -> bool:
        self._push(actor)
        try:
            self._worker_group.ask(actor, request, timeout=timeout, tag=tag)
        except NoPeerError:  # the event of its end follows
            return False
        return True

    # --- what came ---------------------------------------------------------------------------

    def take_events(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for something to happen, and take it in."""
        for event in self._worker_group.poll(timeout):
            if isinstance(event, Replied):
                self._take_answer(event)
            elif isinstance(event, Lost):
                self._on_lost(event)
            elif isinstance(event, Gone):
                self._on_gone(event)

    def _take_answer(self, event: Replied[RunnerProcess]) -> None:
        """Take an answer in; one that cannot be ends its runner, and nobody else."""
        try:
            self._on_answer(event)
        except (
            Exception
        ) as exc:  # it lacks its passed descriptor, or does not fit: whatever that led to
            reason = f"its answer cannot be taken in: {type(exc).__name__}: {exc}"
            logger.error("%s: %s", event.actor.describe(), reason, exc_info=True)
            self._worker_group.kill(event.actor, FaultCause.ERROR, reason)

    def _on_answer(self, event: Replied[RunnerProcess]) -> None:
        actor, reply = event.actor, event.reply
        match event.tag:
            case _Sampling():
                assert isinstance(reply, Taken)
                self._take_sample(actor, reply, event.tag.slot)
                self._note_versions(actor, reply.policy_versions, event.tag.weights_version)
                self._note_ids(reply.ids)
            case _Pushing():
                assert isinstance(reply, Pushed)
                self._take_over(actor, event.tag, reply)
                self._pushed(actor)
            case Ticket():
                event.tag.open.discard(actor.index)
                event.tag.values[actor.index] = None
                if isinstance(reply, Applied):
                    self._note_versions(actor, reply.policy_versions, event.tag.weights_version)
                    event.tag.values[actor.index] = reply.value.value

    def _take_sample(self, actor: RunnerProcess, taken: Taken, slot: int) -> None:
        state = self.states[actor.index]
        if taken.passed:
            assert actor.child is not None
            fd = actor.child.pipe.receive_fd(taken.passed, _PASSED_TIMEOUT)
            state.memory, state.passed = Arena.attach(fd, taken.size), taken.passed
        view = functools.partial(self.joint.view, slot)
        rows = fetch(taken.rows.value, taken.locations, state.memory, view)
        state.part = RunnerPart(
            actor.index,
            actor.first_env,
            rows,
            taken.env_steps,
            taken.report.value.shifted(actor.first_env),
            taken.locations,
        )
        # Where not all rows are there, some may be begun, which it will take along.
        is_full = bool(taken.locations) and all(location.in_slot for location in taken.locations)
        self._leave_slots(actor, but_last=not is_full)

    def _take_over(self, actor: RunnerProcess, push: _Pushing, pushed: Pushed) -> None:
        """Keep what a runner took over; go back to that for policies that refused theirs."""
        refused = pushed.refused
        for policy_id in set(pushed.absent) - self._absent:
            self._absent.add(policy_id)
            logger.warning(
                "%s has no policy %r: weights of it are left out there", actor.describe(), policy_id
            )
        for policy_id, pair in push.weights.items():
            if policy_id in pushed.absent:
                continue
            number, before = self._taken_over.get(policy_id, (0, None))
            if policy_id not in refused:
                self.states[actor.index].weights_held[policy_id] = pair
                if push.version >= number:
                    self._taken_over[policy_id] = push.version, pair
            elif self.weights.get(policy_id) is pair:  # and nobody has set others since
                del self.weights[policy_id]
                self.versions[policy_id] = self._first_versions.get(policy_id, 0)
                if before is not None:
                    self.weights[policy_id], self.versions[policy_id] = before, before[1]
        if refused and push.version != self._refused_version:
            self._refused_version = push.version
            for failed in refused.values():
                named = msgspec.structs.replace(failed, peer=actor.peer_name)
                self.errors.append(failure_to_error(named, 0))

    def _pushed(self, actor: RunnerProcess) -> None:
        self.states[actor.index].is_pushing = False
        self._push(actor)  # if there are newer ones by now

    def _on_lost(self, event: Lost[RunnerProcess]) -> None:
        """A request failed: what becomes of it follows from which one it was."""
        actor, code = event.actor, event.failed.code
        state = self.states[actor.index]
        if isinstance(event.tag, Ticket):
            event.tag.open.discard(actor.index)
            if code not in (FailureCode.PEER_LOST, FailureCode.TIMEOUT):
                event.tag.errors[actor.index] = failure_to_error(event.failed, 0)
            return
        if code is FailureCode.PEER_LOST:
            return  # the event of its end follows
        if code is FailureCode.TIMEOUT:
            self._worker_group.kill_late(event)
            return
        error = failure_to_error(event.failed, 0)
        if isinstance(event.tag, _Sampling):
            state.owed = None
            state.former_slots.append(state.slot)
            state.slot = 0
            state.known_slots.clear()  # it may have failed before it had taken the last one in
            self.errors.append(error)
            return
        self.errors.append(error)
        self._pushed(actor)

    def _on_gone(self, event: Gone[RunnerProcess]) -> None:
        state = self.states[event.actor.index]
        given_up = event.actor.state is ActorState.LOST
        self.faults.append(
            RunnerFault(
                runner=event.actor.index,
                cause=event.cause,
                message=event.reason,
                restarts=event.incarnation,
                lost_share=state.is_sampling,
                given_up=given_up,
            )
        )
        logger.log(
            logging.ERROR if given_up else logging.WARNING, "a runner is gone: %s", event.reason
        )
        self._leave_slots(event.actor)
        state.begin_life()

    def _note_versions(
        self, actor: RunnerProcess, versions: Mapping[str, int], weights_version: int
    ) -> None:
        """Policies may have come, gone, or counted on, by what was applied to a runner.

        An answer to what was asked before the last weights were set says nothing of these.
        """
        state = self.states[actor.index]
        state.policy_ids = set(versions)
        for policy_id in state.weights_held.keys() - versions.keys():
            del state.weights_held[policy_id]
        # Nobody has them, and no new life: one that is added later may have any name.
        gone = self.weights.keys() - self.present_versions().keys() - self._first_versions.keys()
        for policy_id in gone:
            del self.weights[policy_id]
            self._taken_over.pop(policy_id, None)
        if weights_version != self._weights_version:
            return
        for policy_id, version in versions.items():
            self.versions[policy_id] = max(version, self.versions.get(policy_id, 0))

    def _note_ids(self, ids: tuple[int, int]) -> None:
        self.ids_reached = max(self.ids_reached[0], ids[0]), max(self.ids_reached[1], ids[1])
