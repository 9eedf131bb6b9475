"""The requests that wait in a policy worker: computed in batches, each answered when it is whole.

Leaves out how they come and how answers leave (`policy_worker.py`), and when a batch goes
(`policy_batching.py`).
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.blocks import BlockLayout
from envbus.actors.protocol import MapBlocks
from envbus.actors.spaces import spaces
from envbus.bus.errors import ProtocolError
from envbus.bus.memory.arena import Arena
from envbus.bus.peer.worker import describe
from envbus.bus.wire.codec import decode
from envbus.bus.wire.messages import Failed, FailureCode, Header, Payload, Tree
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.batches.nested import Tree as Nested
from envbus.runner.batches.nested import as_rows, leaves_of, map_tree
from envbus.runner.batches.row_memory import LARGE, RowMemory
from envbus.runner.inference.policy_batching import Batcher, BatchingConfig, Piece
from envbus.runner.inference.policy_protocol import (
    COUNTED,
    MAX_LAYOUT_BYTES,
    ActionsChosen,
    ChooseActions,
    PolicyCounts,
)
from envbus.runner.policies.policy import Policy
from envbus.runner.policies.policy_output import PolicyAnswer, ask

__all__ = ["Calls", "End", "HostedPolicy", "SharedRows", "cut", "form_of", "gather"]

#: How a request ends: who asked, the header it came with, and the answer or a failure.
End = Callable[[bytes, Header, Payload], None]


class HostedPolicy:
    """A policy in one worker, how new its weights are, and what is counted of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        #: The latest push that it has taken over, and that it has looked at.
        self.push = self.seen_push = 0
        #: By name, as in `PolicySums`.
        self.counted: Counter[str] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._latency = LatencyHistogram()
        self._compute = LatencyHistogram()

    def add_batch(self, rows: int, seconds: float) -> None:
        """Count one call of the policy."""
        self._batch_sizes[rows] += 1
        self._compute.add(seconds)

    def add_request(self, rows: int, seconds: float) -> None:
        """Count one answer."""
        self.counted["requests"] += 1
        self.counted["rows"] += rows
        self._latency.add(seconds)

    def counts(self) -> PolicyCounts:
        """Return what was counted."""
        return PolicyCounts(
            version=self.policy.policy_version,
            push=self.push,
            batch_sizes=dict(self._batch_sizes),
            latency=self._latency.counts(),
            compute=self._compute.counts(),
            **{name: self.counted[name] for name in COUNTED},
        )


class _Call(msgspec.Struct, eq=False):
    """A request that waits for its answer."""

    asker: bytes
    header: Header
    request: ChooseActions
    hosted: HostedPolicy
    arrived: float
    #: To its first pieces.
    answers: list[PolicyAnswer] = msgspec.field(default_factory=list)


class SharedRows:
    """Observations of a pool's envs, in the memory that the envs write them to.

    A row is still while its env waits for an action, so that it can be read until then.
    """

    def __init__(self, arena: Arena, layout: MapBlocks) -> None:
        observation_space = spaces.from_plain(layout.observation_space.value)
        action_space = spaces.from_plain(layout.action_space.value)
        blocks = BlockLayout.of(observation_space, action_space, layout.num_envs)
        leaves = blocks.views(arena.buffer).observations
        if leaves is None:
            raise ProtocolError("observations of no fixed size are not in shared memory")
        self._arena = arena
        self._num_rows = layout.num_envs
        self._observations = spaces.structurer(observation_space)(leaves)
        self.form = form_of(self._observations, layout.num_envs, "observations")

    @classmethod
    def attach(cls, arena_fd: int, size: int, layout_fd: int) -> SharedRows:
        """Return the rows of somebody's arena; takes over both descriptors."""
        arena = Arena.attach(arena_fd, size)
        try:
            with os.fdopen(layout_fd, "rb"):
                if (found := os.fstat(layout_fd).st_size) > MAX_LAYOUT_BYTES:
                    raise ProtocolError(
                        f"a layout of {found} bytes, and at most {MAX_LAYOUT_BYTES} are read"
                    )
                # All workers have this one open file, so that its position is anybody's.
                frames = msgspec.msgpack.decode(os.pread(layout_fd, found, 0), type=list[bytes])
            return cls(arena, decode(MapBlocks, frames))
        except BaseException:
            arena.close()  # now: later the number of its descriptor may be another file's
            raise

    def check(self, rows: npt.NDArray[np.int64] | None, num_rows: int) -> None:
        """Raise ProtocolError for rows that are not there, or not so many."""
        if rows is None or rows.shape != (num_rows,):
            raise ProtocolError(f"which {num_rows} of the shared rows?")
        if np.min(rows) < 0 or np.max(rows) >= self._num_rows:
            raise ProtocolError(f"there are {self._num_rows} shared rows, and not all of {rows}")

    def rows(self, rows: Any) -> Nested:
        """Return a copy of some rows."""
        return map_tree(lambda leaf: leaf[rows], self._observations)

    def close(self) -> None:
        """Let go of the memory."""
        self._observations = None
        self._arena.close()


