"""What ends processes, and what follows: restarts, recycling, memory limits, reports of hangs.

Leaves out how a process is started and killed (`connections.py`). When an actor is started again is
decided by `bus/supervision/supervision.py`, whose turn it is to be recycled by `recycling.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic

import msgspec

from envbus.bus.broker.stall_grace import GRACE
from envbus.bus.errors import StartError
from envbus.bus.memory.usage import tree_memory
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.supervision.restart import Exit
from envbus.bus.supervision.supervision import StartChild, Supervision, SupervisionEffect
from envbus.bus.wire.messages import Failed, FailureCode
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import MOST_FAULTS, FaultFigures, fault_figures
from envbus.runner.workers.config import FleetConfig
from envbus.runner.workers.connections import Connections
from envbus.runner.workers.recycling import Recycling
from envbus.runner.workers.worker import (
    ActorState,
    Gone,
    Lost,
    M,
    Ready,
    WorkerEvent,
    WorkerHandle,
)

__all__ = [
    "Lifecycle",
    "MemoryWatch",
    "StackReports",
    "why_it_ended",
]

logger = logging.getLogger("envbus.runner.workers.fleet")

#: Seconds for all actors that are asked at one time. They need some ten milliseconds, on a busy
#: machine some hundred, unless they were stopped.
_STACKS_TIMEOUT: Final = 1.0
#: Seconds for which an answer is shown again instead of asking anew: whoever waits in short turns
#: is not to be held up each time.
_FRESH: Final = 1.0
#: Seconds between two looks at how much memory is used.
_MEMORY_INTERVAL = 1.0
#: At most this fraction of the time is spent on looking: 1 s for 100 actors of usual envs.
_MAX_MEMORY_SHARE = 0.01
_MB = 2**20
_WATCHED = (ActorState.STARTING, ActorState.BUILDING, ActorState.BUILT, ActorState.READY)


class StackReports:
    """Asks the actors of one process group."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group
        #: By child: when it was asked last, and what came.
        self._known: dict[Child, tuple[float, str]] = {}

    def of(self, actors: Sequence[WorkerHandle]) -> list[str]:
        """Return for each actor the stacks of its threads with a headline, or why there are none.

        Holds the caller up for 0.3 s at most; with py-spy installed for some seconds more.
        """
        now = time.monotonic()
        children = {actor.child for actor in actors}
        running = self._process_group.children
        self._known = {child: known for child, known in self._known.items() if child in running}
        fresh = {child for child, (asked_at, _) in self._known.items() if now - asked_at <= _FRESH}
        asked = [child for child in running if child in children and child not in fresh]
        if asked:
            texts = self._process_group.stacks(asked, _STACKS_TIMEOUT)
            self._known.update(
                (child, (now, text)) for child, text in zip(asked, texts, strict=True)
            )
        return [self._describe(actor, now) for actor in actors]

    def _describe(self, actor: WorkerHandle, now: float) -> str:
        if actor.child is None or actor.child not in self._known:
            why = "it runs on another machine" if actor.remote else "its process has ended"
            return f"No stack of {actor.describe()}: {why}."
        asked_at, text = self._known[actor.child]
        age = f", {now - asked_at:.1f} s ago" if now - asked_at >= _FRESH / 2 else ""
        indented = text.replace("\n", "\n  ")
        return f"Stack of {actor.describe()}{age}:\n  {indented}"


