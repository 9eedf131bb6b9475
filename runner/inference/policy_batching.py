"""When a batch of a policy worker goes, and which rows of which requests are in it.

Pure: no socket, clock, thread or process in this file; times are handed in, in seconds of a clock
that never goes back. Leaves out what the rows are and how answers are put together again.

Source: dynamic batching as in serving systems, e.g. the dynamic batcher of NVIDIA Triton.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from envbus.bus.settings import check_number, positive_int

__all__ = ["Batcher", "BatchingConfig", "CallBatch", "Piece"]

#: Weight of the latest batch in the running mean of how long one takes.
_WEIGHT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig:
    """How requests are gathered; the defaults are those of `PolicyWorkers`.

    Raises:
        ConfigError: A value is unusable.
    """

    #: Most rows in one call of a policy.
    max_batch: int
    #: Seconds that the first request of a batch waits for others. 0: whoever is there goes; those
    #: that come while a batch is computed are in the next.
    max_wait: float
    #: Rows that may wait in one worker; requests beyond are refused at once.
    max_rows_waiting: int

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_rows_waiting"):
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))
        check_number("max_wait", self.max_wait, least=0.0, finite=True)


#: A request: whatever the caller knows it by.
R = TypeVar("R")


# Several of each are made per request, and a struct takes a third of the time of a tuple or class.


class Piece(msgspec.Struct, Generic[R], frozen=True):
    """Some rows of one request."""

    request: R
    start: int
    stop: int


class CallBatch(msgspec.Struct, Generic[R], frozen=True):
    """What goes in one call."""

    #: What all requests in it have in common.
    key: Hashable
    pieces: list[Piece[R]]


class _Waiting(msgspec.Struct, Generic[R], eq=False):
    """A request, as far as its rows were not given out."""

    request: R
    num_rows: int
    arrived: float
    deadline: float
    next_row: int = 0


class _Queue(Generic[R]):
    """Requests that can go together, the oldest first."""

    __slots__ = ("compute", "rows", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Waiting[R]] = deque()
        #: Rows of them that were not given out.
        self.rows = 0
        #: Seconds that a batch takes, as the latest ones did.
        self.compute = 0.0


class Batcher(Generic[R]):
    """Requests that wait, by key: those of one key may be in one batch.

    A batch of a key is due when it is full, when its oldest request has waited for `max_wait`, or
    when a request must begin now to be in time. Of several that are due, the one whose oldest
    request waits longest goes first.
    """

    #: Keys whose compute times are remembered; more than policies have forms in practice.
    MAX_KEYS = 256

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._queues: OrderedDict[Hashable, _Queue[R]] = OrderedDict()
        #: Rows that wait, over all keys.
        self.rows_waiting = 0
        #: No deadline of what waits is earlier.
        self._first_deadline = math.inf

    def add(self, request: R, key: Hashable, num_rows: int, *, now: float, deadline: float) -> bool:
        """Let a request wait; False: too many rows wait already, and it does not.

        A request that is larger than `max_rows_waiting` is taken if nothing else waits.
        """
        assert num_rows > 0, f"a request of {num_rows} rows waits for nothing"
        if self.rows_waiting and self.rows_waiting + num_rows > self._config.max_rows_waiting:
            return False
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue()
            self._forget_old_keys()
        queue.waiting.append(_Waiting(request, num_rows, now, deadline))
        queue.rows += num_rows
        self.rows_waiting += num_rows
        if deadline < self._first_deadline:
            self._first_deadline = deadline
        return True

    def next_batch(self, now: float) -> CallBatch[R] | None:
        """Return a batch that is due, its rows taken out, or None."""
        if not self.rows_waiting:
            return None
        best: tuple[float, Hashable] | None = None
        for key, queue in self._queues.items():
            if queue.waiting and self._due_at(queue) <= now:
                arrived = queue.waiting[0].arrived
                if best is None or arrived < best[0]:
                    best = (arrived, key)
        return None if best is None else self._take(best[1])

    def wake_at(self) -> float | None:
        """Return when `next_batch` is worth a call again if nothing comes; None: never."""
        if not self.rows_waiting:
            return None
        return min(
            (self._due_at(queue) for queue in self._queues.values() if queue.waiting), default=None
        )

    def expire(self, now: float) -> list[R]:
        """Take out the requests whose deadlines have passed, and return them."""
        if now < self._first_deadline:
            return []
        return self._take_out(lambda one: one.deadline <= now)

    def drop(self, is_over: Callable[[R], bool]) -> None:
        """Take out the requests that are over, as far as rows of them were not given out."""
        self._take_out(lambda one: is_over(one.request))

    def observe(self, key: Hashable, seconds: float) -> None:
        """Take in how long a batch of `key` took."""
        queue = self._queues.get(key)
        if queue is not None:
            queue.compute += (seconds - queue.compute) * (_WEIGHT if queue.compute else 1.0)

    def _take_out(self, is_wanted: Callable[[_Waiting[R]], bool]) -> list[R]:
        found: list[R] = []
        for queue in self._queues.values():
            if not any(map(is_wanted, queue.waiting)):
                continue
            kept: deque[_Waiting[R]] = deque()
            for one in queue.waiting:
                if is_wanted(one):
                    found.append(one.request)
                    queue.rows -= one.num_rows - one.next_row
                    self.rows_waiting -= one.num_rows - one.next_row
                else:
                    kept.append(one)
            queue.waiting = kept
        self._first_deadline = min(
            (one.deadline for queue in self._queues.values() for one in queue.waiting),
            default=math.inf,
        )
        return found

    def _due_at(self, queue: _Queue[R]) -> float:
        config = self._config
        if queue.rows >= config.max_batch or not config.max_wait:
            return -math.inf
        first = queue.waiting[0]
        if first.next_row:
            return -math.inf  # its other rows are on their way
        urgent = min(one.deadline for one in queue.waiting) - 2.0 * queue.compute
        return min(first.arrived + config.max_wait, urgent)

    def _take(self, key: Hashable) -> CallBatch[R]:
        queue = self._queues[key]
        room = self._config.max_batch
        pieces: list[Piece[R]] = []
        while room and queue.waiting:
            first = queue.waiting[0]
            stop = min(first.num_rows, first.next_row + room)
            pieces.append(Piece(first.request, first.next_row, stop))
            room -= stop - first.next_row
            first.next_row = stop
            if stop == first.num_rows:
                queue.waiting.popleft()
        taken = self._config.max_batch - room
        queue.rows -= taken
        self.rows_waiting -= taken
        self._queues.move_to_end(key)
        return CallBatch(key, pieces)

    def _forget_old_keys(self) -> None:
        if len(self._queues) <= self.MAX_KEYS:
            return
        idle = [key for key, queue in self._queues.items() if not queue.waiting]
        for key in idle[: len(self._queues) - self.MAX_KEYS]:
            del self._queues[key]