class Calls:
    """The requests of one worker that wait for actions.

    Args:
        end: Called with the answer to each request, or its failure, once; not for those that
            expire, nor for those of an asker that is gone.
    """

    def __init__(self, worker: str, config: BatchingConfig, end: End) -> None:
        self._worker = worker
        self._batcher: Batcher[_Call] = Batcher(config)
        self._end = end
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

    def add(
        self, asker: bytes, header: Header, request: ChooseActions, hosted: HostedPolicy
    ) -> None:
        """Let a request wait for a policy; it fails at once where too many rows do.

        Raises:
            ProtocolError: It is none that can be computed.
        """
        now = self._clock()
        key = (request.policy_id, request.explore, self._form_of(request))
        call = _Call(asker, header, request, hosted, now)
        deadline = now + header.ttl
        if self._batcher.add(call, key, request.num_rows, now=now, deadline=deadline):
            return
        hosted.counted["overloaded"] += 1
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
        self._batcher.drop(lambda call: call.asker == asker)

    def _unshare(self, asker: str) -> None:
        for name in [name for name in self._shared if name.startswith(f"{asker}:")]:
            self._shared.pop(name).close()

    def _form_of(self, request: ChooseActions) -> object:
        """Return what requests must have in common to go in one call."""
        if request.num_rows < 1:
            raise ProtocolError(f"a request has rows, not {request.num_rows}")
        states = form_of(request.states.value, request.num_rows, "states")
        if request.listed:
            listed = request.observations.value
            if not isinstance(listed, list) or len(listed) != request.num_rows:
                raise ProtocolError(f"observations are no list of {request.num_rows} rows")
            return "listed", states
        if not request.shared:
            return form_of(request.observations.value, request.num_rows, "observations"), states
        shared = self._shared.get(request.shared)
        if shared is None:
            raise ProtocolError(f"no rows were shared as {request.shared!r} with {self._worker}")
        shared.check(request.rows, request.num_rows)
        return shared.form, states

    # --- computing ---------------------------------------------------------------------------

    def compute(self, *, hurry: bool = False) -> None:
        """Compute one batch, if there is one that is due, or with `hurry` one at all."""
        batcher = self._batcher
        if not batcher.rows_waiting:
            return
        now = self._clock()
        for call in batcher.expire(now):
            call.hosted.counted["expired"] += 1
        batch = batcher.next_batch(math.inf if hurry else now)
        if batch is None:
            return
        self._compute(batch.pieces)
        batcher.observe(batch.key, self._clock() - now)

    def _compute(self, pieces: Sequence[Piece[_Call]]) -> None:
        first = pieces[0].request
        hosted = first.hosted
        rows = 0
        for piece in pieces:
            rows += piece.stop - piece.start
        try:
            answer, seconds = self._ask_policy(hosted, pieces, rows)
        except Exception as exc:  # the border: the policy is the user's
            if len(pieces) > 1:  # one of them may be to blame: each by itself
                for piece in pieces:
                    self._compute([piece])
                return
            if pieces[0].stop < first.request.num_rows:
                self._batcher.drop(lambda call: call is first)
            self._fail(first, exc)
            return
        crowded = self._batcher.rows_waiting > 0 or (
            len(pieces) > 1 and len({piece.request.asker for piece in pieces}) > 1
        )
        start = 0
        answered: list[_Call] = []
        for piece in pieces:
            stop = start + piece.stop - piece.start
            part = answer if len(pieces) == 1 else answer.select(slice(start, stop))
            if self._take(piece, part, crowded=crowded):
                answered.append(piece.request)
            start = stop
        # Counted when the answers are on their way: nobody waits for that.
        hosted.add_batch(rows, seconds)
        now = self._clock()
        for call in answered:
            hosted.add_request(call.request.num_rows, now - call.arrived)

    def _fail(self, call: _Call, error: Exception) -> None:
        call.hosted.counted["failures"] += 1
        self._end(call.asker, call.header, describe(error))

    def _ask_policy(
        self, hosted: HostedPolicy, pieces: Sequence[Piece[_Call]], rows: int
    ) -> tuple[PolicyAnswer, float]:
        """Return what the policy says, and the seconds that it took."""
        memory, policy = self._memory, hosted.policy
        observations = gather([self._observations(piece) for piece in pieces], memory)
        states = gather(
            [cut(piece.request.request.states.value, piece) for piece in pieces], memory
        )
        explore = pieces[0].request.request.explore
        begin = time.perf_counter()
        answer = ask(policy, observations, states, rows, explore=explore, listed=None)
        return answer.owned(), time.perf_counter() - begin

    def _observations(self, piece: Piece[_Call]) -> Nested:
        request = piece.request.request
        if not request.shared:
            return cut(request.observations.value, piece)
        shared = self._shared.get(request.shared)
        if shared is None:
            raise ProtocolError(f"{request.shared!r} is shared no more")
        assert request.rows is not None
        return shared.rows(request.rows[piece.start : piece.stop])

    def _take(self, piece: Piece[_Call], answer: PolicyAnswer, *, crowded: bool) -> bool:
        """A piece was computed; with its last one, return whether a call was answered."""
        call = piece.request
        if piece.stop < call.request.num_rows:
            call.answers.append(answer)
            return False
        if call.answers:
            try:
                answer = PolicyAnswer.join([*call.answers, answer])
            except Exception as exc:  # the border: what the policy returns differs by batch
                self._fail(call, exc)
                return False
        self._end(
            call.asker,
            call.header,
            ActionsChosen(
                actions=Tree(list(answer.actions) if answer.listed else answer.actions),
                listed=answer.listed,
                states=Tree(answer.states),
                extras=Tree(answer.extras),
                versions=answer.versions,
                version=answer.version,
                push=call.hosted.push,
                crowded=crowded,
            ),
        )
        return True


