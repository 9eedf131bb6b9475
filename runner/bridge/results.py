"""What `ExternalEnvBridge.poll` returns: the six dicts of `ActorPool.poll`, keyed by episode id.

And the records of episodes that it is made of. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from envbus.runner.errors import FaultCause

__all__ = ["BridgeResult", "ByAgent", "ClientChoice", "EpisodeFault", "Record", "acting"]

ByAgent: TypeAlias = dict[Any, Any]


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


class Record(msgspec.Struct, gc=False):
    """One observation of an episode, with what came before it; or its end without one."""

    episode_id: str
    #: Dicts by agent under the names of `AgentsEnv`'s records; empty for a fault.
    content: dict[str, ByAgent]
    training_enabled: bool
    #: Whether the runner was shown nothing of this episode before.
    first: bool = False
    #: Whether no action for the observation before has reached the simulator.
    unacted: bool = False
    #: Whether an observation between that one and this never arrived; it is `unacted`, too, but for
    #: the first.
    missed: bool = False
    #: Whether the episode is over.
    last: bool = False
    #: Actions that the simulator has chosen for this observation; None: the runner does.
    off_policy: ByAgent | None = None
    #: The policy of the simulator that has chosen them; None: none has.
    choice: ClientChoice | None = None
    fault: EpisodeFault | None = None
    #: Number of the request that is answered when this is taken; 0: there is none.
    held: int = 0
    #: Bytes of the messages that it is made of, which count against its client's budget.
    size: int = 0


def acting(
    observations: Mapping[Any, Any],
    terminateds: Mapping[Any, bool],
    truncateds: Mapping[Any, bool],
) -> list[Any]:
    """Return the agents that an action is wanted of: those observed that are not done."""
    if True not in terminateds.values() and True not in truncateds.values():
        return list(observations)
    return [
        agent for agent in observations if not terminateds.get(agent) and not truncateds.get(agent)
    ]


class _ByEpisode(NamedTuple):
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


class BridgeResult(_ByEpisode):
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
        missed: Those of `unacted` in which an observation between that one and this record never
            arrived, whichever agents it was for. What any agent did before is followed by nothing
            that was seen. Also those of `started` of which an earlier observation never arrived:
            their rewards are of what followed that one.
        choices: By episode: which policy of the simulator's has chosen its `off_policy_actions`,
            if one has; these are on-policy then, for that version.
    """

    faults: list[EpisodeFault]
    started: list[str]
    ended: list[str]
    untrained: set[str]
    unacted: set[str]
    missed: set[str]
    choices: dict[str, ClientChoice]

    @classmethod
    def of(cls, records: Sequence[Record]) -> BridgeResult:
        """Return what the runner is shown of `records`."""
        result = cls({}, {}, {}, {}, {}, {})
        result.faults, result.started, result.ended = [], [], []
        result.untrained, result.unacted, result.missed = set(), set(), set()
        result.choices = {}
        observations, rewards, terminateds, truncateds, infos, off_policy_actions = result
        for record in records:
            episode_id, content = record.episode_id, record.content
            if record.fault is not None:
                result.faults.append(record.fault)
            else:
                observations[episode_id] = content["observations"]
                rewards[episode_id] = content["rewards"]
                terminateds[episode_id] = content["terminateds"]
                truncateds[episode_id] = content["truncateds"]
                infos[episode_id] = content["infos"]
                if record.off_policy is not None:
                    off_policy_actions[episode_id] = record.off_policy
                    if record.choice is not None:
                        result.choices[episode_id] = record.choice
                if record.first:
                    result.started.append(episode_id)
            if record.last:
                result.ended.append(episode_id)
            if not record.training_enabled:
                result.untrained.add(episode_id)
            if record.unacted:
                result.unacted.add(episode_id)
            if record.missed:
                result.missed.add(episode_id)
        return result
