"""The envs of a pool in the pool's own process: no actor, no message.

What they are asked is answered by the handlers of an actor (`actors/env/actor.py`), so that all
rules hold that hold there; there is no isolation: what ends an env's process ends this one, and
nothing ends an env that hangs. Leaves out processes (`fleet.py`).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import gymnasium
import msgspec
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.blocks import Blocks
from envbus.actors.arrays.copies import own, own_deeply
from envbus.actors.env import source as env_source
from envbus.actors.env.actor import EnvActor
from envbus.actors.failures import slot_error
from envbus.actors.protocol import (
    Build,
    CallResult,
    MapBlocks,
    Rebuild,
    Reset,
    SlotError,
    Step,
    StepResult,
)
from envbus.bus.errors import ClosedError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import interruptible, without_interrupts
from envbus.bus.peer.worker import describe
from envbus.bus.transport.unix_sockets import Bell
from envbus.bus.wire.messages import Reply, Request, Tree
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import FaultFigures, ProcessFigures
from envbus.runner.workers.actions import STEP_ALL
from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.fleet import Fleet, RowMap, env_spaces, raise_build_error
from envbus.runner.workers.recycling import Recycling
from envbus.runner.workers.step_words import StepWords
from envbus.runner.workers.worker import Actor, ActorState, Lost, Replied, WorkerEvent, taken_from
from envbus.runner.workers.worker_group import WorkerGroupStatistics

__all__ = ["AnyFleet", "LocalFleet", "make_fleet"]

logger = logging.getLogger("envbus.runner.workers.fleet")

#: What envs fail in that are broken off by Ctrl-C, by type of the request.
_PHASES: Final = {Reset: "reset", Rebuild: "build", Step: "step"}
#: Number of the only thing that is handed over.
_ARENA: Final = 1


class _Asked(NamedTuple):
    """A request that nobody has answered yet."""

    request_id: int
    request: Request[Any]
    tag: Any
    #: Whether its end is an event.
    is_awaited: bool = True


class LocalFleet:
    """Envs that are stepped by who polls. One thread creates, uses and closes it.

    Offers a pool what a `Fleet` offers. What is asked is done in `poll`, one request at a time and
    in order; no request has a deadline.

    Args:
        env_sources: As of a `Fleet`. Functions are called as they are, and made no copies of.
        autoreset_mode: What happens at the end of an episode.
        config: With `num_actors=0`.
    """

    #: Nobody is ever exchanged.
    recycling: Recycling | None = None
    #: Nobody is asked by words.
    words: StepWords | None = None

    def __init__(
        self, env_sources: Sequence[object], autoreset_mode: AutoresetMode, config: FleetConfig
    ) -> None:
        self.config = config
        sources = [env_source.to_plain(env_source.parse_source(source)) for source in env_sources]
        self.actors = [_InThisProcess(sources, shared=config.shared_memory)]
        self._autoreset_mode = autoreset_mode
        self._rows: RowMap | None = None
        self._env_actor = EnvActor(self._lend)
        self._ids = itertools.count(1)
        self._asked: deque[_Asked] = deque()
        self._events: deque[WorkerEvent[Actor]] = deque()
        self._bell = Bell()
        #: An env is at work, in a call that this thread is in.
        self._is_busy = False
        self._closed = False
        disown_in_forks(self)

    def start(self) -> None:
        """Make the envs, one after the other.

        Raises:
            Exception: What an env's constructor raised, as its own type where possible.
        """
        actor = self.actors[0]
        actor.state = ActorState.BUILDING
        built = self._env_actor.build(
            Build(
                sources=Tree(actor.sources),
                autoreset_mode=self._autoreset_mode.value,
                first_env_id=0,
            )
        )
        _raise_interrupt(built.errors)
        if built.errors:
            raise_build_error(actor, built)
        # Copies: who samples a pool's space must not move the env's own.
        actor.built = msgspec.structs.replace(built, spaces=Tree(own_deeply(built.spaces.value)))
        actor.counts = built.counts
        actor.env_ids = range(sum(built.counts))
        actor.state = ActorState.BUILT

    @property
    def num_envs(self) -> int:
        """Envs, once started."""
        return self.actors[0].env_ids.stop

    def env_spaces(self) -> list[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Return each env's observation and action space, once started."""
        return env_spaces(self.actors)

    def map_blocks(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> Blocks:
        """Lay out the arrays that runner and envs exchange, and return the runner's views.

        Without shared memory the envs have others, and what they write comes in replies.

        Raises:
            ConfigError: There is not enough shared memory.
        """
        shared = self.config.shared_memory
        self._rows = RowMap(
            observation_space,
            action_space,
            self.num_envs,
            shared=shared,
            check_finite=self.config.check_finite,
        )
        request = self._rows.request
        if shared:
            request = msgspec.structs.replace(request, passed=_ARENA)
        self._env_actor.map_blocks(request)
        self.actors[0].state = ActorState.READY
        return self._rows.blocks

    @property
    def in_place(self) -> LocalFleet | None:
        """This one, if its envs share their rows, so that `step_all` may be called."""
        return self if self.actors[0].reads_blocks else None

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return where the arrays are, for other processes: see `RowMap.shared_rows`."""
        return None if self._rows is None else self._rows.shared_rows()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """None: nobody joins."""
        return ()

    # --- ask ---------------------------------------------------------------------------------

    def ask(
        self,
        actor: Actor,
        request: Request[Any],
        *,
        timeout: float | None,
        tag: object,
    ) -> int:
        """Note a request; `poll` does it and returns its end, with `tag`.

        Returns:
            An id for `cancel`.

        Raises:
            ClosedError: As `poll`.
        """
        del actor, timeout  # there is only one, and nothing could end what it does
        self._check_usable()
        if type(request) is Rebuild:  # nor may it end this process
            request = msgspec.structs.replace(request, close_timeout=math.inf)
        request_id = next(self._ids)
        self._asked.append(_Asked(request_id, request, tag))
        self._bell.ring()
        return request_id

    def step_all(self, tag: object) -> bool:
        """Have all envs step at once, by the actions in shared memory, which there must be.

        Returns:
            Whether all that came of it but the infos, which are dropped, stands in shared memory.
            Else its end is told by `poll`, with `tag`: what was asked before comes first, or there
            is more to tell.

        Raises:
            ClosedError: As `poll`.
            KeyboardInterrupt: Likewise; its end is told all the same.
        """
        if self._asked:
            self.ask(self.actors[0], STEP_ALL, timeout=None, tag=tag)
            return False
        try:
            return not self._do(_Asked(next(self._ids), STEP_ALL, tag), tell_always=False)
        finally:
            if self._events:
                self._bell.ring()

    def is_asked(self, request_id: int) -> bool:
        """Return whether the end of a request will be an event: none is under way now."""
        return any(asked.request_id == request_id for asked in self._asked)

    def cancel(self, request_id: int) -> None:
        """Forget a request, and do it only if it makes an env anew that has failed."""
        for place, asked in enumerate(self._asked):
            if asked.request_id == request_id:
                if type(asked.request) is Rebuild:
                    self._asked[place] = asked._replace(is_awaited=False)
                else:
                    del self._asked[place]
                return

    def fileno(self) -> int:
        """Return a descriptor that is readable as long as something is to be done."""
        self._check_usable()
        return self._bell.fileno()

    def poll(self, timeout: float) -> Iterator[WorkerEvent[Actor]]:
        """Do the oldest request and return its end; without any, wait for up to `timeout` seconds.

        What is not taken out of the iterator comes again with the next call.

        Raises:
            ClosedError: It was closed, or belongs to the process that this one was forked from.
            KeyboardInterrupt: Came while an env was at work, which cannot go on from there: the
                next call tells that it has failed, and what the others returned.
        """
        self._check_usable()
        if not self._events:
            if self._asked:
                self._do(self._asked.popleft())
            elif timeout > 0.0:
                with interruptible():
                    time.sleep(timeout)
        if not self._asked:
            self._bell.silence()
        return taken_from(self._events)

    def kill(self, actor: Actor, cause: FaultCause = FaultCause.CRASH, reason: str = "") -> None:
        """Do nothing: what would be killed is this process."""

    def kill_late(self, lost: Lost[Actor], cause: FaultCause = FaultCause.TIMEOUT) -> None:
        """Do nothing: what would be killed is this process."""

    def recycle(self, actor: Actor) -> None:
        """Do nothing: there is no process to exchange."""

    def stacks(self, actors: Sequence[Actor]) -> list[str]:
        """Return nothing: they are those of who asks."""
        del actors
        return []

    def why_gone(self, actor: Actor) -> str:
        """Return what can be said of envs that cannot be asked."""
        return f"{actor.describe()} is closed"

    def statistics(self) -> WorkerGroupStatistics:
        """Return counts since the start; there is no actor in them."""
        return WorkerGroupStatistics(in_flight=len(self._asked))

    def recent_ends(self) -> list[FaultFigures]:
        """Return nothing: no process ends."""
        return []

    # --- end ---------------------------------------------------------------------------------

    def close(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs, however long they take. Idempotent.

        From a signal's handler, while one is at work, once that is done.
        """
        del timeout, terminate  # there is nothing to be killed
        if self._closed:
            return
        self._closed = True
        if not self._is_busy:
            self._let_go()

    @without_interrupts()
    def abandon(self) -> None:
        """Close the envs; what finalizers call. Not broken off by Ctrl-C."""
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed

    def disown(self) -> None:
        """In a forked copy: be closed. The envs are the owner's, which goes on."""
        self._closed = True

    # --- private -----------------------------------------------------------------------------

    def _lend(self, number: int) -> int:
        """Return a descriptor of the shared memory, for the envs' side to map."""
        assert number == _ARENA
        assert self._rows is not None
        assert self._rows.arena is not None
        return os.dup(self._rows.arena.fd)

    def _do(self, asked: _Asked, *, tell_always: bool = True) -> bool:
        """Have a request answered, and tell its end; return whether there was one to tell.

        Args:
            asked: Which.
            tell_always: False: not if it is a step that has left all in shared memory.
        """
        actor = self.actors[0]
        tells = asked.is_awaited
        self._is_busy, has_begun = True, False
        reply: Reply | None = None
        try:
            with interruptible() as work:  # an env may take long, or hang
                has_begun = True
                reply = self._env_actor.handlers[type(asked.request)](asked.request)
        except BaseException as exc:
            if not has_begun:  # Ctrl-C, which had been kept: no env knows of it
                self._asked.appendleft(asked)
                self._bell.ring()
                raise
            is_signal = reply is not None or exc is work.raised
            if reply is None and is_signal and (phase := _PHASES.get(type(asked.request))):
                # Between two envs, or behind the last: nobody knows what they are at.
                slots = getattr(asked.request, "slots", None)
                addressed = range(len(actor.env_ids)) if slots is None else slots
                reply = StepResult(errors=[slot_error(slot, phase, exc) for slot in addressed])
            if reply is not None and asked.is_awaited:
                self._events.append(Replied(actor, asked.tag, _own(reply)))
            elif asked.is_awaited:
                self._events.append(Lost(actor, asked.tag, describe(exc), actor.incarnation))
            if is_signal or not isinstance(exc, Exception):
                raise
        else:
            if not tell_always and isinstance(reply, StepResult) and reply.stands_in_arena:
                tells = False
            if tells:
                self._events.append(Replied(actor, asked.tag, _own(reply)))
            if isinstance(reply, StepResult | CallResult) and reply.errors:
                _raise_interrupt(reply.errors, work.raised)
        finally:
            self._is_busy = False
            if self._closed:
                self._let_go()
        self._check_usable()
        return tells

    def _let_go(self) -> None:
        self._asked.clear()
        self._events.clear()
        try:
            with interruptible() as work:  # an env may take long, or hang
                errors = self._env_actor.close()
            for error in errors:
                logger.warning("env %d: closing it raised\n%s", error.slot, error.traceback)
            _raise_interrupt(errors, work.raised)
        finally:
            if self._rows is not None:
                self._rows.close()
            self._bell.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(
                "these envs were closed, or belong to the process that this one was forked from; "
                "make new ones here"
            )


AnyFleet: TypeAlias = Fleet | LocalFleet


def make_fleet(
    env_sources: Sequence[object], autoreset_mode: AutoresetMode, config: FleetConfig
) -> AnyFleet:
    """Return what steps the envs of a pool: actors, or, for `num_actors=0`, this process."""
    kind = LocalFleet if config.is_local else Fleet
    return kind(env_sources, autoreset_mode, config)


class _InThisProcess(Actor):
    """Stands where an actor would."""

    def __init__(self, sources: list[object], *, shared: bool) -> None:
        super().__init__(0, sources, 0, remote=False, shared=shared)
        self.name = self.peer_name = "this process"

    def figures(self, *, busy: bool, env_steps: int = 0) -> ProcessFigures:
        """Return what a window shows of it."""
        of_any = super().figures(busy=busy, env_steps=env_steps)
        return msgspec.structs.replace(of_any, pid=os.getpid())

    def describe(self) -> str:
        return f"{self.name} ({', '.join(self._holds())})"


def _own(reply: Reply) -> Reply:
    """Return a reply whose infos and observations are not the env's own, which goes on with its."""
    if not isinstance(reply, StepResult) or (reply.infos is None and reply.observations is None):
        return reply
    return msgspec.structs.replace(
        reply,
        infos=None if reply.infos is None else Tree(own(reply.infos.value)),
        observations=None if reply.observations is None else Tree(own(reply.observations.value)),
    )


def _raise_interrupt(errors: Sequence[SlotError], raised: BaseException | None = None) -> None:
    """Raise the Ctrl-C that was meant for the program, and not for the env that was at work.

    Slots take whatever comes for their env's failure, which in an actor it is.

    Args:
        errors: What they took for it.
        raised: What a signal's handler has raised, which is treated likewise.
    """
    interrupt = KeyboardInterrupt() if raised is None else raised
    kind = type(interrupt)
    if (kind.__module__, kind.__qualname__) in {(e.type_module, e.type_name) for e in errors}:
        raise interrupt
