"""A policy worker's process: builds the policies, takes requests, has them computed, answers.

Policies come as factories, and weights later, over the inherited pipe, never over a socket. Leaves
out what becomes of requests (`policy_calls.py`) and who sends weights (`policy_processes.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import msgspec

from envbus.bus.complaints import Complaints
from envbus.bus.errors import ClosedError, EnvbusError, ProtocolError, TransportError
from envbus.bus.peer.session import HELLO_ID
from envbus.bus.peer.worker import IDLE_WAIT, describe
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe
from envbus.bus.supervision.liveness_probe import PROBE
from envbus.bus.transport.local_link import LocalLinkEnd
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.transport.spinning import CHILD_SPIN_SECONDS
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import PROTOCOL_VERSION, Failed, Header, Hello, Kind, Payload, Tree
from envbus.runner.inference.policy_batching import BatchingConfig
from envbus.runner.inference.policy_calls import Calls, HostedPolicy, SharedRows
from envbus.runner.inference.policy_protocol import (
    Behind,
    ChooseActions,
    DescribePolicy,
    GetPolicyStatistics,
    OpenLocalLink,
    PolicyDescribed,
    PolicyWorkerCounts,
    ShareRows,
    service_of,
)
from envbus.runner.inference.worker_discovery import Handover, HandoverSocket, close_all
from envbus.runner.policies.policy import Policy, check_has_no_inputs, imported, parameters_of
from envbus.runner.policies.policy_map import PolicyMap

__all__ = [
    "ENTRY",
    "HostedPolicies",
    "PolicyBootstrap",
    "PolicyWorker",
    "PushedWeights",
    "WorkerReport",
    "main",
    "read_report",
]

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REQUEST: Final = Kind.REQUEST
_REPLY: Final = Kind.REPLY

logger = logging.getLogger("envbus.runner.inference.policy_workers")

#: Messages taken between two batches, so that a flood does not keep the first one waiting.
_MAX_DRAINED: Final = 1000
#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"


class PushedWeights(NamedTuple):
    """Weights on their way to a worker, over its pipe."""

    policy_id: str
    #: Counts the pushes of this policy, from 1.
    push: int
    version: int
    weights: Any


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker to its owner: up, not come up, has looked at weights, or just alive."""

    up: bool = False
    #: Why it did not come up, or did not take over the weights; for people.
    problem: str = ""
    policy_id: str = ""
    push: int = 0


class HostedPolicies:
    """The policies of one worker.

    Args:
        pipe: To the process that owns the worker: weights come there, each a pickled
            `PushedWeights`, questions for a sign of life (`PROBE`), which
            is a report of nothing, and at the end an empty message.

    Attributes:
        is_over: Whether the owner said to leave, or is gone.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        pipe: Pipe,
        report: Callable[[WorkerReport], None],
    ) -> None:
        self.is_over = False
        self._policies = policies
        self._pipe = pipe
        self._report = report

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __getitem__(self, policy_id: str) -> HostedPolicy:
        """Return a policy.

        Raises:
            ProtocolError: It is not here.
        """
        try:
            return self._policies[policy_id]
        except KeyError:
            known = ", ".join(self._policies)
            raise ProtocolError(f"no policy {policy_id!r} is here; there are: {known}") from None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_weights` is worth a call."""
        return self._pipe.fileno()

    def take_weights(self) -> None:
        """Take over the weights that have come; of each policy the latest.

        Raises:
            SystemExit: Some were lost: no memory or descriptor is left for them, for example.
        """
        pushes = self._received()
        latest = {pushed.policy_id: pushed for pushed in pushes}
        problems: dict[str, str] = {}
        for policy_id, pushed in latest.items():
            problems[policy_id] = _take_over(self._policies[policy_id], pushed)
        for pushed in pushes:
            with contextlib.suppress(EnvbusError):
                problem = problems[pushed.policy_id]
                self._report(
                    WorkerReport(policy_id=pushed.policy_id, push=pushed.push, problem=problem)
                )

    def _received(self) -> list[PushedWeights]:
        """Return the weights that have come, after an answer to each other thing that has."""
        pushes: list[PushedWeights] = []
        try:
            while self._pipe.has(self._pipe.next_expected):
                data = self._pipe.receive(0.0)
                if not data:  # nothing more will come
                    self.is_over = True
                    break
                if data == PROBE:
                    with contextlib.suppress(EnvbusError):
                        self._report(WorkerReport())
                    continue
                pushes.append(PushedWeights(*pickle.loads(data)))  # noqa: S301 (our own pipe)
        except ClosedError:  # its owner is gone: so will it be at once
            self.is_over = True
        except Exception as exc:  # they are lost: the next life of this worker is given them
            raise SystemExit(f"weights that were pushed cannot be taken in: {exc!r}") from exc
        return pushes


