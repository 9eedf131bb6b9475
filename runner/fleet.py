"""The env actors of one pool: start, ask, watch, start again, stop.

What `BusVectorEnv` and `ActorPool` share. Leaves out what a step means to its caller: it carries
requests to actors and returns what became of each.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import math
import multiprocessing
import os
import random
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import msgspec

from envbus.actors import env_source, spaces
from envbus.actors.blocks import BlockLayout, Blocks
from envbus.actors.host import BOOTSTRAP_PARCEL, ENTRY, HOST_MODULE, LANE_PARCELS, Bootstrap
from envbus.actors.protocol import Build, Built, Making, MapBlocks, Mapped
from envbus.actors.remote import REMOTE_SERVICE
from envbus.bus.arena import Arena
from envbus.bus.broker import NO_DEADLINE, Broker, failure_to_error
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import (
    MAX_HEARTBEAT,
    BrokerConfig,
    Complete,
    FailLocal,
    Notify,
    PeerLeft,
    PeerReady,
)
from envbus.bus.codec import decode
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    DecodeError,
    EncodeError,
    NoPeerError,
    StartError,
    TransportError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import without_interrupts
from envbus.bus.keys import BrokerKeys
from envbus.bus.lane import LANES_EXIST, LaneEnd, LaneRouter
from envbus.bus.messages import Failed, FailureCode, Payload, Reply, Request, Tree
from envbus.bus.pipe_codec import PipeCodec
from envbus.bus.process import Child, ExitStatus, Nursery
from envbus.bus.restart import Exit
from envbus.bus.serve import PlainCodec
from envbus.bus.supervision import (
    ChildExited,
    ChildReady,
    StartChild,
    Supervision,
    SupervisionEffect,
    SupervisionTick,
)
from envbus.bus.transport import Frames, RouterTransport
from envbus.bus.unix_sockets import wait_for
from envbus.bus.zmq_transport import ZmqRouter
from envbus.runner.actor import Actor, ActorState
from envbus.runner.config import FleetConfig, choose_num_actors, choose_start_method
from envbus.runner.faults import FaultCause, to_exception
from envbus.runner.hangs import StackReports
from envbus.runner.memory import MemoryWatch
from envbus.runner.recycling import Recycling

__all__ = ["Actor", "ActorState", "Answer", "Fleet", "Gone", "Lost", "News", "Ready"]

logger = logging.getLogger("envbus.runner.fleet")

#: Requests that one actor may have in flight: one per slot in the pool, and some for calls.
_IN_FLIGHT_PER_ACTOR = 4096
#: Seconds between looks for exited processes while messages keep coming.
_EXIT_CHECK_INTERVAL = 0.05
#: Seconds for the exit of a process to be told whose socket has hung up.
_EXIT_TIMEOUT = 1.0


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A request got its reply."""

    actor: Actor
    #: What the caller gave to `ask`.
    tag: Any
    reply: Any


class Lost(msgspec.Struct, frozen=True, gc=False):
    """A request ended without a reply."""

    actor: Actor
    tag: Any
    failed: Failed
    #: Why, if the actor was killed or died.
    cause: FaultCause = FaultCause.CRASH


class Gone(msgspec.Struct, frozen=True, gc=False):
    """An actor's process ended. What it held is reported as `Lost` besides."""

    actor: Actor
    reason: str
    cause: FaultCause
    #: Which life of it ended.
    incarnation: int


class Ready(msgspec.Struct, frozen=True, gc=False):
    """An actor that had ended, or was recycled, runs again; its envs are built and not reset."""

    actor: Actor


News: TypeAlias = Answer | Lost | Gone | Ready


class FleetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    actors: int
    actors_ready: int
    #: Actor processes started again after they ended.
    restarts: int
    #: Actor processes that were exchanged for fresh ones while they worked (`RecycleAfter`).
    recycled: int
    #: Requests to actors that wait for their end now.
    in_flight: int
    #: Replies dropped because their request had ended already.
    late_replies: int


