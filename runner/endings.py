"""What ends processes, and what follows: restarts, recycling, memory limits, reports of hangs.

Leaves out how a process is started and killed (`links.py`). When an actor is started again is
decided by `bus/supervision.py`, whose turn it is to be recycled by `recycling.py`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from envbus.bus.attention import GRACE
from envbus.bus.errors import StartError
from envbus.bus.messages import Failed, FailureCode
from envbus.bus.process import Child, ExitStatus
from envbus.bus.restart import Exit
from envbus.bus.supervision import (
    ChildExited,
    ChildReady,
    StartChild,
    Supervision,
    SupervisionEffect,
    SupervisionTick,
)
from envbus.runner.actor import ActorState, Member
from envbus.runner.config import FleetConfig
from envbus.runner.faults import FaultCause
from envbus.runner.hangs import StackReports
from envbus.runner.links import Links
from envbus.runner.memory import MemoryWatch
from envbus.runner.news import Gone, Lost, News, Ready
from envbus.runner.recycling import Recycling

__all__ = ["Endings", "Starter", "why_it_ended"]

M = TypeVar("M", bound=Member)
M_contra = TypeVar("M_contra", bound=Member, contravariant=True)
logger = logging.getLogger("envbus.runner.fleet")


class Starter(Protocol[M_contra]):
    """Starts processes."""

    def start(self, actor: M_contra) -> None:
        """Start one; raises `StartError` if there is no process or no memory for it."""
        ...


class Endings(Generic[M]):
    """Watches the actors of one crew, and starts those again that ended.

    Args:
        actors: All of the crew.
        links: Where they are.
        starter: Starts an actor again.
        config: The rules by which they are watched.
        news: Where ends and fresh starts are told.

    Attributes:
        recycling: Whose turn it is to be exchanged for a fresh one; None: never anybody's.
        restarts: Actor processes started again after they ended.
        recycled: Actor processes that were exchanged while they worked.
    """

    def __init__(
        self,
        actors: Sequence[M],
        links: Links[M],
        starter: Starter[M],
        config: FleetConfig,
        news: deque[News[M]],
    ) -> None:
        self._actors = actors
        self._links = links
        self._starter = starter
        self._config = config
        self._news = news
        self._supervision: Supervision | None = None
        if config.restart is not None:
            self._supervision = Supervision(random.random)
            for actor in actors:
                self._supervision.add(actor.name, config.restart)
        self.recycling = None if config.recycle is None else Recycling(config.recycle, len(actors))
        #: An actor that was asked to leave, and when it is killed for not doing so.
        self._leaving: M | None = None
        self._leave_by = math.inf
        weighs = self.recycling is not None and self.recycling.weighs
        self._memory = MemoryWatch() if weighs or config.memory_limit_mb is not None else None
        self._stacks = StackReports(links.nursery)
        #: By index, actors that were started again and have not said hello: by when they are to,
        #: and whether they were late already.
        self._silent: dict[int, tuple[float, bool]] = {}
        #: Ends of children that are not acted upon yet.
        self._exits: list[tuple[Child, ExitStatus]] = []
        self.restarts = 0
        self.recycled = 0

    def until_due(self, timeout: float) -> float:
        """Return how many of `timeout` seconds may be waited before something is due here."""
        if self._supervision is not None:
            wake_at = self._supervision.wake_at()
            if wake_at is not None:
                timeout = min(timeout, max(wake_at - time.monotonic(), 0.0))
        if self._leaving is not None:
            timeout = min(timeout, max(self._leave_by - time.monotonic(), 0.0))
        if self._silent:
            due = min(hello_by for hello_by, _ in self._silent.values())
            timeout = min(timeout, max(due - time.monotonic(), 0.0))
        if self._memory is not None:
            timeout = min(timeout, max(self._memory.look_at - time.monotonic(), 0.0))
        return timeout

    # --- what happened -----------------------------------------------------------------------

    def on_ready(self, actor: M) -> None:
        """An actor has become READY."""
        if self.recycling is not None and not actor.remote:
            self.recycling.begin(actor.index, time.monotonic())
        if self._supervision is not None:
            self._supervision.handle(ChildReady(actor.name, actor.incarnation), time.monotonic())
        if actor.incarnation > 0:
            logger.info("%s runs again", actor.describe())
            self._news.append(Ready(actor))

    def take_exits(self) -> list[tuple[Child, ExitStatus]]:
        """Return the children that have ended since the last call."""
        exits, self._exits = [*self._exits, *self._links.nursery.exits()], []
        return exits

    def on_exit(self, actor: M, reason: str, status: ExitStatus, now: float) -> None:
        """A process has ended and all that it sent was taken: start it again, or tell."""
        if actor is self._leaving:
            self._renew(actor)
        else:
            self.on_end(actor, reason, status.report(), now)

    def on_end(self, actor: M, reason: str, detail: str, now: float) -> None:
        """An actor is gone and all that it held was told: start it again, or tell."""
        actor.state = ActorState.DOWN if self._supervision is not None else ActorState.LOST
        if self.recycling is not None:
            self.recycling.end(actor.index)
        gone = Gone(actor, reason, actor.cause, actor.incarnation)
        self._news.append(gone)
        if self._supervision is not None:
            logger.warning("%s", reason)
            why, idle = Exit.CRASH, 0.0
            if actor.cause is FaultCause.TIMEOUT:
                # Which deadline it passed is not known here; the longest takes no work for granted.
                timeouts = self._config.timeouts
                why, idle = Exit.HANG, max(timeouts.step or 0.0, timeouts.reset or 0.0)
            exited = ChildExited(actor.name, actor.incarnation, why, detail, idle)
            self._perform(self._supervision.handle(exited, now))
            if actor.state is ActorState.LOST:  # told once, with the number of restarts
                self._news.remove(gone)

    def tick(self, now: float) -> None:
        """Do what is due: kill who does not leave or come up, start again who has paused."""
        if self._leaving is not None and now >= self._leave_by:
            logger.warning(
                "%s did not leave in %.3g s, to be recycled, and was killed",
                self._leaving.describe(),
                self._config.timeouts.close,
            )
            self._leave_by = math.inf
            if self._leaving.child is not None:
                self._links.nursery.kill(self._leaving.child)
        if self._silent:
            self._judge_silent(now)
        if self._supervision is not None and self._supervision.wake_at() is not None:
            self._perform(self._supervision.handle(SupervisionTick(), now))

    def _judge_silent(self, now: float) -> None:
        """Kill who was started again and has not said hello in time: nothing else ends it."""
        for index, (hello_by, was_late) in list(self._silent.items()):
            actor = self._actors[index]
            if actor.state is not ActorState.STARTING:
                del self._silent[index]
            elif now >= hello_by and not was_late:
                self._silent[index] = now + GRACE, True  # a driver that was away looks on first
            elif now >= hello_by:
                del self._silent[index]
                reason = (
                    f"it did not say hello within {self._config.timeouts.start:g} s of its start, "
                    "which is Timeouts.start"
                )
                self._links.kill(actor, FaultCause.TIMEOUT, reason)

    def look_at_memory(self, now: float) -> None:
        """Kill who uses too much memory, where that is watched and a look is due."""
        if self._memory is None or now < self._memory.look_at:
            return
        limit = self._config.memory_limit_mb
        for actor, used in self._memory.look(self._actors):
            if limit is not None and used > limit:
                reason = f"it used {used:.0f} MiB of memory, and memory_limit_mb is {limit:g}"
                self._links.kill(actor, FaultCause.MEMORY, reason)
            elif self.recycling is not None:
                self.recycling.weigh(actor.index, used)

    def recycle(self, actor: M) -> None:
        """Ask an actor that works to leave; a fresh one follows."""
        assert actor.state is ActorState.READY
        assert self.recycling is not None
        assert self._leaving is None
        self.recycling.leave(actor.index)
        actor.state = ActorState.LEAVING
        self._leaving = actor
        self._leave_by = time.monotonic() + self._config.timeouts.close
        self._links.broker.shut_down(actor.identity)

    # --- what to say of it -------------------------------------------------------------------

    def stacks(self, actors: Sequence[M]) -> list[str]:
        """Return what the threads of actors are doing that do not answer; takes 0.3 s at most."""
        return self._stacks.of(actors)

    def explain(self, late: Sequence[Lost[M]]) -> list[Lost[M]]:
        """Return requests that have passed their deadlines, saying where their actors are."""
        # One that ended while the driver was away was not late.
        self._exits += self._links.nursery.exits()
        ended, hanging = [], []
        for lost in late:
            actor = lost.actor
            if actor.child is None or actor.child.exit_status is None:
                hanging.append(lost)
            else:
                reason = f"{actor.describe()} ended: {actor.child.exit_status.report()}"
                ended.append(_told(lost, Failed(code=FailureCode.PEER_LOST, message=reason)))
        texts = self.stacks([lost.actor for lost in hanging])
        for lost, text in zip(hanging, texts, strict=True):
            message = f"{lost.failed.message}\n{text}"
            ended.append(_told(lost, msgspec.structs.replace(lost.failed, message=message)))
        return ended

    # --- starting again ----------------------------------------------------------------------

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            actor = next(actor for actor in self._actors if actor.name == effect.name)
            if isinstance(effect, StartChild):
                actor.incarnation = effect.incarnation
                self.restarts += 1
                self._start_again(actor)
            else:
                actor.state = ActorState.LOST
                reason = f"{actor.describe()} {effect.how_often}: {effect.cause}"
                logger.error("%s; giving up on it", reason)
                self._news.append(Gone(actor, reason, actor.cause, actor.incarnation))

    def _renew(self, actor: M) -> None:
        """An actor left as it was asked to: start it again."""
        logger.info("%s left, to be recycled", actor.describe())
        self._leaving, self._leave_by = None, math.inf
        self.recycled += 1
        if self._supervision is not None:
            actor.incarnation = self._supervision.renew(actor.name, time.monotonic())
        else:
            actor.incarnation += 1
        self._start_again(actor)

    def _start_again(self, actor: M) -> None:
        try:
            self._starter.start(actor)
            timeout = self._config.timeouts.start
            if timeout is not None and not actor.remote:
                self._silent[actor.index] = time.monotonic() + timeout, False
        except StartError as exc:  # no process, no memory: another failure of this actor
            actor.child = None
            self._links.broker.peer_gone(actor.identity, str(exc))
            reason = f"{actor.name} was not started again: {exc}"
            self.on_end(actor, reason, str(exc), time.monotonic())


def why_it_ended(actor: Member, status: ExitStatus) -> str:
    """Return for people why an actor's process has ended: by our decision, or how else."""
    if actor.doom is not None and actor.doom[1]:
        return f"{actor.describe()} was killed: {actor.doom[1]}"
    return f"{actor.describe()} ended: {status.report()}"


def _told(lost: Lost[M], failed: Failed) -> Lost[M]:
    return Lost(lost.actor, lost.tag, failed, lost.actor.cause)
