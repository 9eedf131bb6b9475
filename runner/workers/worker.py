"""What is known of a worker process, and of one that hosts envs; and what is told of them.

No I/O; what follows from events is for those who poll.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from envbus.actors.protocol import Built
from envbus.bus.errors import ConfigError
from envbus.bus.peer.worker import Codec
from envbus.bus.process.process_group import Child
from envbus.bus.wire.messages import Failed, Payload, Request
from envbus.runner.errors import FaultCause
from envbus.runner.monitoring.figures import ProcessFigures

__all__ = [
    "STRAY",
    "Actor",
    "ActorState",
    "Gone",
    "Lost",
    "Ready",
    "Replied",
    "WorkerEvent",
    "WorkerHandle",
    "share_out",
    "taken_from",
]

#: What is said of a request whose end got lost on its way to who waits for it.
STRAY = "an exception, e.g. of a signal's handler, has broken off the taking of its answer"


class ActorState(enum.Enum):
    """Where a process is in its life, as its owner sees it."""

    STARTING = "starting"  # its process runs and has not said hello
    BUILDING = "building"  # its envs are being made
    BUILT = "built"  # its envs exist; no blocks yet
    READY = "ready"
    LEAVING = "leaving"  # it was asked to end, and will be started again
    DOWN = "down"  # its process ended; it may be started again
    LOST = "lost"  # it ended and will not be started again


class WorkerHandle:
    """What its owner knows of one process that it has started, watches and asks.

    Args:
        kind: What it is, the begin of its name.
        index: Which of its worker group.
        remote: Whether it joins from elsewhere instead of being started here.
    """

    def __init__(self, kind: str, index: int, *, remote: bool = False) -> None:
        self.name = f"{kind}-{index}"
        self.index = index
        self.remote = remote
        #: Its name on the bus; a remote one chooses its own.
        self.peer_name = self.name
        self.state = ActorState.STARTING
        self.incarnation = 0
        self.identity = b""
        self.child: Child | None = None
        self.codec: Codec | None = None
        #: Returns what is wrong with a reply; None: its replies are taken as they are.
        self.check: Callable[[Request[Any], Payload | Exception], str | None] | None = None
        #: Id of the last request that was given up, or 0 once a later one was answered.
        self.abandoned = 0
        #: Env steps that it was asked for by name, in all its lives; see `Engine.figures`.
        self.env_steps = 0
        #: Why it is killed, once that is decided: its cause, and words for people.
        self.kill_reason: tuple[FaultCause, str] | None = None

    @property
    def cause(self) -> FaultCause:
        """Why it ends, or ended."""
        return FaultCause.CRASH if self.kill_reason is None else self.kill_reason[0]

    @property
    def is_behind(self) -> bool:
        """Whether it may still be at work on a request that was given up."""
        return self.abandoned > 0

    @property
    def pid(self) -> int | None:
        """The id of its process; None if none runs here: another's may have that number since."""
        runs = self.child is not None and self.child.exit_status is None
        return self.child.pid if self.child is not None and runs else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.describe()}, {self.state.value})"

    def describe(self) -> str:
        """Return name, process and what it holds, for messages to people."""
        if self.remote:
            process = f"remote {self.peer_name or 'not joined'}"
        else:
            process = f"pid {self.child.pid if self.child else 'none'}"
        parts = [process, f"incarnation {self.incarnation}", *self._holds()]
        return f"{self.name} ({', '.join(parts)})"

    def figures(self, *, busy: bool, env_steps: int = 0) -> ProcessFigures:
        """Return what a window shows of it."""
        return ProcessFigures(
            name=self.name,
            pid=self.pid,
            state=self.state.value,
            incarnation=self.incarnation,
            env_steps=env_steps,
            busy=busy,
        )

    def _holds(self) -> list[str]:
        return []