class _Internal(enum.Enum):
    BUILD = "build"
    MAP = "map"


class Fleet:
    """The actors of one pool. One thread creates, uses and closes it.

    Args:
        env_sources: One per env: anything that `env_source.parse_source` takes.
        autoreset_mode: What all actors do at the end of an episode.
        config: How actors are started and watched.
    """

    def __init__(
        self,
        env_sources: Sequence[object],
        autoreset_mode: gymnasium.vector.AutoresetMode,
        config: FleetConfig,
    ) -> None:
        self.config = config
        self._autoreset_mode = autoreset_mode
        self._method = choose_start_method(config.context)
        num_actors = choose_num_actors(
            len(env_sources),
            config.num_actors,
            cores=_usable_cores(),
            max_concurrency=config.max_concurrency,
            remote=config.remote_actors,
        )
        plain = [env_source.to_plain(env_source.parse_source(source)) for source in env_sources]
        _check_remote_sources(plain, num_actors, config.remote_actors)
        bounds = [index * len(plain) // num_actors for index in range(num_actors + 1)]
        self.actors = [
            Actor(
                index,
                plain[first:last],
                first,
                remote=index >= num_actors - config.remote_actors,
                shared=config.shared_memory,
            )
            for index, (first, last) in enumerate(itertools.pairwise(bounds))
        ]
        self._num_local = num_actors - config.remote_actors
        self._specs = env_source.local_registry()
        self._supervision = Supervision(random.random) if config.restart is not None else None
        self._calls: dict[int, tuple[Actor, Any]] = {}
        self._by_identity: dict[bytes, Actor] = {}
        #: Remote actors that joined and have no envs: routing id and name.
        self._spares: dict[bytes, str] = {}
        self._news: list[News] = []
        self._restarts = 0
        self._recycled = 0
        #: Whose turn it is to be exchanged for a fresh one; None: never anybody's.
        self.recycling = None if config.recycle is None else Recycling(config.recycle, num_actors)
        #: An actor that was asked to leave, and when it is killed for not doing so.
        self._leaving: Actor | None = None
        self._leave_by = math.inf
        weighs = self.recycling is not None and self.recycling.weighs
        self._memory = MemoryWatch() if weighs or config.memory_limit_mb is not None else None
        self._next_exit_check = 0.0
        self._arena: Arena | None = None
        self._map: MapBlocks | None = None
        self.blocks: Blocks | None = None
        self._closed = False
        self._directory = Path(tempfile.mkdtemp(prefix="envbus-"))  # mode 0700
        self._ipc_endpoint = f"ipc://{self._directory}/bus"
        #: Carries the messages of local actors; None: ROUTER and DEALER do.
        self._lanes: LaneRouter | None = None
        try:
            router = self._make_router()
        except BaseException:
            shutil.rmtree(self._directory)
            raise
        try:
            self._nursery = Nursery((HOST_MODULE, *config.preload), directory=self._directory)
        except BaseException:
            router.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._broker = Broker(router, BrokerCore(self._broker_config()))
        self._broker.watch(self._nursery.fileno())
        disown_in_forks(self)
        self._stacks = StackReports(self._nursery)
        #: Requests that have passed their deadline and are told with the next news.
        self._late: list[tuple[Actor, Any, Failed]] = []
        #: Ends of children that are not acted upon yet.
        self._exits: list[tuple[Child, ExitStatus]] = []

    # --- start -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all actors and have their envs built, side by side.

        Raises:
            StartError: An actor's process ended, or was not ready within `timeouts.start`.
            Exception: What an env's constructor raised, as its own type where possible.
        """
        timeout = self.config.timeouts.start
        deadline = time.monotonic() + (NO_DEADLINE if timeout is None else timeout)
        for actor in self.actors:
            if self._supervision is not None and self.config.restart is not None:
                self._supervision.add(actor.name, self.config.restart)
            self._launch(actor)
        while late := [a for a in self.actors if a.state is not ActorState.BUILT]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartError(
                    f"not started within {timeout} s: {', '.join(a.describe() for a in late)}; "
                    "raise Timeouts.start if their envs need longer\n"
                    + "\n".join(self.stacks(late))
                )
            for news in self.poll(left):
                _raise_if_failed(news)
        next_row = 0
        for actor in self.actors:
            actor.env_ids = range(next_row, next_row + sum(actor.counts))
            next_row = actor.env_ids.stop

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What remote actors join at; a `*` port is replaced by the real one."""
        return tuple(e for e in self._broker.endpoints if e != self._ipc_endpoint)

    @property
    def num_envs(self) -> int:
        """Envs in all actors, once started."""
        return self.actors[-1].env_ids.stop

    def env_spaces(self) -> list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Return each env's observation and action space, once started."""
        pairs: list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]] = []
        for actor in self.actors:
            assert actor.built is not None
            distinct = [
                (spaces.from_plain(observation), spaces.from_plain(action))
                for observation, action in actor.built.spaces.value
            ]
            for count, which in zip(actor.counts, actor.built.space_of, strict=True):
                pairs += [distinct[which]] * count
        return pairs

    def map_blocks(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> Blocks:
        """Lay out the arrays that runner and actors exchange, and return the runner's views.

        With shared memory they are the very arrays that the actors write; without it, they are
        private, of the same layout, and the caller fills them from the replies.

        Raises:
            StartError: An actor ended, or there is not enough shared memory.
        """
        layout = BlockLayout.of(observation_space, action_space, self.num_envs)
        if self.config.shared_memory:
            self._arena = Arena.create(layout.size)
            self.blocks = layout.views(self._arena.buffer)
        else:
            self.blocks = layout.views(bytearray(layout.size))
        self._map = MapBlocks(
            observation_space=Tree(spaces.to_plain(observation_space)),
            action_space=Tree(spaces.to_plain(action_space)),
            num_envs=self.num_envs,
            first_row=0,
        )
        for actor in self.actors:
            self._ask_map(actor)
        while any(actor.state is not ActorState.READY for actor in self.actors):
            for news in self.poll(1.0):
                _raise_if_failed(news)
        return self.blocks

    # --- ask ---------------------------------------------------------------------------------

    def ask(
        self, actor: Actor, request: Request[Any], *, timeout: float | None, tag: object
    ) -> int:
        """Send a request; `poll` returns its end, with `tag`.

        Returns:
            An id for `cancel`.

        Raises:
            EncodeError: Something in it cannot be sent; nothing was.
            NoPeerError: The actor is not running.
        """
        assert actor.codec is not None
        frames = actor.codec.encode(request)
        return self.ask_encoded(actor, frames, type(request).__name__, timeout=timeout, tag=tag)

    def ask_encoded(
        self, actor: Actor, frames: Frames, name: str, *, timeout: float | None, tag: object
    ) -> int:
        """Send a request that was encoded before; as `ask` else."""
        self._check_usable()
        try:
            request_id = self._broker.ask(
                actor.identity, name, frames, timeout=NO_DEADLINE if timeout is None else timeout
            )
        except NoPeerError:
            self._end(actor)
            raise
        self._calls[request_id] = (actor, tag)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forget a request; its reply will be dropped."""
        call = self._calls.pop(request_id, None)
        if call is not None and not self._closed:
            call[0].abandoned = request_id
            self._broker.cancel(request_id)

    def poll(self, timeout: float) -> list[News]:
        """Wait up to `timeout` seconds for news; may return an empty list before.

        The driver may stay away between calls for as long as it likes: what came meanwhile is
        taken before anything is judged late.

        Raises:
            ClosedError: It was closed, or belongs to the process that this one was forked from.
        """
        self._check_usable()
        if self._supervision is not None:
            wake_at = self._supervision.wake_at()
            if wake_at is not None:
                timeout = min(timeout, max(wake_at - time.monotonic(), 0.0))
        if self._leaving is not None:
            timeout = min(timeout, max(self._leave_by - time.monotonic(), 0.0))
        if self._memory is not None:
            timeout = min(timeout, max(self._memory.look_at - time.monotonic(), 0.0))
        taken = self._take_outcomes(timeout)
        now = time.monotonic()
        if not taken or now >= self._next_exit_check:
            self._next_exit_check = now + _EXIT_CHECK_INTERVAL
            self._look_after_children(now)
        if self._memory is not None and now >= self._memory.look_at:
            self._look_at_memory(self._memory)
        news, self._news = self._news, []
        return news

    def why_gone(self, actor: Actor) -> str:
        """Return how an actor ended that could not be asked; waits up to a second for its exit."""
        who, child = actor.describe(), actor.child
        if actor.doom is not None and actor.doom[1]:
            return f"{who} was killed: {actor.doom[1]}"
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while child is not None and child.exit_status is None:
            if not wait_for(self._nursery, select.POLLIN, deadline):
                break
            self._look_after_children(time.monotonic())
        if child is None or child.exit_status is None:
            return f"{who} has ended"
        return f"{who} ended: {child.exit_status.report()}"

    def stacks(self, actors: Sequence[Actor]) -> list[str]:
        """Return what the threads of actors are doing that do not answer, for people.

        `Lost` says it by itself when a request has passed its deadline. Takes 0.3 s at most.
        """
        return self._stacks.of(actors)

    # --- end ---------------------------------------------------------------------------------

    def recycle(self, actor: Actor) -> None:
        """Ask an actor that works to close its envs and leave; `Ready` tells of the fresh one.

        Nothing may be in flight to it. If it does not leave within `timeouts.close` it is killed.
        No restart is counted, and its end is no news.
        """
        assert actor.state is ActorState.READY
        assert self.recycling is not None
        assert self._leaving is None
        self.recycling.leave(actor.index)
        actor.state = ActorState.LEAVING
        self._leaving = actor
        self._leave_by = time.monotonic() + self.config.timeouts.close
        self._broker.shut_down(actor.identity)

    def kill(self, actor: Actor, cause: FaultCause = FaultCause.CRASH, reason: str = "") -> None:
        """Kill an actor's process tree; `poll` reports its end, with `cause` and `reason`."""
        if actor.doom is None:
            actor.doom = (cause, reason)
        if actor.state is not ActorState.LOST:
            actor.state = ActorState.DOWN
        if actor.remote and actor.identity:  # out of reach: it is left to itself
            self._broker.peer_gone(actor.identity, reason or "it is given up")
        if actor.child is not None:
            self._nursery.kill(actor.child)

    def statistics(self) -> FleetStatistics:
        """Return counts since the start."""
        return FleetStatistics(
            actors=len(self.actors),
            actors_ready=sum(actor.state is ActorState.READY for actor in self.actors),
            restarts=self._restarts,
            recycled=self._recycled,
            in_flight=len(self._calls),
            late_replies=self._broker.statistics().late_replies,
        )

    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask all actors to close their envs and leave; kill those that do not. Idempotent.

        Args:
            timeout: Seconds that they have; None: `timeouts.close`.
            terminate: Do not ask, kill.
        """
        if self._closed:
            return
        self._closed = True
        allowed = 0.0
        try:
            if not terminate:
                allowed = self.config.timeouts.close if timeout is None else max(timeout, 0.0)
                for actor in self.actors:
                    if actor.state is ActorState.STARTING and actor.child is not None:
                        self._nursery.kill(actor.child)  # it has no envs, and does not listen yet
                    elif actor.identity and actor.state is not ActorState.DOWN:
                        self._broker.shut_down(actor.identity)
            for child in self._nursery.close(allowed):
                if not terminate:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, allowed)
        finally:  # also after Ctrl-C
            for actor in self.actors:
                if actor.child is not None:
                    actor.child.pipe.close()
            self._broker.close()
            if self._arena is not None:
                self._arena.close()

    def abandon(self) -> None:
        """Kill all actors; what finalizers call. Not broken off by Ctrl-C."""
        with without_interrupts():
            self.close(terminate=True)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed

    def disown(self) -> None:
        """In a forked copy: be closed. Sockets and actors are the owner's, which goes on."""
        self._closed = True

    # --- private -----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(
                "these actors were stopped, or belong to the process that this one was forked "
                "from; make new ones here"
            )

    def _launch(self, actor: Actor) -> None:
        """Start an actor's process; its hello, and all that follows, comes through `poll`."""
        actor.state = ActorState.STARTING
        actor.abandoned = 0
        actor.doom = None
        if actor.remote:
            actor.identity, actor.peer_name = b"", ""
            self._employ_spares()
            return
        actor.identity = f"{actor.name}.{actor.incarnation}.{secrets.token_hex(4)}".encode()
        self._broker.expect(actor.identity, actor.name, actor.incarnation)
        if actor.child is not None:
            actor.child.pipe.close()  # all that it sent was taken
        actor.child = self._nursery.start(actor.name, ENTRY, method=self._method)
        actor.codec = PipeCodec(actor.child.pipe, writable=True)
        self._by_identity[actor.identity] = actor
        bootstrap = Bootstrap(
            endpoint="" if self._lanes is not None else self._ipc_endpoint,
            identity=actor.identity,
            name=actor.name,
            incarnation=actor.incarnation,
            # One who spins per core, and the runner is one.
            spin=self._num_local <= _usable_cores() and actor.index < _usable_cores() - 1,
            capacity=_IN_FLIGHT_PER_ACTOR,
            authkey=bytes(multiprocessing.current_process().authkey),
        )
        number = actor.child.pipe.next_number()
        assert number == BOOTSTRAP_PARCEL
        actor.child.pipe.send_bytes(number, msgspec.msgpack.encode(bootstrap))
        if self._lanes is not None:
            ours, theirs = LaneEnd.pair()
            for number, fd in zip(LANE_PARCELS, theirs.fds(), strict=True):
                assert number == actor.child.pipe.next_number()
                actor.child.pipe.send_fd(number, fd)
            theirs.close()
            self._lanes.add_lane(actor.identity, ours)

    def _broker_config(self) -> BrokerConfig:
        return BrokerConfig(
            max_in_flight_per_peer=_IN_FLIGHT_PER_ACTOR,
            max_heartbeat=MAX_HEARTBEAT if self.config.bind else math.inf,
        )

    def _make_router(self) -> RouterTransport:
        config = self.config
        with_lanes = config.lanes and LANES_EXIST
        private = [] if with_lanes else [self._ipc_endpoint]
        router = None
        if private or config.bind:
            keys = BrokerKeys.load(config.keys, config.allow)
            router = ZmqRouter(config.bind, private=private, keys=keys, insecure=config.insecure)
        if with_lanes or router is None:
            self._lanes = LaneRouter(router, spin=self._num_local <= _usable_cores() > 1)
            return self._lanes
        return router

    def _launch_again(self, actor: Actor) -> None:
        try:
            self._launch(actor)
        except StartError as exc:  # no process, no memory: another failure of this actor
            actor.child = None
            self._broker.peer_gone(actor.identity, str(exc))
            reason = f"{actor.name} was not started again: {exc}"
            self._on_end(actor, reason, str(exc), time.monotonic())

    def _take_outcomes(self, timeout: float) -> bool:
        """Take what the broker has; return whether it had anything."""
        outcomes = self._broker.poll(timeout)
        for outcome in outcomes:
            if type(outcome) is Complete:
                self._on_reply(outcome)
            elif type(outcome) is FailLocal:
                self._on_failure(outcome)
            elif type(outcome) is PeerReady:
                self._on_hello(outcome)
            elif type(outcome) is PeerLeft:
                self._on_left(outcome)
            elif type(outcome) is Notify:
                self._on_notice(outcome)
        if self._late:
            self._tell_late()
        return bool(outcomes)

    def _on_notice(self, outcome: Notify) -> None:
        actor = self._by_identity.get(outcome.peer)
        if actor is not None and outcome.header.payload_type == Making.__name__:
            with contextlib.suppress(DecodeError):  # it is for people only
                actor.making = decode(Making, outcome.frames).source

    def _on_hello(self, outcome: PeerReady) -> None:
        actor = self._by_identity.get(outcome.peer)
        if actor is not None:
            self._build(actor)
        elif REMOTE_SERVICE in outcome.hello.services:
            logger.info("remote actor %s joined", outcome.hello.name)
            self._spares[outcome.peer] = outcome.hello.name
            self._employ_spares()

    def _on_left(self, outcome: PeerLeft) -> None:
        """A peer left; that of an own child is told by its process' exit."""
        self._spares.pop(outcome.peer, None)
        actor = self._by_identity.get(outcome.peer)
        if actor is not None and actor.remote:
            del self._by_identity[outcome.peer]
            reason = f"{actor.describe()} left: {outcome.reason}"
            self._on_end(actor, reason, outcome.reason, time.monotonic())

    def _employ_spares(self) -> None:
        """Give remote actors that have joined to those that wait for one."""
        for actor in self.actors:
            if not self._spares:
                return
            if actor.remote and actor.state is ActorState.STARTING and not actor.identity:
                actor.identity, actor.peer_name = self._spares.popitem()
                actor.codec = PlainCodec(writable=True)
                self._by_identity[actor.identity] = actor
                self._build(actor)

    def _build(self, actor: Actor) -> None:
        actor.state = ActorState.BUILDING
        actor.making = -1
        build = Build(
            sources=Tree(actor.sources),
            autoreset_mode=self._autoreset_mode.value,
            first_env_id=actor.env_ids.start,
            specs=Tree(self._specs) if self._specs and not actor.remote else None,
        )
        try:
            self.ask(actor, build, timeout=self.config.timeouts.start, tag=_Internal.BUILD)
        except EncodeError:
            _raise_for_unsendable(actor, build)
            raise

    def _on_reply(self, outcome: Complete) -> None:
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return
        actor, tag = call
        if actor.abandoned < outcome.wire_id:
            actor.abandoned = 0
        assert actor.codec is not None
        reply_type = Payload.registry.get(outcome.header.payload_type, Reply)
        try:
            reply = actor.codec.decode(reply_type, outcome.frames)
        except (DecodeError, TransportError) as exc:
            # E.g. an object whose class cannot be imported here; other requests' ends follow.
            failed = Failed(code=FailureCode.PROTOCOL, message=f"{actor.describe()}: {exc}")
            self._fail(actor, tag, failed)
            return
        if type(tag) is not _Internal:
            self._news.append(Answer(actor, tag, reply))
        elif isinstance(reply, Built):
            self._on_built(actor, reply)
        elif isinstance(reply, Mapped):
            self._on_mapped(actor)

    def _on_failure(self, outcome: FailLocal) -> None:
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return
        actor, tag = call
        if outcome.failed.code is FailureCode.PEER_LOST:
            self._end(actor)
        elif outcome.failed.code is FailureCode.TIMEOUT:
            actor.abandoned = outcome.wire_id
            self._late.append((actor, tag, outcome.failed))
            return
        self._fail(actor, tag, outcome.failed)

    def _tell_late(self) -> None:
        """Fail the requests that have passed their deadlines, saying where their actors are."""
        late, self._late = self._late, []
        # One that ended while the driver was away was not late.
        self._exits += self._nursery.exits()
        self._next_exit_check = 0.0
        hanging = []
        for actor, tag, failed in late:
            if actor.child is None or actor.child.exit_status is None:
                hanging.append((actor, tag, failed))
            else:
                reason = f"{actor.describe()} ended: {actor.child.exit_status.report()}"
                self._fail(actor, tag, Failed(code=FailureCode.PEER_LOST, message=reason))
        texts = self._stacks.of([actor for actor, _, _ in hanging])
        for (actor, tag, failed), text in zip(hanging, texts, strict=True):
            told = msgspec.structs.replace(failed, message=f"{failed.message}\n{text}")
            self._fail(actor, tag, told)

    def _fail(self, actor: Actor, tag: object, failed: Failed) -> None:
        if type(tag) is not _Internal or self._map is None:
            self._news.append(Lost(actor, tag, failed, actor.cause))
        else:
            logger.error("%s did not come up: %s", actor.describe(), failed.message)
            self.kill(actor)

    def _on_built(self, actor: Actor, built: Built) -> None:
        actor.making = -1
        if built.errors:
            if self._map is None:
                self._raise_build_error(actor, built)
            logger.error("%s: %s", actor.describe(), built.errors[0].traceback)
            self.kill(actor)
            return
        actor.built = built
        actor.counts = built.counts
        actor.state = ActorState.BUILT
        if self._map is not None:
            self._ask_map(actor)

    def _on_mapped(self, actor: Actor) -> None:
        again = actor.incarnation > 0
        actor.state = ActorState.READY
        if self.recycling is not None and not actor.remote:
            self.recycling.begin(actor.index, time.monotonic())
        if self._supervision is not None:
            self._supervision.handle(ChildReady(actor.name, actor.incarnation), time.monotonic())
        if again:
            logger.info("%s runs again", actor.describe())
            self._news.append(Ready(actor))

    def _ask_map(self, actor: Actor) -> None:
        assert self._map is not None
        request = msgspec.structs.replace(self._map, first_row=actor.env_ids.start)
        if self._arena is not None and actor.child is not None:
            number = actor.child.pipe.next_number()
            actor.child.pipe.send_fd(number, self._arena.fd)
            request = msgspec.structs.replace(request, parcel=number)
        self.ask(actor, request, timeout=self.config.timeouts.start, tag=_Internal.MAP)

    def _look_after_children(self, now: float) -> None:
        exits, self._exits = [*self._exits, *self._nursery.exits()], []
        for child, status in exits:
            for actor in self.actors:
                if actor.child is child:
                    self._on_exit(actor, status, now)
        if self._leaving is not None and now >= self._leave_by:
            logger.warning(
                "%s did not leave in %.3g s, to be recycled, and was killed",
                self._leaving.describe(),
                self.config.timeouts.close,
            )
            self._leave_by = math.inf
            if self._leaving.child is not None:
                self._nursery.kill(self._leaving.child)
        if self._supervision is not None and self._supervision.wake_at() is not None:
            self._perform(self._supervision.handle(SupervisionTick(), now))

    def _look_at_memory(self, memory: MemoryWatch) -> None:
        limit = self.config.memory_limit_mb
        for actor, used in memory.look(self.actors):
            if limit is not None and used > limit:
                reason = f"it used {used:.0f} MiB of memory, and memory_limit_mb is {limit:g}"
                self.kill(actor, FaultCause.MEMORY, reason)
            elif self.recycling is not None:
                self.recycling.weigh(actor.index, used)

    def _on_exit(self, actor: Actor, status: ExitStatus, now: float) -> None:
        self._take_outcomes(0.0)  # what it sent before it ended counts
        reason = f"{actor.describe()} ended: {status.report()}"
        if actor.doom is not None and actor.doom[1]:
            reason = f"{actor.describe()} was killed: {actor.doom[1]}"
        self._by_identity.pop(actor.identity, None)
        self._broker.peer_gone(actor.identity, reason)
        self._take_outcomes(0.0)
        if self._lanes is not None:
            self._lanes.drop_lane(actor.identity)
        if actor is self._leaving:
            self._renew(actor)
        else:
            self._on_end(actor, reason, status.report(), now)

    def _renew(self, actor: Actor) -> None:
        """An actor left as it was asked to: start it again."""
        logger.info("%s left, to be recycled", actor.describe())
        self._leaving, self._leave_by = None, math.inf
        self._recycled += 1
        if self._supervision is not None:
            actor.incarnation = self._supervision.renew(actor.name)
        else:
            actor.incarnation += 1
        self._launch_again(actor)

    def _on_end(self, actor: Actor, reason: str, detail: str, now: float) -> None:
        """An actor is gone and all that it held was told: start it again, or tell."""
        actor.state = ActorState.DOWN if self._supervision is not None else ActorState.LOST
        if self.recycling is not None:
            self.recycling.end(actor.index)
        gone = Gone(actor, reason, actor.cause, actor.incarnation)
        self._news.append(gone)
        if self._supervision is not None:
            logger.warning("%s", reason)
            exited = ChildExited(actor.name, actor.incarnation, Exit.CRASH, detail)
            self._perform(self._supervision.handle(exited, now))
            if actor.state is ActorState.LOST:  # told once, with the number of restarts
                self._news.remove(gone)

    def _end(self, actor: Actor) -> None:
        """Treat an actor that cannot be reached as ended, and see to it that it is."""
        if actor.state not in (ActorState.DOWN, ActorState.LOST):
            self.kill(actor)

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            actor = next(actor for actor in self.actors if actor.name == effect.name)
            if isinstance(effect, StartChild):
                actor.incarnation = effect.incarnation
                self._restarts += 1
                self._launch_again(actor)
            else:
                actor.state = ActorState.LOST
                reason = (
                    f"{actor.describe()} failed again after {effect.restarts} restarts: "
                    f"{effect.cause}"
                )
                logger.error("%s; giving up on it", reason)
                self._news.append(Gone(actor, reason, actor.cause, actor.incarnation))

    def _raise_build_error(self, actor: Actor, built: Built) -> None:
        error = built.errors[0]
        env_error, original = to_exception(
            error,
            env_id=actor.env_ids.start + error.slot,
            actor=actor.name,
            incarnation=actor.incarnation,
        )
        if original is not None:
            raise original from env_error
        raise env_error