def cut(tree: Nested, piece: Piece[Any]) -> Nested:
    """Return the rows of a piece: of a batch, of a list of single observations, or None of None."""
    if tree is None:
        return None
    start, stop = piece.start, piece.stop
    if isinstance(tree, list | np.ndarray):
        return tree[start:stop]
    return map_tree(lambda leaf: leaf[start:stop], tree)


def gather(parts: Sequence[Nested], memory: RowMemory) -> Nested:
    """Return the rows of several parts as one, in memory that is nobody else's.

    Parts are batches of one form, or lists of single observations, or None.
    """
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, list):
        return as_rows([one for part in parts for one in part])

    if type(first) is np.ndarray:  # the usual case
        return _joined(parts, memory)
    return map_tree(lambda *leaves: _joined(leaves, memory), *parts)


def form_of(tree: Nested, rows: int, what: str) -> object:
    """Return what a batch must have in common with others to be one with them.

    Raises:
        ProtocolError: It is no batch of `rows` rows.
    """
    if tree is None:
        return None
    if isinstance(tree, np.ndarray):
        if tree.ndim and len(tree) == rows:
            return tree.shape[1:], tree.dtype
        raise ProtocolError(f"{what} have shape {tree.shape}, of {rows} rows")
    form = []
    for path, leaf in leaves_of(tree, what):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != rows:
            found = getattr(leaf, "shape", type(leaf).__name__)
            raise ProtocolError(f"{path} is {found}, no array of {rows} rows")
        form.append((path, leaf.shape[1:], leaf.dtype))
    return tuple(form)


def _joined(leaves: Sequence[npt.NDArray[Any]], memory: RowMemory) -> npt.NDArray[Any]:
    """Return the rows of several arrays as one that is nobody else's."""
    leaf = leaves[0]
    if len(leaves) == 1:
        if leaf.flags.writeable:  # what was decoded is not
            return leaf
        if leaf.nbytes < LARGE:  # the usual case, in a tenth of the time
            return np.array(leaf)
    rows = sum(map(len, leaves))
    return np.concatenate(leaves, out=memory.empty((rows, *leaf.shape[1:]), leaf.dtype))