class Actor(WorkerHandle):
    """What the runner knows of one env actor."""

    def __init__(
        self, index: int, sources: list[object], first_source: int, *, remote: bool, shared: bool
    ) -> None:
        super().__init__("actor", index, remote=remote)
        #: Whether it exchanges arrays through shared memory.
        self.shares_memory = shared and not remote
        self.sources = sources
        #: Number of its first source among the pool's; its first env's id where each source is
        #: one env.
        self.first_source = first_source
        #: Ids of its envs; its rows in the blocks.
        self.env_ids = range(first_source, first_source + len(sources))
        #: For each source, how many slots it fills.
        self.counts: list[int] = []
        self.built: Built | None = None
        #: Which of its sources it is making an env of, or -1.
        self.making = -1

    @property
    def reads_blocks(self) -> bool:
        """Whether a step may leave its actions in the blocks.

        One that is behind would take what is written there for a request's that was given up.
        """
        return self.shares_memory and not self.is_behind

    def units(self) -> list[range]:
        """Return the envs of each of its sources, which fail and are made together."""
        units = []
        first = self.env_ids.start
        for count in self.counts:
            units.append(range(first, first + count))
            first += count
        return units

    @property
    def rows(self) -> slice:
        """Its rows in the blocks."""
        return slice(self.env_ids.start, self.env_ids.stop)

    def figures(self, *, busy: bool, env_steps: int = 0) -> ProcessFigures:
        """Return what a window shows of it."""
        of_any = super().figures(busy=busy, env_steps=env_steps)
        return msgspec.structs.replace(of_any, envs=(self.env_ids.start, self.env_ids.stop))

    def _holds(self) -> list[str]:
        first, last = self.env_ids.start, self.env_ids.stop - 1
        envs = f"env {first}" if first == last else f"envs {first}-{last}"
        if self.making < 0:
            return [envs]
        return [envs, f"making env {self.first_source + self.making}"]


def share_out(
    sources: Sequence[object], num_actors: int, *, remote: int, shared: bool
) -> list[Actor]:
    """Return the actors that host `sources`, in order and as evenly as can be.

    Args:
        sources: One per env or vector env, as plain data where they have an id or import path.
        num_actors: From 1 to as many as there are sources.
        remote: How many of them, the last, join from elsewhere.
        shared: Whether those on this host exchange arrays through shared memory.

    Raises:
        ConfigError: A function would have to go to a remote actor.
    """
    bounds = [index * len(sources) // num_actors for index in range(num_actors + 1)]
    for index in range(bounds[num_actors - remote], len(sources)):
        if not isinstance(sources[index], Mapping):
            raise ConfigError(
                f"env {index} goes to a remote actor and is a {type(sources[index]).__name__}; "
                "functions do not cross the network: give a Gymnasium id or 'module:function'"
            )
    return [
        Actor(
            index,
            list(sources[first:last]),
            first,
            remote=index >= num_actors - remote,
            shared=shared,
        )
        for index, (first, last) in enumerate(itertools.pairwise(bounds))
    ]


M = TypeVar("M", bound=WorkerHandle)


class Replied(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A request got its reply."""

    actor: M
    #: What the caller gave to `ask`.
    tag: Any
    reply: Any


class Lost(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A request ended without a reply."""

    actor: M
    tag: Any
    failed: Failed
    #: Which life of the actor held it. By when it is told the next one may have begun.
    incarnation: int
    #: Why, if the actor was killed or died.
    cause: FaultCause = FaultCause.CRASH


class Gone(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """An actor's process ended. What it held is reported as `Lost` besides."""

    actor: M
    reason: str
    cause: FaultCause
    #: Which life of it ended.
    incarnation: int


class Ready(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """An actor that had ended, or was recycled, runs again; its envs are built and not reset."""

    actor: M


WorkerEvent: TypeAlias = Replied[M] | Lost[M] | Gone[M] | Ready[M]


def taken_from(waiting: deque[WorkerEvent[M]]) -> Iterator[WorkerEvent[M]]:
    """Take one after the other out of `waiting`: what is not asked for stays in it."""
    while waiting:
        yield waiting.popleft()