def _check_remote_sources(sources: Sequence[object], num_actors: int, remote: int) -> None:
    """Refuse functions where only ids and import paths can go."""
    first = (num_actors - remote) * len(sources) // num_actors
    for index in range(first, len(sources)):
        if not isinstance(sources[index], Mapping):
            raise ConfigError(
                f"env {index} goes to a remote actor and is a {type(sources[index]).__name__}; "
                "functions do not cross the network: give a Gymnasium id or 'module:function'"
            )


def _raise_if_failed(news: News) -> None:
    """Raise for what keeps an actor from its first start."""
    if isinstance(news, Gone):
        raise StartError(f"while starting, {news.reason}")
    # What a process held when it ended is told before its end, which says more.
    if isinstance(news, Lost) and news.failed.code is not FailureCode.PEER_LOST:
        raise failure_to_error(news.failed, 0)


def _raise_for_unsendable(actor: Actor, build: Build) -> None:
    """Raise for the first source of an actor that cannot be sent, and say which it is."""
    assert actor.codec is not None
    for number, source in enumerate(actor.sources, actor.first_source):
        try:
            actor.codec.encode(msgspec.structs.replace(build, sources=Tree(source), specs=None))
        except EncodeError as exc:
            raise EncodeError(f"env {number} cannot be sent to its actor: {exc}") from exc


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
