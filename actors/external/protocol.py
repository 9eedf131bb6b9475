"""What external simulators and their bridge say to each other.

Vocabulary only. Requests go to the service `BRIDGE`. A simulator is a *client*; one *session* is
one client's stay, which may outlive its connection. docs/wire-protocol.md, section 10, is this
file for other languages.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from envbus.bus.wire.messages import Reply, Request

__all__ = [
    "BRIDGE",
    "ActionChosen",
    "BridgeJoined",
    "EndEpisode",
    "EpisodeEnded",
    "EpisodeStarted",
    "FragmentLogged",
    "FragmentStep",
    "GetAction",
    "GetModel",
    "JoinBridge",
    "LogAction",
    "LogFragment",
    "LogReturns",
    "Logged",
    "Model",
    "StartEpisode",
    "Value",
]

#: What a request to a bridge has in `to`.
BRIDGE: Final = "bridge"

#: Any MessagePack value, in which arrays (ext ARRAY) and trees (ext TREE) may stand anywhere.
#: Nested lists stand for arrays and tuples just as well, and plain numbers for those of the space's
#: width: the receiver converts by the space. With several agents it is a map by agent.
Value: TypeAlias = Any


class BridgeJoined(Reply, frozen=True, kw_only=True):
    """The client may start episodes."""

    #: Plain form of a space (`actors/spaces/spaces.py`) without its random generator; or a map of
    #: these by agent. Arrays in it are nested lists.
    observation_space: Value
    action_space: Value
    #: Whether all values are maps by agent.
    multi_agent: bool
    #: Who may answer for whom.
    policy_ids: list[str]
    #: Seconds that the episodes of a client that is gone wait for it.
    lease: float
    #: Secret: who names it in `JoinBridge.resume` takes this client's episodes over.
    session: str
    #: Where actions may be chosen: "server", and "client" if models are handed out (`GetModel`).
    inference: list[str]
    #: Ids of the session's episodes that are still open: none unless it was resumed.
    episodes: list[str]


class JoinBridge(Request[BridgeJoined], frozen=True, kw_only=True):
    """First request of a client, after its Hello; again whenever it had to say hello again.

    Fails with `SpaceMismatch` if the client's spaces are not the bridge's, and with `SessionLost`
    if `resume` names none that is alive.
    """

    #: Readable name, for people.
    client: str
    #: As in `BridgeJoined`; None: whatever the bridge has. The first client's become the bridge's
    #: if that has none.
    observation_space: Value = None
    action_space: Value = None
    #: Whether this client knows no ext types: actions come as nested lists and plain numbers.
    plain: bool = False
    #: `BridgeJoined.session` of the stay to go on with; "": a new one.
    resume: str = ""


class EpisodeStarted(Reply, frozen=True, kw_only=True):
    """The episode may be stepped."""

    episode_id: str


class StartEpisode(Request[EpisodeStarted], frozen=True, kw_only=True):
    """Begin an episode. Fails with `EpisodeAlreadyStarted`, `EpisodeFinished`."""

    #: 1 to 256 characters, never used before; None: the bridge makes one up.
    episode_id: str | None = None
    #: Whether its steps may be trained on.
    training_enabled: bool = True


class ActionChosen(Reply, frozen=True, kw_only=True):
    """What the policy does."""

    #: Element of the action space; with several agents by agent, of those that are not done.
    action: Value
    #: Which version of the policy chose it.
    policy_version: int = 0


class GetAction(Request[ActionChosen], frozen=True, kw_only=True, omit_defaults=True):
    """Tell an observation and ask for an action.

    The header's `ttl` is how long to wait for it; after that the observation is withdrawn, and the
    action, should it still come, is handed to nobody.
    """

    episode_id: str
    observation: Value
    #: Id of the earliest `GetAction` of this episode whose action was not taken, nor any since, as
    #: its client gave up before the answer came. Until a call that says so was answered.
    not_taken: int | None = None
    #: Id of the latest call of this episode, of any type, whose answer its client did not wait for,
    #: so that it may never have come. Until a call that says so was answered.
    given_up: int | None = None


class Logged(Reply, frozen=True, kw_only=True):
    """It is kept."""


class LogAction(Request[Logged], frozen=True, kw_only=True, omit_defaults=True):
    """Tell an observation and the action that was chosen elsewhere."""

    episode_id: str
    observation: Value
    action: Value
    #: As in `GetAction`.
    not_taken: int | None = None
    given_up: int | None = None


class LogReturns(Request[Logged], frozen=True, kw_only=True, omit_defaults=True):
    """Tell what the previous action has led to. Adds up until the next observation."""

    episode_id: str
    #: Number; with several agents a map of numbers by agent.
    reward: Value
    #: Map with string keys; with several agents by agent. None: nothing to tell.
    info: Value = None
    #: With several agents only: maps from agents to booleans.
    terminateds: Value = None
    truncateds: Value = None
    #: As in `GetAction`.
    not_taken: int | None = None
    given_up: int | None = None


class EpisodeEnded(Reply, frozen=True, kw_only=True):
    """The episode is over, and its id is used up."""


class EndEpisode(Request[EpisodeEnded], frozen=True, kw_only=True, omit_defaults=True):
    """Tell the last observation of an episode."""

    episode_id: str
    observation: Value
    #: Whether it was cut short instead of having come to its end.
    truncated: bool = False
    #: With several agents only, of single agents; all others end as `truncated` says.
    terminateds: Value = None
    truncateds: Value = None
    #: As in `GetAction`.
    not_taken: int | None = None
    given_up: int | None = None


class Model(Reply, frozen=True, kw_only=True):
    """What a client needs to choose actions itself. Both None: the client has this version."""

    policy_id: str
    version: int
    #: As the policy's `get_weights` gave them.
    weights: Value = None
    onnx: bytes | None = None
    #: Tells models of one version apart, as there are where a runner goes on from an older state.
    digest: str = ""


class GetModel(Request[Model], frozen=True, kw_only=True):
    """Ask for a policy's newest version. Fails with `Refused` if there is no such model."""

    idempotent = True

    policy_id: str
    #: The version that the client has, which is not sent again; -1: none.
    have_version: int = -1
    #: Of the model that the client has; "": it does not say.
    have_digest: str = ""


class FragmentStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a fragment: what was logged, and then the observation that was acted upon.

    `reward`, `info`, `terminateds` and `truncateds` are those of `LogReturns`, summed up; None:
    nothing was logged since the step before. Without an observation that is all.
    """

    reward: Value = None
    info: Value = None
    terminateds: Value = None
    truncateds: Value = None
    observation: Value = None
    action: Value = None
    #: Of the policy that chose the action; -1: it was chosen elsewhere, as in `LogAction`.
    policy_version: int = -1
    #: Map by name of what the policy adds to the row (`action_logp`, `vf_preds`, `state_in`, ...);
    #: with several agents by agent, then by name.
    extras: Value = None


class FragmentLogged(Reply, frozen=True, kw_only=True):
    """The steps are kept, or were before."""

    #: How many of these steps are in no row, as their weights are too old: get newer ones.
    dropped: int = 0


class LogFragment(Request[FragmentLogged], frozen=True, kw_only=True):
    """Steps of one episode, whose actions were chosen by the client."""

    episode_id: str
    #: Of the model that the client was given.
    policy_id: str
    #: Number of the first of these steps in the episode, from 0. Steps that came before are
    #: passed over; those that would leave a gap are refused.
    first: int
    steps: list[FragmentStep]
