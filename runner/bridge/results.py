"""What `ExternalEnvBridge.poll` returns: the six dicts of `ActorPool.poll`, keyed by episode id."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from envbus.runner.faults import FaultCause

__all__ = ["BridgeResult", "ClientChoice", "EpisodeFault"]


class ClientChoice(msgspec.Struct, frozen=True):
    """A client's copy of a policy has chosen the actions of a step."""

    policy_id: str
    policy_version: int
    #: By agent and name: what the policy adds to the row.
    extras: dict[Any, dict[str, Any]]


class EpisodeFault(msgspec.Struct, frozen=True, kw_only=True):
    """An episode is over without a last observation: its simulator vanished or gave it up."""

    episode_id: str
    cause: FaultCause
    #: Which client, what happened; for people.
    message: str


class _SixDicts(NamedTuple):
    #: By episode and agent; a single agent is `"agent0"`.
    observations: dict[str, dict[Any, Any]]
    #: Of what the agents did before: all zero in an episode's first record, unless rewards were
    #: logged before its first observation.
    rewards: dict[str, dict[Any, float]]
    #: By episode and agent, and `"__all__"` for the episode, as in `truncateds`.
    terminateds: dict[str, dict[Any, bool]]
    truncateds: dict[str, dict[Any, bool]]
    #: What was logged since the observation before; empty dicts where nothing was.
    infos: dict[str, dict[Any, Any]]
    #: Of episodes whose action for *this* observation was chosen by the simulator. Nobody waits
    #: for an action for it: one that is sent is ignored.
    off_policy_actions: dict[str, dict[Any, Any]]


class BridgeResult(_SixDicts):
    """A tuple of six dicts, each `{episode_id: {agent_id: value}}`.

    Each episode has at most one record in one result; what it has queued comes with the following
    ones, in order. An episode whose `"__all__"` flag is set is over: no action is wanted, and its
    id does not occur again. All is the caller's own.

    Attributes:
        faults: Episodes that ended without a last observation. Those of which no observation was
            ever returned are not told of.
        started: Episodes whose first record this is, in the order in which they began.
        ended: Episodes that are over with this result: by their flags, or by a fault.
        untrained: Those in this result, faults included, that were started with
            `training_enabled=False`.
        unacted: Those in which no action for the observation *before* this record has reached the
            simulator: it timed out, the connection was lost, or the episode was ended meanwhile.
            What the policy chose for it did not happen; rewards in this record are not its own.
            That observation itself was real, and followed the action before it.
        choices: By episode: which policy of the simulator's has chosen its `off_policy_actions`,
            if one has; these are on-policy then, for that version.
    """

    faults: list[EpisodeFault]
    started: list[str]
    ended: list[str]
    untrained: set[str]
    unacted: set[str]
    choices: dict[str, ClientChoice]

    @classmethod
    def empty(cls) -> BridgeResult:
        """Return a result to be filled."""
        result = cls({}, {}, {}, {}, {}, {})
        result.faults, result.started, result.ended = [], [], []
        result.untrained, result.unacted, result.choices = set(), set(), {}
        return result
