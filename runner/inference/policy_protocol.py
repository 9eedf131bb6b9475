"""What runners and policy workers say to each other. Vocabulary only.

Requests travel over local links; weights and factories do not, they go over the inherited pipe
(`policy_processes.py`).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.bus.wire.messages import Notice, Reply, Request, Tree

__all__ = [
    "COUNTED",
    "MAX_LAYOUT_BYTES",
    "ActionsChosen",
    "Behind",
    "ChooseActions",
    "DescribePolicy",
    "GetPolicyStatistics",
    "OpenLocalLink",
    "PolicyCounts",
    "PolicyDescribed",
    "PolicySums",
    "PolicyWorkerCounts",
    "ShareRows",
    "service_of",
]

#: Most bytes that the layout of shared rows may have, so that no file fills a worker's memory.
MAX_LAYOUT_BYTES: Final = 64 * 2**20


def service_of(policy_id: str) -> str:
    """Return the name of the service that answers for a policy."""
    return f"policy/{policy_id}"


class Behind(Reply, frozen=True, kw_only=True):
    """The worker has weights that are too old for the request; nothing was computed."""

    worker: str
    #: Number of the latest push that it has taken over, or, where it was asked what the policy is
    #: like, has looked at.
    push: int


class ActionsChosen(Reply, frozen=True, kw_only=True):
    """Answers `ChooseActions`; one row per observation."""

    #: Batched; or a list of single actions, where `listed`.
    actions: Tree
    listed: bool = False
    states: Tree
    extras: Tree
    #: `(rows,)`; None: all rows have `version`.
    versions: npt.NDArray[np.int64] | None = None
    #: Which weights chose the last row, and by which push the worker got them (0: by none).
    version: int
    push: int
    #: Others were in the same batch, or wait: another worker may be quicker.
    crowded: bool = False


class ChooseActions(Request[ActionsChosen], frozen=True, kw_only=True):
    """Asks a policy. To ask twice does no harm: the state of rows is kept by who asks."""

    policy_id: str
    num_rows: int
    explore: bool
    #: Batched; or a list of single observations, where `listed`; None: see `shared`.
    observations: Tree
    listed: bool = False
    states: Tree
    #: Which shared rows the observations are: name of what was shared, and `(rows,)`.
    shared: str = ""
    rows: npt.NDArray[np.int64] | None = None
    #: The answer is of no use if the worker's weights are of an older push than this.
    min_push: int = 0


class PolicyDescribed(Reply, frozen=True, kw_only=True):
    """Answers `DescribePolicy`."""

    #: State of one row at the begin of an episode.
    initial_state: Tree
    weights: Tree
    version: int
    push: int


class DescribePolicy(Request[PolicyDescribed], frozen=True, kw_only=True):
    """Asks for what a policy is like."""

    policy_id: str
    with_weights: bool = False
    #: The answer is of no use from a worker that has not looked at this push yet.
    min_push: int = 0


class PolicySums(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted of one policy, in one worker or in all."""

    requests: int
    rows: int
    failures: int
    #: Requests refused at once as too much waited / for weights that were too old; not computed as
    #: too late.
    overloaded: int
    behind: int
    expired: int
    #: How many calls had how many rows, by rows.
    batch_sizes: dict[int, int]


#: The plain numbers among them.
COUNTED: Final = ("requests", "rows", "failures", "overloaded", "behind", "expired")


class PolicyCounts(PolicySums, frozen=True, kw_only=True):
    """Counts of one policy in one life of one worker."""

    version: int
    push: int
    #: `LatencyHistogram.counts()`: from a request's arrival to its answer; of one call.
    latency: dict[int, int]
    compute: dict[int, int]


class PolicyWorkerCounts(Reply, frozen=True, kw_only=True):
    """Answers `GetPolicyStatistics`."""

    policies: dict[str, PolicyCounts]
    rows_waiting: int


class GetPolicyStatistics(Request[PolicyWorkerCounts], frozen=True, kw_only=True):
    """Asks a worker for its counts."""


class OpenLocalLink(Notice, frozen=True, kw_only=True):
    """At a handover socket, with the descriptor of a link's end: serve who holds the other."""

    #: Routing id that the worker has on the asker's bus, and its name there.
    identity: bytes
    name: str
    #: Requests that the asker may have in flight.
    capacity: int


class ShareRows(Notice, frozen=True, kw_only=True):
    """At a worker's handover socket, with the descriptors of an arena and of a file.

    The file has the frames of a `MapBlocks`, as a MessagePack list of bytes: spaces may be larger
    than one message at the handover socket.
    """

    #: How requests will name it: the asker's routing id, a colon, and more.
    name: str
    #: Bytes of the arena.
    size: int
