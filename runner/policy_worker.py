"""A policy worker's loop: takes requests, computes them in batches, answers.

Leaves out when a batch goes (`policy_batching.py`), how rows are put together (`policy_rows.py`)
and how the process came up (`policy_host.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from envbus.bus.codec import decode, decode_header, encode, encode_header
from envbus.bus.errors import ClosedError, EnvbusError, ProtocolError, TransportError
from envbus.bus.lane import LaneEnd, LaneRouter
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Payload,
    Tree,
)
from envbus.bus.pipe import Pipe
from envbus.bus.serve import HELLO_ID, describe
from envbus.bus.spinning import CHILD_SPIN_SECONDS
from envbus.bus.transport import Frames
from envbus.runner.nested import Tree as Nested
from envbus.runner.policies import Policy
from envbus.runner.policy_batching import Batch, Batcher, BatchingConfig, Piece
from envbus.runner.policy_counts import Counting
from envbus.runner.policy_door import Door, Knock, close_all
from envbus.runner.policy_protocol import (
    ActionsChosen,
    Behind,
    ChooseActions,
    DescribePolicy,
    GetPolicyStatistics,
    OpenLane,
    PolicyDescribed,
    PolicyWorkerCounts,
    ShareRows,
    service_of,
)
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

__all__ = ["PROBE", "HostedPolicy", "PolicyWorker", "Pushed"]

logger = logging.getLogger("envbus.runner.policy_workers")

#: Over the pipe, in the place of weights: asks for a sign of life, which is a report of nothing.
PROBE: Final = b"?"
#: Seconds between looks at whether there is anything left to do.
_IDLE_WAIT: Final = 1.0
#: Messages taken between two batches, so that a flood does not keep the first one waiting.
_MAX_DRAINED: Final = 1000


class Pushed(NamedTuple):
    """Weights on their way to a worker, over its pipe."""

    policy_id: str
    #: Counts the pushes of this policy, from 1.
    push: int
    version: int
    weights: Any


class HostedPolicy:
    """A policy, and how new its weights are."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.push = 0
        self.counting = Counting()


class _Call:
    """A request that waits for its answer."""

    def __init__(
        self, asker: bytes, header: Header, request: ChooseActions, arrived: float
    ) -> None:
        self.asker = asker
        self.header = header
        self.request = request
        self.arrived = arrived
        self.answers: list[Answer] = []
        self.failed = False


