"""A policy that is somewhere else: what `PolicyWorkers` gives to runners, in any local process.

Leaves out how requests travel (`policy_connections.py`) and the workers themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.bus.errors import ConfigError, RequestTimeoutError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import without_interrupts
from envbus.bus.wire.messages import Reply, Tree
from envbus.runner.batches.nested import Tree as Nested
from envbus.runner.batches.nested import leaves_of
from envbus.runner.inference.policy_connections import Asking, PolicyConnections
from envbus.runner.inference.policy_protocol import (
    ActionsChosen,
    Behind,
    ChooseActions,
    DescribePolicy,
    PolicyDescribed,
    service_of,
)
from envbus.runner.policies.policy import PolicyOutput, Ticket, TwoStepPolicy, Weights, count_rows

__all__ = ["SHARE_FROM", "PolicyHandle", "RemotePolicy"]

#: Bytes of observations from which a request names rows that workers read where envs wrote them.
#: Below, the numbers of the rows and looking them up cost more than copies of the rows do: a round
#: trip takes 6 us longer at 1 kB, as long at 8 to 16 kB, and 60 us less from 32 kB on.
SHARE_FROM: Final = 12 * 1024
#: Seconds to wait when all workers have weights that are too old.
_BEHIND_PAUSE: Final = 0.01
R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyHandle:
    """Where policy workers are; may be pickled and used in any process of this user and host."""

    directory: str
    policy_ids: tuple[str, ...]
    #: Seconds that a request may take, its time in queues included.
    timeout: float
    #: Requests that one asker may have in flight.
    max_in_flight: int
    #: By how many pushes of weights an answer may be older than the latest push that its asker
    #: knows of; None: by any number.
    max_version_lag: int | None
    #: Bytes of a request's observations from which they are read in a pool's shared memory.
    share_from: int = SHARE_FROM

    def policy(self, policy_id: str | None = None) -> RemotePolicy:
        """Return one of the policies; None: the only one. It is used by one thread.

        Raises:
            ConfigError: There is no such policy.
        """
        return RemotePolicy(self, self.checked_id(policy_id))

    def checked_id(self, policy_id: str | None) -> str:
        """Return the id of one of the policies; None: of the only one. Raises as `policy`."""
        if policy_id is None:
            if len(self.policy_ids) != 1:
                raise ConfigError(f"which policy? There are {', '.join(self.policy_ids)}")
            return self.policy_ids[0]
        if policy_id not in self.policy_ids:
            raise ConfigError(f"no policy {policy_id!r}; there are {', '.join(self.policy_ids)}")
        return policy_id


class _PolicyTicket(msgspec.Struct, eq=False):
    """A request under way that a worker with too old weights passes on."""

    asking: Asking
    #: 0 of one that is not for actions.
    rows: int
    min_push: int
    #: Workers that have too old weights.
    passed_over: list[str] = msgspec.field(default_factory=list)
    #: What the last one of them said.
    behind: Behind | None = None


#: Changes the weights: policy id, weights, version -> number of the push, version.
Push = Callable[[str, Weights, "int | None"], "tuple[int, int]"]


class RemotePolicy(TwoStepPolicy):
    """Chooses actions in a policy worker. The state of rows stays with who asks.

    Used by one thread. In another process it begins anew: pickled, it takes along where the workers
    are and nothing else.

    Args:
        push: Changes the weights, where that is possible.

    Attributes:
        policy_id: Which policy this is.
        policy_version: The latest that is known here. The rows of an answer say which weights
            chose them (`PolicyOutput.versions`).
        can_set_weights: Whether this is the process that has the workers.
    """

    def __init__(self, handle: PolicyHandle, policy_id: str, push: Push | None = None) -> None:
        self.policy_version = 0
        self.policy_id = policy_id
        self.can_set_weights = push is not None
        self._handle = handle
        self._share_from = handle.share_from
        self._service = service_of(policy_id)
        self._push = push
        self._connections: PolicyConnections | None = None
        self._newest_push = 0
        self._described: PolicyDescribed | None = None
        #: What requests call the observations of a pool that is shared.
        self._shared = ""
        self._pool: weakref.ref[Any] | None = None
        disown_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePolicy, (self._handle, self.policy_id)

    def __repr__(self) -> str:
        return f"<RemotePolicy {self.policy_id} version={self.policy_version}>"

    # --- actions -----------------------------------------------------------------------------

    def compute_actions(
        self, observations: Nested, states: Nested, *, explore: bool = True
    ) -> PolicyOutput:
        """Return an action per row; raises as `collect_actions` does."""
        ticket = self.submit_actions(observations, states, explore=explore)
        try:
            return self.collect_actions(ticket)
        except BaseException:  # Ctrl-C: nobody will collect it
            self.discard_actions(ticket)
            raise

    def submit_actions(
        self,
        observations: Nested,
        states: Nested,
        *,
        explore: bool = True,
        env_ids: npt.NDArray[np.int64] | None = None,
    ) -> Ticket:
        """Send a request to the least-loaded worker.

        Raises:
            OverloadedError: `max_in_flight` requests are under way. Nothing was sent.
            EncodeError: The observations cannot be sent.
            ClosedError: The workers were closed.
        """
        rows = count_rows(observations)
        lag = self._handle.max_version_lag
        min_push = 0 if lag is None else max(self._newest_push - lag, 0)
        shared = ""
        if env_ids is not None and self._shared and _bytes_of(observations) >= self._share_from:
            shared = self._shared
        listed = (
            not shared and isinstance(observations, np.ndarray) and observations.dtype.hasobject
        )
        asked: Nested = None if shared else list(observations) if listed else observations
        request = ChooseActions(
            policy_id=self.policy_id,
            num_rows=rows,
            explore=explore,
            observations=Tree(asked),
            listed=listed,
            states=Tree(states),
            shared=shared,
            rows=env_ids if shared else None,
            min_push=min_push,
        )
        connections = self._connections or self._connected()
        asking = connections.ask(self._service, request, self._handle.timeout)
        return _PolicyTicket(asking, rows, min_push)

    def collect_actions(self, ticket: Ticket) -> PolicyOutput:
        """Wait for the answer; ask another worker where one was lost or has too old weights.

        Raises:
            RemoteError: The policy raised; with type, text and traceback.
            RequestTimeoutError: There was no answer in time, or none that is new enough.
            PeerLostError: Several workers ended while they had this request.
            OverloadedError: Too many rows wait in the worker.
            TransportError: There was no memory or descriptor left to send the request.
            RestartLimitError: No worker is left; says why.
            ClosedError: The workers were closed, or their owner has ended.
        """
        assert isinstance(ticket, _PolicyTicket)
        connections = self._connections or self._connected()
        reply = self._answer(connections, ticket, ActionsChosen)
        if reply.push >= self._newest_push:
            self._newest_push, self.policy_version = reply.push, reply.version
        if reply.crowded:
            connections.discovery.change_sticky()
        versions = reply.versions
        if versions is None:
            versions = np.full(ticket.rows, reply.version, np.int64)
        return PolicyOutput(reply.actions.value, reply.states.value, reply.extras.value, versions)

    def discard_actions(self, ticket: Ticket) -> None:
        """Forget a ticket; the answer will be dropped."""
        assert isinstance(ticket, _PolicyTicket)
        if self._connections is not None:
            self._connections.forget(ticket.asking)

    def share_rows(self, pool: Any) -> bool:
        """Have workers read this pool's observations where its envs write them, if they are many.

        Returns:
            Whether they can: observations are in shared memory, and no other pool that is open has
            been shared, whose env ids could not be told from these. If not, they are sent.
        """
        former = None if self._pool is None else self._pool()
        self._shared = ""
        if former is not None and former is not pool and not former.closed:
            return False
        self._pool = weakref.ref(pool)
        found = pool.shared_rows()
        if found is not None:
            self._shared = self._connected().share(*found)
        return bool(self._shared)

    # --- state and weights -------------------------------------------------------------------

    def initial_state(self) -> Nested:
        """Return the state of one row at the begin of an episode, as the policy says.

        It may be another one after weights were set; that there is none stays as it is.
        """
        known = self._described
        if known is None or (
            known.push < self._newest_push and known.initial_state.value is not None
        ):
            known = self._described = self._describe(with_weights=False)
        return known.initial_state.value

    def get_weights(self) -> Weights:
        """Return copies of the weights of one worker, which has looked at what was pushed."""
        return self.get_versioned_weights()[0]

    def get_versioned_weights(self) -> tuple[Weights, int]:
        """Return `get_weights` and their version, which is older if the last ones were refused."""
        described = self._describe(with_weights=True)
        return described.weights.value, described.version

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Push weights to all workers; returns at once, inference goes on meanwhile.

        Raises:
            ConfigError: This is not the process that has the workers, which pushes weights.
        """
        if self._push is None:
            raise ConfigError(
                f"weights of {self.policy_id!r} are pushed where the workers are, by "
                "PolicyWorkers.set_weights: all runners then have them"
            )
        self._newest_push, self.policy_version = self._push(self.policy_id, weights, version)

    def note_push(self, push: int, version: int) -> None:
        """The workers were sent weights; threads that send some may tell in another order."""
        if push >= self._newest_push:
            self._newest_push, self.policy_version = push, version

    def close(self) -> None:
        """Let go of the local links to the workers, which go on. Idempotent."""
        if self._connections is not None:
            self._connections.close()

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def disown(self) -> None:
        """In a forked copy: begin anew, with local links of its own."""
        self._connections = None
        self._shared = ""

    # --- private -----------------------------------------------------------------------------

    def _connected(self) -> PolicyConnections:
        if self._connections is None:
            self._connections = PolicyConnections(
                Path(self._handle.directory), self._handle.max_in_flight
            )
            # Dropping a policy is a way to close it.
            weakref.finalize(self, without_interrupts()(self._connections.close))
        return self._connections

    def _describe(self, *, with_weights: bool) -> PolicyDescribed:
        connections = self._connected()
        min_push = self._newest_push
        request = DescribePolicy(
            policy_id=self.policy_id, with_weights=with_weights, min_push=min_push
        )
        asking = connections.ask(self._service, request, self._handle.timeout)
        ticket = _PolicyTicket(asking, 0, min_push)
        try:
            reply = self._answer(connections, ticket, PolicyDescribed)
        except BaseException:  # Ctrl-C: nobody will take it
            connections.forget(asking)
            raise
        if reply.push >= self._newest_push:
            self._newest_push, self.policy_version = reply.push, reply.version
        return reply

    def _answer(self, connections: PolicyConnections, ticket: _PolicyTicket, kind: type[R]) -> R:
        """Wait for an answer that is new enough."""
        try:
            while not isinstance(reply := connections.wait_for(ticket.asking, kind, Behind), kind):
                assert isinstance(reply, Behind)
                ticket.behind = reply
                self._ask_elsewhere(connections, ticket, reply)
        except RequestTimeoutError as exc:
            if (behind := ticket.behind) is None:
                raise
            raise RequestTimeoutError(
                f"no worker has weights of push {ticket.min_push} or later; {behind.worker} has "
                f"push {behind.push}. What set_weights raised there is in the log; or raise "
                "max_version_lag",
                request_id=ticket.asking.wire_id,
                peer=self._service,
            ) from exc
        return reply

    def _ask_elsewhere(
        self, connections: PolicyConnections, ticket: _PolicyTicket, behind: Behind
    ) -> None:
        asking = ticket.asking
        ticket.passed_over.append(behind.worker)
        others = [name for name in connections.discovery.names if name not in ticket.passed_over]
        if not others:  # they may be about to take over what was pushed
            ticket.passed_over.clear()
            connections.pause(asking, _BEHIND_PAUSE)
            others = [self._service]
        connections.ask_again(asking, others[0])


def _bytes_of(observations: Nested) -> int:
    if isinstance(observations, np.ndarray):
        return observations.nbytes
    return sum(leaf.nbytes for _, leaf in leaves_of(observations))