class MemoryWatch:
    """When to look next, and what was seen.

    Args:
        measure: Returns resident bytes by process id, for processes with all below them.
        clock: Seconds.

    Attributes:
        look_at: When to look next.
    """

    def __init__(
        self,
        measure: Callable[[Iterable[int]], Mapping[int, int]] = tree_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._clock = clock
        self.look_at = clock()

    def look(self, actors: Sequence[M]) -> list[tuple[M, float]]:
        """Return the actors that run here, and the MiB that each uses with all that it started."""
        began = self._clock()
        pids = {
            actor.child.pid: actor
            for actor in actors
            if actor.child is not None and actor.state in _WATCHED
        }
        sizes = self._measure(pids)
        ended = self._clock()
        self.look_at = ended + max(_MEMORY_INTERVAL, (ended - began) / _MAX_MEMORY_SHARE)
        return [(actor, sizes[pid] / _MB) for pid, actor in pids.items()]


class Lifecycle(Generic[M]):
    """Watches the actors of one worker group, and starts those again that ended.

    Args:
        actors: All of the worker group.
        connections: Where they are.
        start: Starts an actor again; raises `StartError` without a process or memory for it.
        config: The rules by which they are watched.
        events: Where ends and fresh starts are told.

    Attributes:
        recycling: Whose turn it is to be exchanged for a fresh one; None: never anybody's.
        restarts: Actor processes started again after they ended.
        recycled: Actor processes that were exchanged while they worked.
    """

    def __init__(
        self,
        actors: Sequence[M],
        connections: Connections[M],
        start: Callable[[M], None],
        config: FleetConfig,
        events: deque[WorkerEvent[M]],
    ) -> None:
        self._actors = actors
        self._connections = connections
        self._start = start
        self._config = config
        self._events = events
        #: Of those that are started again: of all, or of nobody.
        self._supervision = Supervision(random.random)
        if (policy := config.restart_policy) is not None:
            for actor in actors:
                self._supervision.add(actor.name, policy)
        after = config.recycle_after
        self.recycling = None if after is None else Recycling(after, len(actors))
        #: An actor that was asked to leave, and when it is killed for not doing so.
        self._leaving: M | None = None
        self._leave_by = math.inf
        weighs = self.recycling is not None and self.recycling.weighs
        self._memory = MemoryWatch() if weighs or config.memory_limit_mb is not None else None
        self._stacks = StackReports(connections.process_group)
        #: By index, actors that were started again and have not said hello: by when they are to,
        #: and whether they were late already.
        self._silent: dict[int, tuple[float, bool]] = {}
        #: What has broken off a start, until it is raised.
        self._broken_off: BaseException | None = None
        self.restarts = 0
        self.recycled = 0
        #: The latest, for a window.
        self.ends: deque[FaultFigures] = deque(maxlen=MOST_FAULTS)

    def until_due(self, timeout: float) -> float:
        """Return how many of `timeout` seconds may be waited before something is due here."""
        due = [self._leave_by, *(hello_by for hello_by, _ in self._silent.values())]
        times = self._supervision.wake_at(), self._connections.process_group.wake_at()
        due += [wake_at for wake_at in times if wake_at is not None]
        if self._memory is not None:
            due.append(self._memory.look_at)
        return min(timeout, max(min(due) - time.monotonic(), 0.0))

    # --- what happened -----------------------------------------------------------------------

    def on_ready(self, actor: M) -> None:
        """An actor has become READY."""
        if self.recycling is not None and not actor.remote:
            self.recycling.begin(actor.index, time.monotonic())
        self._supervision.on_ready(actor.name, actor.incarnation, time.monotonic())
        if actor.incarnation > 0:
            self._events.append(Ready(actor))
            logger.info("%s runs again", actor.describe())

    def on_exit(self, actor: M, reason: str, status: ExitStatus, now: float) -> None:
        """A process has ended and all that it sent was taken: start it again, or tell."""
        if actor is self._leaving:
            self._renew(actor)
        else:
            decided = "" if actor.kill_reason is None else actor.kill_reason[1].partition("\n")[0]
            self.on_end(actor, reason, decided or status.report(), now)

    def on_end(self, actor: M, reason: str, detail: str, now: float, *, began: bool = True) -> None:
        """An actor is gone and all that it held was told: start it again, or tell."""
        is_supervised = actor.name in self._supervision
        actor.state = ActorState.DOWN if is_supervised else ActorState.LOST
        if self.recycling is not None:
            self.recycling.end(actor.index)
        if is_supervised:  # before it is told: where a handler raises, the end comes again
            logger.warning("%s", reason, extra=_for_log(actor))
        self.ends.append(fault_figures(time.time(), actor.cause.value, actor.name, reason))
        gone = Gone(actor, reason, actor.cause, actor.incarnation)
        self._events.append(gone)
        if is_supervised:
            why, idle = Exit.CRASH, 0.0
            if actor.cause is FaultCause.TIMEOUT:
                # Which deadline it passed is not known here; the longest takes no work for granted.
                timeouts = self._config.timeouts
                why, idle = Exit.HANG, max(timeouts.step or 0.0, timeouts.reset or 0.0)
            name, life = actor.name, actor.incarnation
            self._perform(
                self._supervision.on_exit(name, life, why, now, detail, idle, began=began)
            )
            if actor.state is ActorState.LOST:  # told once, with the number of restarts
                self._events.remove(gone)

    def tick(self, now: float) -> None:
        """Do what is due: kill who does not leave or come up, start again who has paused.

        Raises:
            BaseException: What has broken off a start, which counts as one that failed: Ctrl-C.
        """
        if self._leaving is not None and now >= self._leave_by:
            logger.warning(
                "%s did not leave in %.3g s, to be recycled, and was killed",
                self._leaving.describe(),
                self._config.timeouts.close,
            )
            self._leave_by = math.inf
            if self._leaving.child is not None:
                self._connections.process_group.kill(self._leaving.child)
        if self._silent:
            self._judge_silent(now)
        if self._supervision.wake_at() is not None:
            self._perform(self._supervision.due(now))
        if self._broken_off is not None:  # by now all others have been looked after
            error, self._broken_off = self._broken_off, None
            raise error

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
                self._connections.kill(actor, FaultCause.TIMEOUT, reason)

    def look_at_memory(self, now: float) -> None:
        """Kill who uses too much memory, where that is watched and a look is due."""
        if self._memory is None or now < self._memory.look_at:
            return
        limit = self._config.memory_limit_mb
        for actor, used in self._memory.look(self._actors):
            if limit is not None and used > limit:
                reason = f"it used {used:.0f} MiB of memory, and memory_limit_mb is {limit:g}"
                self._connections.kill(actor, FaultCause.MEMORY, reason)
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
        self._connections.broker.shut_down(actor.identity)

    # --- what to say of it -------------------------------------------------------------------

    def stacks(self, actors: Sequence[M]) -> list[str]:
        """Return what the threads of actors are doing that do not answer; takes 0.3 s at most."""
        return self._stacks.of(actors)

    def explain(self, late: Sequence[Lost[M]], left: Mapping[bytes, str]) -> list[Lost[M]]:
        """Return requests that have passed their deadlines, saying where their actors are.

        Args:
            late: Of actors whose lives are still those that were asked.
            left: Peers that have left, which is told next, and why.
        """
        # One that ended while the driver was away was not late.
        with contextlib.suppress(StartError):  # the next look raises it; `late` would be lost
            self._connections.process_group.exits()
        ended, hanging = [], []
        for lost in late:
            actor = lost.actor
            if actor.child is not None and actor.child.exit_status is not None:
                reason = f"{actor.describe()} ended: {actor.child.exit_status.report()}"
            elif actor.remote and actor.identity in left:
                reason = f"{actor.describe()} left: {left[actor.identity]}"
            else:
                hanging.append(lost)
                continue
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
                logger.error("%s; giving up on it", reason, extra=_for_log(actor))
                self._events.append(Gone(actor, reason, actor.cause, actor.incarnation))

    def _renew(self, actor: M) -> None:
        """An actor left as it was asked to: start it again."""
        logger.info("%s left, to be recycled", actor.describe())
        self._leaving, self._leave_by = None, math.inf
        self.recycled += 1
        if actor.name in self._supervision:
            actor.incarnation = self._supervision.renew(actor.name, time.monotonic())
        else:
            actor.incarnation += 1
        self._start_again(actor)

    def _start_again(self, actor: M) -> None:
        try:
            self._start(actor)
            timeout = self._config.timeouts.start
            if timeout is not None and not actor.remote:
                self._silent[actor.index] = time.monotonic() + timeout, False
        except BaseException as exc:  # no process, no memory, Ctrl-C: another failure of this actor
            if actor.child is not None:  # it may run, and was not told all that it needs
                self._connections.process_group.kill(actor.child)
            actor.child = None
            why = str(exc) or type(exc).__name__
            self._connections.broker.peer_gone(actor.identity, why)
            reason = f"{actor.name} was not started again: {why}"
            self.on_end(actor, reason, why, time.monotonic(), began=False)
            if not isinstance(exc, StartError):
                self._broken_off = exc


def why_it_ended(actor: WorkerHandle, status: ExitStatus) -> str:
    """Return for people why an actor's process has ended: by our decision, or how else."""
    if actor.kill_reason is not None and actor.kill_reason[1]:
        return f"{actor.describe()} was killed: {actor.kill_reason[1]}"
    return f"{actor.describe()} ended: {status.report()}"


def _for_log(actor: WorkerHandle) -> dict[str, object]:
    """Return what a line of the log says of a process' end besides its text."""
    return {"actor": actor.name, "cause": actor.cause.value}


def _told(lost: Lost[M], failed: Failed) -> Lost[M]:
    return Lost(lost.actor, lost.tag, failed, lost.incarnation, lost.actor.cause)
