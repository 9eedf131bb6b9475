"""What goes into the rules of episodes and what comes out: events, effects, limits.

Vocabulary only; what follows from an event is decided in `episodes.py`. Observations, actions,
rewards, infos and flags are dicts by agent throughout, also where there is one agent only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

import msgspec

from envbus.bus.broker.events import Tick
from envbus.bus.settings import check_number, positive_int
from envbus.bus.wire.messages import Failed, Reply
from envbus.runner.bridge.results import ByAgent, ClientChoice
from envbus.runner.errors import FaultCause

__all__ = [
    "Act",
    "Admit",
    "BridgeStatistics",
    "Chosen",
    "ClientCall",
    "ClientFragment",
    "ClientIdentity",
    "ClientLost",
    "Confirm",
    "Drain",
    "Effect",
    "End",
    "EpisodeLimits",
    "Event",
    "FragmentPart",
    "GiveUp",
    "Join",
    "LogReward",
    "LogStep",
    "Observe",
    "Refuse",
    "RequestNote",
    "SendReply",
    "StartCall",
    "Tick",
    "Unsent",
]

# Without `gc`: no cycle goes through any of these, and many are made per second.

# --- events ---------------------------------------------------------------------------------


class _OfPeer(msgspec.Struct, frozen=True, gc=False):
    """What a peer has asked for by a request of this id, or is answered."""

    peer: bytes
    request_id: int


class Join(_OfPeer, frozen=True, gc=False):
    """A peer wants to be a client, or says so again."""

    name: str
    #: Secret of the session to go on with; "": a new one.
    resume: str = ""
    #: Public key of the peer, or name of the token that it has shown; "" without them.
    user: str = ""


class ClientCall(_OfPeer, frozen=True, gc=False, kw_only=True):
    """What a client asks for about an episode."""

    #: Bytes of the message, and of what is kept of it as Python's objects.
    size: int = 0
    #: Seconds until it is answered at the latest; positive and finite.
    timeout: float = 60.0
    #: Tells its request from others that have the same id.
    digest: int = 0
    #: As in `GetAction`.
    not_taken: int | None = None
    given_up: int | None = None


class StartCall(ClientCall, frozen=True, gc=False):
    """A client begins an episode; None: of an id that is made up."""

    episode_id: str | None
    training_enabled: bool = True


class Observe(ClientCall, frozen=True, gc=False):
    """A client has an observation and waits for an action."""

    episode_id: str
    observation: ByAgent


class LogStep(ClientCall, frozen=True, gc=False):
    """A client has an observation, and has acted upon it."""

    episode_id: str
    observation: ByAgent
    action: ByAgent


class LogReward(ClientCall, frozen=True, gc=False):
    """A client tells what the action before has led to."""

    episode_id: str
    rewards: ByAgent
    infos: ByAgent
    #: Without "__all__".
    terminateds: ByAgent
    truncateds: ByAgent


class FragmentPart(msgspec.Struct, frozen=True, gc=False):
    """One step of a fragment: what was logged, then what was seen and done; None: no more."""

    reward: LogReward | None
    step: LogStep | None
    #: Who chose the action; None: the simulator itself did.
    choice: ClientChoice | None = None


class ClientFragment(ClientCall, frozen=True, gc=False):
    """A client has acted by itself for some steps."""

    episode_id: str
    policy_id: str
    #: Number of the first part in the episode.
    first: int
    parts: list[FragmentPart]


class End(ClientCall, frozen=True, gc=False):
    """A client ends an episode."""

    episode_id: str
    observation: ByAgent
    #: With "__all__"; of the agents that are named and of those observed.
    terminateds: ByAgent
    truncateds: ByAgent


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """The runner has actions for an episode."""

    episode_id: str
    action: ByAgent
    policy_version: int = 0


class GiveUp(msgspec.Struct, frozen=True, gc=False):
    """The runner has no action for what it was shown: whoever waits is told why."""

    episode_id: str
    failed: Failed


class Confirm(msgspec.Struct, frozen=True, gc=False):
    """The runner has made sure of an episode that was ended; or could not."""

    episode_id: str
    #: What its client is told instead of "ended".
    failed: Failed | None = None


class Drain(msgspec.Struct, frozen=True, gc=False):
    """No more episodes are to begin; those that are open go on."""


class ClientLost(msgspec.Struct, frozen=True, gc=False):
    """A peer is gone."""

    peer: bytes
    reason: str
    #: Nobody comes back for its episodes, as its process has ended: what their faults say. None:
    #: somebody may, until the lease is over.
    cause: FaultCause | None = None


class Unsent(_OfPeer, frozen=True, gc=False):
    """An answer could not be sent, as there was no room for it."""


Event: TypeAlias = (
    Join | ClientCall | Chosen | GiveUp | Confirm | Drain | ClientLost | Unsent | Tick
)

# --- effects --------------------------------------------------------------------------------


class Admit(_OfPeer, frozen=True, gc=False):
    """The peer is a client now: tell it the spaces, and this."""

    #: Secret of its session.
    session: str
    #: Its open episodes.
    episodes: list[str]


class SendReply(_OfPeer, frozen=True, gc=False):
    """Send a reply."""

    reply: Reply


class Act(_OfPeer, frozen=True, gc=False):
    """Reply with an action."""

    action: ByAgent
    policy_version: int


class Refuse(_OfPeer, frozen=True, gc=False):
    """Send a failure."""

    failed: Failed


Effect: TypeAlias = Admit | SendReply | Act | Refuse

# --- who asks ---------------------------------------------------------------------------------


class ClientIdentity(NamedTuple):
    """Who a client is."""

    #: As it calls itself.
    name: str
    #: Name of the token, or public key, that it has shown; "": none.
    user: str = ""
    #: Host and port, of one that has come in at the gateway; "": of others it is not known.
    address: str = ""


class RequestNote(NamedTuple):
    """A request of a client, as it was taken, or refused."""

    client: ClientIdentity
    #: Name of its payload, "GetAction".
    verb: str
    #: "": it is about none.
    episode_id: str
    #: Name of the error, or code of the failure, by which it was refused; "": it was not.
    error: str


# --- settings and statistics ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """Limits of one bridge.

    Raises:
        ConfigError: A limit is unusable.
    """

    #: Seconds that the episodes of a client that is gone wait for it.
    lease: float = 30.0
    #: Episodes that may be open at one time, of all clients together.
    max_episodes: int = 100_000
    #: Episodes that may be open at one time, of one client.
    max_client_episodes: int = 10_000
    #: Bytes of one client's messages that may wait for the runner, infos included; each counts for
    #: at least 1024. At half of it clients have to wait, as at `max_queued`. At three quarters of
    #: it rewards and infos are refused, which wait for the next observations of their episodes; at
    #: all of it whatever else would wait is refused, too.
    max_client_bytes: int = 1 << 28
    #: Ids of finished episodes that are remembered, the newest.
    max_finished: int = 100_000
    #: The same, of one client: what it does must not have those of others forgotten.
    max_client_finished: int = 10_000
    #: Sessions that may be known at one time.
    max_sessions: int = 4096
    #: The same, of those that one public key has begun, where there are keys.
    max_key_sessions: int = 2048
    #: Logged steps of one episode that may wait for the runner before its client has to wait.
    max_queued: int = 256
    #: Answers of one session that are remembered, for requests that are sent again; as many as it
    #: has open episodes, if these are more.
    max_answers: int = 1024
    #: By how many versions the weights that a client has acted with may be behind the published
    #: ones, for the step to become a row; None: by any number.
    max_version_lag: int | None = None
    #: Actions per second that one client is chosen; one second's worth may be asked for at once.
    #: Clients that show one token with a name, or one key, are one. At least 1e-9, which is
    #: one in 30 years. None: any number.
    max_rate: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type == "int":  # as it is written, which annotations are here
                value = positive_int(item.name, getattr(self, item.name))
                object.__setattr__(self, item.name, value)
        check_number("max_version_lag", self.max_version_lag, whole=True, least=0, optional=True)
        check_number("lease", self.lease, over=0.0, finite=True)
        check_number("max_rate", self.max_rate, least=1e-9, finite=True, optional=True)


class BridgeStatistics(msgspec.Struct, kw_only=True):
    """Counts of one bridge. Those without `now` only grow."""

    #: Clients that are there / that are gone and may come back.
    clients_now: int = 0
    lost_clients_now: int = 0
    #: Episodes that are open / of which something waits for the runner / that wait for an action.
    episodes_now: int = 0
    ready_now: int = 0
    waiting_now: int = 0
    #: Episodes whose clients wait for the confirmation that they have ended.
    unconfirmed_now: int = 0
    #: Bytes of messages that wait for the runner, of the clients that are known / of the one that
    #: has most.
    queued_bytes_now: int = 0
    most_queued_bytes_now: int = 0
    #: Ids of finished episodes that are remembered.
    finished_now: int = 0
    #: Episodes begun, and how they ended: by their clients / without a single step, which the
    #: runner never heard of / by faults.
    episodes: int = 0
    ended: int = 0
    empty: int = 0
    faulty: int = 0
    #: Actions chosen by the runner that reached a client / by clients.
    actions: int = 0
    logged_actions: int = 0
    #: Steps in which a client's own copy of a policy has chosen / those of them that are in no row,
    #: as their weights were too old.
    local_actions: int = 0
    stale_actions: int = 0
    #: `get_action` that ended by their time-out / by another call for the same episode / by an
    #: error of the policy.
    timeouts: int = 0
    superseded: int = 0
    policy_errors: int = 0
    #: Logged steps and ends of episodes, which counted, but were not answered in time.
    held_timeouts: int = 0
    #: Actions of the runner that nobody waited for, or not any more.
    dropped_actions: int = 0
    #: Requests that were refused / that made the bridge raise what is no refusal, which is a bug of
    #: it, and were refused as well / that came again and were not done again.
    refused: int = 0
    surprises: int = 0
    #: Requests that were refused as one client has too many episodes, or bytes that wait.
    over_budget: int = 0
    #: Requests for actions that were refused as their client asks too often.
    over_rate: int = 0
    resent: int = 0
    #: Clients that came back to their session.
    resumed: int = 0
    #: How often simulators that the bridge hosts were started again.
    host_restarts: int = 0
