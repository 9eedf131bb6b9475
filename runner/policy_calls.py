"""The requests that wait in a policy worker: computed in batches, each answered when it is whole.

Leaves out how they come and how answers leave (`policy_worker.py`), when a batch goes
(`policy_batching.py`) and how rows are put together (`policy_rows.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

from envbus.bus.errors import ProtocolError
from envbus.bus.messages import Failed, FailureCode, Header, Payload, Tree
from envbus.bus.serve import describe
from envbus.runner.nested import Tree as Nested
from envbus.runner.policy_batching import Batcher, BatchingConfig, Piece
from envbus.runner.policy_protocol import ActionsChosen, ChooseActions
from envbus.runner.policy_rows import (
    Answer,
    RowMemory,
    SharedRows,
    cut,
    form_of,
    gather,
    join,
    split,
)
from envbus.runner.policy_weights import HostedPolicies, HostedPolicy

__all__ = ["Calls", "End"]

#: How a request ends: who asked, the header it came with, and the answer or a failure.
End = Callable[[bytes, Header, Payload], None]


class _Call:
    """A request that waits for its answer."""

    __slots__ = ("answers", "arrived", "asker", "failed", "header", "request")

    def __init__(
        self, asker: bytes, header: Header, request: ChooseActions, arrived: float
    ) -> None:
        self.asker = asker
        self.header = header
        self.request = request
        self.arrived = arrived
        #: To its first pieces.
        self.answers: list[Answer] = []
        self.failed = False


class Calls:
    """The requests of one worker that wait for actions.

    Args:
        worker: Its name, for messages to people.
        policies: Who chooses them.
        config: How requests are gathered.
        end: Called with the answer to each request, or its failure, once; not for those that
            expire, nor for those of an asker that is gone.
    """

    def __init__(
        self, worker: str, policies: HostedPolicies, config: BatchingConfig, end: End
    ) -> None:
        self._worker = worker
        self._policies = policies
        self._batcher = Batcher(config)
        self._end = end
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._shared: dict[str, SharedRows] = {}
        self._memory = RowMemory()
        self._clock = time.monotonic

    @property
    def rows_waiting(self) -> int:
        """Rows that wait to be computed."""
        return self._batcher.rows_waiting

    def patience(self) -> float:
        """Return the seconds until `compute` is worth a call, if nothing comes; may be inf."""
        wake_at = self._batcher.wake_at()
        return math.inf if wake_at is None else max(wake_at - self._clock(), 0.0)

    # --- what comes --------------------------------------------------------------------------

    def add(self, asker: bytes, header: Header, request: ChooseActions) -> None:
        """Let a request wait; it fails at once where too many rows do.

        Raises:
            ProtocolError: It is none that can be computed.
        """
        hosted = self._policies[request.policy_id]
        now = self._clock()
        key = (request.policy_id, request.explore, self._form_of(request))
        number = next(self._numbers)
        deadline = now + header.ttl
        if self._batcher.add(number, key, request.num_rows, now=now, deadline=deadline):
            self._calls[number] = _Call(asker, header, request, now)
            return
        hosted.counting.overloaded += 1
        text = (
            f"{self._batcher.rows_waiting} rows wait in {self._worker} and max_rows_waiting does "
            f"not allow {request.num_rows} more; add workers, or ask less"
        )
        self._end(asker, header, Failed(code=FailureCode.OVERLOADED, message=text))

    def has_shared(self, name: str) -> bool:
        """Return whether rows were shared under that name."""
        return name in self._shared

    def share(self, name: str, rows: SharedRows) -> None:
        """Let requests name these rows; what the same asker shared before is shared no more."""
        self._unshare(name.partition(":")[0])
        self._shared[name] = rows

    def forget(self, asker: bytes) -> None:
        """An asker is gone: nobody waits for its answers."""
        self._unshare(asker.decode(errors="replace"))
        for call in self._calls.values():
            if call.asker == asker:
                call.failed = True

    def _unshare(self, asker: str) -> None:
        for name in [name for name in self._shared if name.startswith(f"{asker}:")]:
            self._shared.pop(name).close()

    def _form_of(self, request: ChooseActions) -> object:
        """Return what requests must have in common to go in one call."""
        if request.num_rows < 1:
            raise ProtocolError(f"a request has rows, not {request.num_rows}")
        states = form_of(request.states.value, request.num_rows, "states")
        if request.listed:
            return "listed", states
        if not request.shared:
            return form_of(request.observations.value, request.num_rows, "observations"), states
        shared = self._shared.get(request.shared)
        if shared is None:
            raise ProtocolError(f"no rows were shared as {request.shared!r} with {self._worker}")
        shared.check(request.rows)
        return shared.form, states

    # --- computing ---------------------------------------------------------------------------

    def compute(self, *, hurry: bool = False) -> None:
        """Compute one batch, if there is one that is due, or with `hurry` one at all."""
        now = self._clock()
        for number in self._batcher.expire(now):
            call = self._calls.pop(number)
            self._policies[call.request.policy_id].counting.expired += 1
        batch = self._batcher.next_batch(math.inf if hurry else now)
        if batch is None:
            return
        pieces: Sequence[Piece] = batch.pieces
        if any(self._calls[piece.request].failed for piece in pieces):
            pieces = [piece for piece in pieces if not self._calls[piece.request].failed]
            self._drop(batch.pieces)
        if pieces:
            self._compute(pieces)
            self._batcher.observe(batch.key, self._clock() - now)

    def _compute(self, pieces: Sequence[Piece]) -> None:
        first = self._calls[pieces[0].request]
        hosted = self._policies[first.request.policy_id]
        try:
            answer = self._ask_policy(hosted, pieces, explore=first.request.explore)
        except Exception as exc:  # the border: the policy is the user's
            if len(pieces) > 1:  # one of them may be to blame: each by itself
                for piece in pieces:
                    self._compute([piece])
                return
            first.failed = True
            hosted.counting.failures += 1
            self._end(first.asker, first.header, describe(exc))
            self._drop(pieces)
            return
        start = 0
        crowded = self._batcher.rows_waiting > 0 or (
            len(pieces) > 1 and len({self._calls[piece.request].asker for piece in pieces}) > 1
        )
        for piece in pieces:
            call = self._calls[piece.request]
            stop = start + piece.stop - piece.start
            call.answers.append(split(answer, start, stop))
            start = stop
            if piece.stop == call.request.num_rows:
                del self._calls[piece.request]
                self._answer(hosted, call, crowded=crowded)

    def _ask_policy(
        self, hosted: HostedPolicy, pieces: Sequence[Piece], *, explore: bool
    ) -> Answer:
        observations = gather([self._observations(piece) for piece in pieces], self._memory)
        states = gather(
            [cut(self._calls[piece.request].request.states.value, piece) for piece in pieces],
            self._memory,
        )
        rows = sum(piece.stop - piece.start for piece in pieces)
        begin = time.perf_counter()
        out = hosted.policy.compute_actions(observations, states, explore=explore)
        hosted.counting.add_batch(rows, time.perf_counter() - begin)
        return Answer.of(out, rows, hosted.policy.policy_version)

    def _observations(self, piece: Piece) -> Nested:
        request = self._calls[piece.request].request
        if not request.shared:
            return cut(request.observations.value, piece)
        shared = self._shared.get(request.shared)
        if shared is None:
            raise ProtocolError(f"{request.shared!r} is shared no more")
        assert request.rows is not None
        return shared.rows(request.rows[piece.start : piece.stop])

    def _answer(self, hosted: HostedPolicy, call: _Call, *, crowded: bool) -> None:
        if call.failed:
            return
        answer = join(call.answers)
        hosted.counting.add_request(call.request.num_rows, self._clock() - call.arrived)
        self._end(
            call.asker,
            call.header,
            ActionsChosen(
                actions=Tree(answer.actions),
                listed=answer.listed,
                states=Tree(answer.states),
                extras=Tree(answer.extras),
                versions=answer.versions,
                version=answer.version,
                push=hosted.push,
                crowded=crowded,
            ),
        )

    def _drop(self, pieces: Iterable[Piece]) -> None:
        """Forget calls that have failed, with their last rows."""
        for piece in pieces:
            call = self._calls.get(piece.request)
            if call is not None and call.failed and piece.stop == call.request.num_rows:
                del self._calls[piece.request]
