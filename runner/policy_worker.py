"""A policy worker's loop: takes requests, has them computed, answers; lets askers in.

Leaves out what becomes of requests (`policy_calls.py`), where weights come from
(`policy_weights.py`) and how the process came up (`policy_host.py`).
"""

from __future__ import annotations

import logging
import os
from typing import Final

from envbus.bus.codec import decode, decode_header, encode, encode_header
from envbus.bus.complaints import Complaints
from envbus.bus.errors import ProtocolError, TransportError
from envbus.bus.lane import LaneEnd
from envbus.bus.lane_router import LaneRouter
from envbus.bus.messages import PROTOCOL_VERSION, Failed, Header, Hello, Kind, Payload, Tree
from envbus.bus.serve import HELLO_ID, describe
from envbus.bus.spinning import CHILD_SPIN_SECONDS
from envbus.bus.transport import Frames
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_calls import Calls
from envbus.runner.policy_door import Door, Knock, close_all
from envbus.runner.policy_protocol import (
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
from envbus.runner.policy_rows import SharedRows
from envbus.runner.policy_weights import HostedPolicies

__all__ = ["PolicyWorker"]

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REQUEST: Final = Kind.REQUEST
_REPLY: Final = Kind.REPLY

logger = logging.getLogger("envbus.runner.policy_workers")

#: Seconds between looks at whether there is anything left to do.
_IDLE_WAIT: Final = 1.0
#: Messages taken between two batches, so that a flood does not keep the first one waiting.
_MAX_DRAINED: Final = 1000


class PolicyWorker:
    """Answers requests of any number of askers; each has a lane to it.

    Args:
        name: Of this worker.
        incarnation: Which life of it this is.
        policies: And their weights.
        config: How requests are gathered.
        door: Where askers come.
        spin: Whether there is a core to spare for short waits.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        policies: HostedPolicies,
        config: BatchingConfig,
        door: Door,
        *,
        spin: bool,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._policies = policies
        self._door = door
        self._router = LaneRouter(spin=spin, spin_seconds=CHILD_SPIN_SECONDS)
        self._router.watch(door.fileno())
        self._router.watch(policies.fileno())
        self._calls = Calls(name, config, self._end)
        self._askers: set[bytes] = set()
        self._complaints = Complaints(logger)

    def run(self) -> None:
        """Serve until the owner says to leave; what waits then is still answered."""
        try:
            while not self._policies.is_over or self._calls.rows_waiting:
                leaving = self._policies.is_over
                self._router.wait(0.0 if leaving else min(self._calls.patience(), _IDLE_WAIT))
                self._take_messages()
                # What came before the requests that were taken was found with them.
                if self._router.take_beside():
                    self._look_beside()
                self._calls.compute(hurry=self._policies.is_over)
        finally:
            self._door.close()
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
            self._end(asker, header, self._describe(decode(DescribePolicy, frames)))
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
                hosted.counting.behind += 1
                self._end(asker, header, Behind(worker=self._name, push=hosted.push))
                return
        self._calls.add(asker, header, request, hosted)

    def _describe(self, request: DescribePolicy) -> PolicyDescribed:
        hosted = self._policies[request.policy_id]
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
            askers=len(self._askers),
        )

    # --- beside the requests -----------------------------------------------------------------

    def _look_beside(self) -> None:
        """Take over weights, and let in who knocks."""
        self._policies.take_weights()
        for notice, fds in self._door.knocks():
            try:
                self._let_in(Knock(notice, fds))
            except Exception as exc:  # the border: another process' mistake
                text = f"{self._name} could not do what it was asked at its door: {exc}"
                self._complaints.add("knock", text, exc)
                close_all(fds)

    def _let_in(self, knock: Knock) -> None:
        notice, fds = knock
        if isinstance(notice, OpenLane):
            (lane,) = fds
            asker = notice.identity
            self._router.drop_lane(asker)
            self._router.add_lane(asker, LaneEnd.from_fd(lane))
            self._askers.add(asker)
            hello = Hello(
                name=notice.name,
                services=[service_of(policy_id) for policy_id in self._policies],
                capacity=notice.capacity,
                pid=os.getpid(),
            )
            # Its welcome is not waited for: the asker may be away.
            self._send(asker, HELLO_ID, hello, ttl=_IDLE_WAIT)
        elif isinstance(notice, ShareRows):
            arena, layout = fds
            self._calls.share(notice.name, SharedRows.attach(arena, notice.size, layout))

    def _forget(self, asker: bytes) -> None:
        """An asker is gone."""
        self._router.drop_lane(asker)
        self._askers.discard(asker)
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