class PolicyWorker:
    """Answers requests of any number of askers; each has a local link to it.

    Args:
        spin: Whether there is a core to spare for short waits.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        policies: HostedPolicies,
        config: BatchingConfig,
        handover_socket: HandoverSocket,
        *,
        spin: bool,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._policies = policies
        self._handover = handover_socket
        self._router = LocalRouter(spin=spin, spin_seconds=CHILD_SPIN_SECONDS)
        self._router.watch(handover_socket.fileno())
        self._router.watch(policies.fileno())
        self._calls = Calls(name, config, self._end)
        self._complaints = Complaints(logger)

    def run(self) -> None:
        """Serve until the owner says to leave; what waits then is still answered."""
        try:
            while not self._policies.is_over or self._calls.rows_waiting:
                leaving = self._policies.is_over
                self._router.wait(0.0 if leaving else min(self._calls.patience(), IDLE_WAIT))
                self._take_messages()
                # What came before the requests that were taken was found with them.
                if self._router.take_beside():
                    self._look_beside()
                self._calls.compute(hurry=self._policies.is_over)
        finally:
            self._handover.close()
            self._router.close()

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
                self._complaints.add("message", f"{self._name} dropped a message: {exc}")
                continue
            if header.kind is _REQUEST:
                try:
                    self._take_request(asker, header, frames[1:])
                except Exception as exc:  # the border: what is asked fails its request only
                    self._end(asker, header, describe(exc))
        for asker in self._router.hung_up():
            self._forget(asker)

    def _take_request(self, asker: bytes, header: Header, frames: Frames) -> None:
        name = header.payload_type
        if name == ChooseActions.__name__:
            self._take_call(asker, header, decode(ChooseActions, frames))
        elif name == DescribePolicy.__name__:
            self._look_beside()  # weights that were pushed before it was asked are those it tells
            self._end(asker, header, self._described(decode(DescribePolicy, frames)))
        elif name == GetPolicyStatistics.__name__:
            self._end(asker, header, self._statistics())
        else:
            raise ProtocolError(f"{self._name} does not answer {name}")

    def _take_call(self, asker: bytes, header: Header, request: ChooseActions) -> None:
        hosted = self._policies[request.policy_id]
        is_behind = request.min_push > hosted.push
        if is_behind or (request.shared and not self._calls.has_shared(request.shared)):
            self._look_beside()
            if request.min_push > hosted.push:
                hosted.counted["behind"] += 1
                self._end(asker, header, Behind(worker=self._name, push=hosted.push))
                return
        self._calls.add(asker, header, request, hosted)

    def _described(self, request: DescribePolicy) -> PolicyDescribed | Behind:
        hosted = self._policies[request.policy_id]
        if request.min_push > hosted.seen_push:
            return Behind(worker=self._name, push=hosted.seen_push)
        policy = hosted.policy
        return PolicyDescribed(
            initial_state=Tree(policy.initial_state()),
            weights=Tree(dict(policy.get_weights()) if request.with_weights else {}),
            version=policy.policy_version,
            push=hosted.push,
        )

    def _statistics(self) -> PolicyWorkerCounts:
        return PolicyWorkerCounts(
            policies={name: self._policies[name].counts() for name in self._policies},
            rows_waiting=self._calls.rows_waiting,
        )

    # --- beside the requests -----------------------------------------------------------------

    def _look_beside(self) -> None:
        """Take over weights, and what was handed over."""
        self._policies.take_weights()
        for handover in self._handover.receive():
            try:
                self._take_over(handover)
            except Exception as exc:  # the border: another process' mistake
                text = f"{self._name} could not do what it was asked at its handover socket: {exc}"
                self._complaints.add("handover", text, exc)
                close_all(handover.fds)
                if isinstance(handover.notice, ShareRows):  # its asker hands everything over anew
                    self._forget(handover.notice.name.partition(":")[0].encode())

    def _take_over(self, handover: Handover) -> None:
        notice, fds = handover
        if isinstance(notice, OpenLocalLink):
            (local_link,) = fds
            asker = notice.identity
            self._router.drop_local_link(asker)
            self._router.add_local_link(asker, LocalLinkEnd.from_fd(local_link))
            hello = Hello(
                name=notice.name,
                services=[service_of(policy_id) for policy_id in self._policies],
                capacity=notice.capacity,
                pid=os.getpid(),
            )
            # Its welcome is not waited for: the asker may be away.
            self._send(asker, HELLO_ID, hello, ttl=IDLE_WAIT)
        elif isinstance(notice, ShareRows):
            arena, layout = fds
            self._calls.share(notice.name, SharedRows.attach(arena, notice.size, layout))

    def _forget(self, asker: bytes) -> None:
        """An asker is gone."""
        self._router.drop_local_link(asker)
        self._calls.forget(asker)

    # --- answering ---------------------------------------------------------------------------

    def _end(self, asker: bytes, header: Header, answer: Payload) -> None:
        """Answer a request, with a reply or a failure."""
        try:
            self._send(asker, header.request_id, answer)
        except ProtocolError as exc:  # what the policy returned cannot be encoded
            self._send(asker, header.request_id, describe(exc))

    def _send(self, asker: bytes, request_id: int, payload: Payload, ttl: float = 0.0) -> None:
        kind = _REPLY
        if type(payload) is Failed:
            kind = Kind.FAILURE
        elif type(payload) is Hello:
            kind = _REQUEST
        frames = encode(payload)
        header = Header(
            PROTOCOL_VERSION, kind, request_id, type(payload).__name__, ttl, self._incarnation
        )
        try:
            self._router.send(asker, [encode_header(header), *frames])
        except TransportError as exc:  # it is gone, or does not read: its request times out there
            self._complaints.add("answer", f"{self._name} could not answer: {exc}")


class PolicyBootstrap(NamedTuple):
    """All that a worker must know; it is pickled."""

    name: str
    worker_index: int
    incarnation: int
    handover_socket: str
    spin: bool
    batching: BatchingConfig
    #: By policy id, each pickled by cloudpickle.
    factories: Mapping[str, bytes]
    #: Each a pickled `PushedWeights`, the latest first; a policy has the first that it takes over.
    weights: list[bytes]


def main(pipe: Pipe) -> None:
    """Serve until the owner at the other end of `pipe` says to leave."""
    data = pipe.receive(HANDOVER_TIMEOUT)
    bootstrap = PolicyBootstrap(*pickle.loads(data))  # noqa: S301 (our own pipe)
    try:
        policies = _build(bootstrap)
    except Exception as exc:  # the border: factories are the user's
        failed = describe(exc)
        _report(pipe, WorkerReport(problem=f"{failed.remote_traceback}"))
        raise SystemExit(1) from exc
    handover_socket = HandoverSocket(Path(bootstrap.handover_socket))
    hosted_policies = HostedPolicies(policies, pipe, lambda report: _report(pipe, report))
    worker = PolicyWorker(
        bootstrap.name,
        bootstrap.incarnation,
        hosted_policies,
        bootstrap.batching,
        handover_socket,
        spin=bootstrap.spin,
    )
    _report(pipe, WorkerReport(up=True))
    try:
        worker.run()
    finally:
        for hosted in policies.values():
            close = getattr(hosted.policy, "close", None)
            if close is not None:
                close()


def read_report(data: bytes) -> WorkerReport:
    """Return what a worker has reported."""
    return msgspec.msgpack.decode(data, type=WorkerReport)


def _report(pipe: Pipe, report: WorkerReport) -> None:
    with contextlib.suppress(EnvbusError):  # the owner is gone, as this process is soon
        pipe.send(msgspec.msgpack.encode(report))


def _build(bootstrap: PolicyBootstrap) -> dict[str, HostedPolicy]:
    policies: dict[str, HostedPolicy] = {}
    for policy_id, pickled in bootstrap.factories.items():
        factory = cloudpickle.loads(pickled)
        policies[policy_id] = HostedPolicy(_made_by(factory, policy_id, bootstrap.worker_index))
    for pickled in bootstrap.weights:
        pushed = PushedWeights(*pickle.loads(pickled))  # noqa: S301 (our own pipe)
        hosted = policies[pushed.policy_id]
        if not hosted.push:
            _take_over(hosted, pushed)
    return policies


def _take_over(hosted: HostedPolicy, pushed: PushedWeights) -> str:
    """Have a policy take weights over, or go on with its own; return why it does that."""
    hosted.seen_push = max(hosted.seen_push, pushed.push)
    try:
        hosted.policy.set_weights(pushed.weights, pushed.version)
    except Exception as exc:  # the border: the policy is the user's
        logger.exception("the weights of %r were not taken over", pushed.policy_id)
        return f"{type(exc).__name__}: {exc}"
    hosted.push = pushed.push
    return ""


def _made_by(factory: Any, policy_id: str, index: int) -> Policy:
    made = imported(factory, "module:factory") if isinstance(factory, str) else factory
    if isinstance(made, type) or not hasattr(made, "compute_actions"):
        # A factory is called with the worker's number if it takes an argument.
        made = made(index) if parameters_of(made)[1] else made()
    policy = PolicyMap({policy_id: made})[policy_id]
    check_has_no_inputs(policy_id, policy, "a policy worker")
    return policy