class PolicyWorker:
    """Answers requests of any number of askers; each has a lane to it.

    Args:
        name: Of this worker.
        incarnation: Which life of it this is.
        policies: By id.
        config: How requests are gathered.
        door: Where askers come.
        pipe: To the process that owns the worker: weights come there, each a pickled `Pushed`,
            questions for a sign of life (`PROBE`), and at the end an empty parcel.
        next_parcel: Number of the next parcel on it.
        report: Tells that process, after weights were taken over, or not: policy id, push, and
            what was raised; nothing of these to say that this lives.
        spin: Whether there is a core to spare for short waits.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        policies: Mapping[str, HostedPolicy],
        config: BatchingConfig,
        door: Door,
        pipe: Pipe,
        next_parcel: int,
        report: Callable[[str, int, str], None],
        *,
        spin: bool,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._policies = policies
        self._batcher = Batcher(config)
        self._door = door
        self._pipe = pipe
        self._next_parcel = next_parcel
        self._report = report
        self._router = LaneRouter(spin=spin, spin_seconds=CHILD_SPIN_SECONDS)
        self._router.watch(door.fileno())
        self._router.watch(pipe.fileno())
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._shared: dict[str, SharedRows] = {}
        self._memory = RowMemory()
        self._askers: set[bytes] = set()
        self._stopping = False
        self._clock = time.monotonic

    def run(self) -> None:
        """Serve until the owner says to leave; what waits then is still answered."""
        try:
            while not self._stopping or self._batcher.rows_waiting:
                self._router.wait(self._patience())
                self._take_messages()
                # What came before the requests that were taken was found with them.
                if self._router.take_beside():
                    self._look_beside()
                now = self._clock()
                self._expire(now)
                batch = self._batcher.next_batch(math.inf if self._stopping else now)
                if batch is not None:
                    self._compute(batch, now)
        finally:
            self._door.close()
            self._router.close()

    def _patience(self) -> float:
        if self._stopping:
            return 0.0
        wake_at = self._batcher.wake_at()
        if wake_at is None:
            return _IDLE_WAIT
        return min(max(wake_at - self._clock(), 0.0), _IDLE_WAIT)

    # --- what comes --------------------------------------------------------------------------

    def _take_messages(self) -> None:
        for _ in range(_MAX_DRAINED):
            message = self._router.receive()
            if message is None:
                break
            asker, frames = message
            try:
                header = decode_header(frames[0])
            except (ProtocolError, IndexError) as exc:
                logger.warning("%s dropped a message: %s", self._name, exc)
                continue
            if header.kind is Kind.REQUEST:
                try:
                    self._take_request(asker, header, frames[1:])
                except Exception as exc:  # the border: what is asked fails its request only
                    self._fail(asker, header, describe(exc))
        for asker in self._router.hung_up():
            self._forget(asker)

    def _take_request(self, asker: bytes, header: Header, frames: Frames) -> None:
        name = header.payload_type
        if name == ChooseActions.__name__:
            self._take_call(asker, header, decode(ChooseActions, frames))
        elif name == DescribePolicy.__name__:
            self._send_reply(asker, header, self._describe(decode(DescribePolicy, frames)))
        elif name == GetPolicyStatistics.__name__:
            self._send_reply(asker, header, self._statistics())
        else:
            raise ProtocolError(f"{self._name} does not answer {name}")

    def _take_call(self, asker: bytes, header: Header, request: ChooseActions) -> None:
        hosted = self._hosted(request.policy_id)
        if request.min_push > hosted.push:
            self._look_beside()
            if request.min_push > hosted.push:
                hosted.counting.behind += 1
                self._send_reply(asker, header, Behind(worker=self._name, push=hosted.push))
                return
        now = self._clock()
        key = (request.policy_id, request.explore, self._form_of(request))
        number = next(self._numbers)
        call = _Call(asker, header, request, now)
        if not self._batcher.add(number, key, request.num_rows, now=now, deadline=now + header.ttl):
            hosted.counting.overloaded += 1
            text = (
                f"{self._batcher.rows_waiting} rows wait in {self._name} and max_rows_waiting does "
                f"not allow {request.num_rows} more; add workers, or ask less"
            )
            self._fail(asker, header, Failed(code=FailureCode.OVERLOADED, message=text))
            return
        self._calls[number] = call

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
            self._look_beside()
            shared = self._shared.get(request.shared)
        if shared is None:
            raise ProtocolError(f"no rows were shared as {request.shared!r} with {self._name}")
        shared.check(request.rows)
        return shared.form, states

    def _hosted(self, policy_id: str) -> HostedPolicy:
        try:
            return self._policies[policy_id]
        except KeyError:
            known = ", ".join(self._policies)
            raise ProtocolError(f"no policy {policy_id!r} is here; there are: {known}") from None

    def _describe(self, request: DescribePolicy) -> PolicyDescribed:
        hosted = self._hosted(request.policy_id)
        policy = hosted.policy
        return PolicyDescribed(
            initial_state=Tree(policy.initial_state()),
            weights=Tree(dict(policy.get_weights()) if request.with_weights else {}),
            version=policy.policy_version,
            push=hosted.push,
        )

    def _statistics(self) -> PolicyWorkerCounts:
        return PolicyWorkerCounts(
            policies={
                name: hosted.counting.counts(hosted.policy.policy_version, hosted.push)
                for name, hosted in self._policies.items()
            },
            rows_waiting=self._batcher.rows_waiting,
            askers=len(self._askers),
        )

    # --- beside the requests -----------------------------------------------------------------

    def _look_beside(self) -> None:
        """Take over weights, and let in who knocks."""
        self._take_weights()
        for notice, fds in self._door.knocks():
            try:
                self._let_in(Knock(notice, fds))
            except Exception:  # the border: another process' mistake
                logger.exception("%s could not do what it was asked at its door", self._name)
                close_all(fds)

    def _take_weights(self) -> None:
        """Take over the weights that have come; of each policy the latest."""
        latest: dict[str, Pushed] = {}
        pushes: list[Pushed] = []
        try:
            self._pipe.drain()
            while True:
                data = self._pipe.receive_bytes(self._next_parcel, 0.0)
                self._next_parcel += 1
                if not data:  # nothing more will come
                    self._stopping = True
                    break
                if data == PROBE:
                    with contextlib.suppress(EnvbusError):
                        self._report("", 0, "")
                    continue
                pushed = Pushed(*pickle.loads(data))  # noqa: S301 (our own pipe)
                pushes.append(pushed)
                latest[pushed.policy_id] = pushed
        except ClosedError:  # its owner is gone: so will it be at once
            self._stopping = True
        except TransportError:
            pass  # the next one did not come yet
        problems: dict[str, str] = {}
        for policy_id, pushed in latest.items():
            hosted = self._policies[policy_id]
            try:
                hosted.policy.set_weights(pushed.weights, pushed.version)
            except Exception as exc:  # the border: the policy is the user's
                logger.exception("%s did not take over the weights of %r", self._name, policy_id)
                problems[policy_id] = f"{type(exc).__name__}: {exc}"
            else:
                hosted.push = pushed.push
        for pushed in pushes:
            with contextlib.suppress(EnvbusError):
                self._report(pushed.policy_id, pushed.push, problems.get(pushed.policy_id, ""))

    def _let_in(self, knock: Knock) -> None:
        notice, fds = knock
        if isinstance(notice, OpenLane):
            packets, parcels = fds
            asker = notice.identity
            self._router.drop_lane(asker)
            self._router.add_lane(asker, LaneEnd.from_fds((packets, parcels)))
            self._askers.add(asker)
            hello = Hello(
                name=notice.name,
                services=[service_of(policy_id) for policy_id in self._policies],
                capacity=notice.capacity,
                pid=os.getpid(),
            )
            # Its welcome is not waited for: the asker may be away.
            self._send(asker, Kind.REQUEST, HELLO_ID, hello, ttl=_IDLE_WAIT)
        elif isinstance(notice, ShareRows):
            arena, layout = fds
            shared = SharedRows.attach(arena, notice.size, layout)
            self._unshare(notice.name.partition(":")[0])
            self._shared[notice.name] = shared

    def _forget(self, asker: bytes) -> None:
        """An asker is gone: nobody waits for its answers."""
        self._router.drop_lane(asker)
        self._askers.discard(asker)
        self._unshare(asker.decode(errors="replace"))
        for call in self._calls.values():
            if call.asker == asker:
                call.failed = True

    def _unshare(self, asker: str) -> None:
        for name in [name for name in self._shared if name.startswith(f"{asker}:")]:
            self._shared.pop(name).close()

    # --- computing ---------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for number in self._batcher.expire(now):
            call = self._calls.pop(number)
            self._policies[call.request.policy_id].counting.expired += 1

    def _compute(self, batch: Batch, now: float) -> None:
        pieces = [piece for piece in batch.pieces if not self._calls[piece.request].failed]
        if len(pieces) < len(batch.pieces):
            self._drop(batch.pieces)
        if pieces:
            first = self._calls[pieces[0].request].request
            hosted = self._policies[first.policy_id]
            self._compute_pieces(hosted, pieces, explore=first.explore)
            self._batcher.observe(batch.key, self._clock() - now)

    def _compute_pieces(self, hosted: HostedPolicy, pieces: list[Piece], *, explore: bool) -> None:
        try:
            answer = self._ask_policy(hosted, pieces, explore=explore)
        except Exception as exc:  # the border: the policy is the user's
            if len(pieces) > 1:  # one of them may be to blame: each by itself
                for piece in pieces:
                    self._compute_pieces(hosted, [piece], explore=explore)
                return
            call = self._calls[pieces[0].request]
            call.failed = True
            hosted.counting.failures += 1
            self._fail(call.asker, call.header, describe(exc))
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

    def _ask_policy(self, hosted: HostedPolicy, pieces: list[Piece], *, explore: bool) -> Answer:
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
        self._send_reply(
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

    # --- answering ---------------------------------------------------------------------------

    def _send_reply(self, asker: bytes, header: Header, reply: Payload) -> None:
        try:
            self._send(asker, Kind.REPLY, header.request_id, reply)
        except ProtocolError as exc:  # what the policy returned cannot be encoded
            self._fail(asker, header, describe(exc))

    def _fail(self, asker: bytes, header: Header, failed: Failed) -> None:
        self._send(asker, Kind.FAILURE, header.request_id, failed)

    def _send(
        self, asker: bytes, kind: Kind, request_id: int, payload: Payload, ttl: float = 0.0
    ) -> None:
        frames = encode(payload)
        header = Header(
            PROTOCOL_VERSION, kind, request_id, type(payload).__name__, ttl, self._incarnation
        )
        try:
            self._router.send(asker, [encode_header(header), *frames])
        except TransportError as exc:  # it is gone, or does not read: its request times out there
            logger.warning("%s could not answer: %s", self._name, exc)
