"""The five verbs of a simulator: as it calls them, as requests, and what comes back.

For all Python clients. Keeps the spaces that were agreed upon, and which episodes are open. Leaves
out who performs a request: a connection (`client.py`, `aio.py`), or the client itself
(`local_episodes.py`).
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec

from envbus.actors.external.agreement import Agreement, SpaceLike
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import (
    ActionTimeoutError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RequestIdUsedError,
    refusal_of,
)
from envbus.actors.external.protocol import (
    ActionChosen,
    BridgeJoined,
    EndEpisode,
    EpisodeEnded,
    EpisodeStarted,
    FragmentLogged,
    GetAction,
    JoinBridge,
    LogAction,
    LogReturns,
    Model,
    StartEpisode,
)
from envbus.actors.failures import original_of
from envbus.actors.spaces.spaces import Element, Space
from envbus.bus.brief import brief
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import ConfigError, RemoteError, RequestTimeoutError
from envbus.bus.peer.session import Outcome
from envbus.bus.settings import check_number
from envbus.bus.wire.codec import encode
from envbus.bus.wire.ext import Placeholders
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Failed, FailureCode, Hello, Payload, Reply

__all__ = [
    "ClientState",
    "ClientTimeouts",
    "EpisodeRequest",
    "SimulatorVerbs",
    "awaited",
    "endpoint_of",
]

#: Lost episodes whose ids are remembered.
_MAX_LOST = 10_000

#: What a verb asks for.
EpisodeRequest: TypeAlias = StartEpisode | GetAction | LogAction | LogReturns | EndEpisode

P = ParamSpec("P")
T = TypeVar("T")

_BARE = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^/:\s]+):\d{1,5}")


def endpoint_of(address: str) -> str:
    """Return the endpoint that an address names; `HOST:PORT` is one of `tcp://`.

    Raises:
        ConfigError: It names none; says what to write.
    """
    hint = "write tcp://127.0.0.1:5556, 127.0.0.1:5556 or ipc:///path, as the bridge tells it"
    if not isinstance(address, str):
        raise ConfigError(f"the address {brief(address)} is no text: {hint}")
    scheme, separator, _ = address.partition("://")
    if separator and scheme in ("tcp", "ipc"):
        return address  # the socket looks closer
    if _BARE.fullmatch(address):
        return f"tcp://{address}"
    if scheme in ("stream", "streams", "ws", "wss"):
        hint = f"that is a gateway's address, for clients in other languages; {hint}"
    raise ConfigError(f"the address {brief(address)} cannot be used: {hint}")


class ClientTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client waits, in seconds. A runner that trains does not answer meanwhile."""

    #: For the bridge to be there, when the client is made.
    connect: float = 60.0
    #: For an action.
    action: float = 300.0
    #: For any other verb.
    other: float = 300.0
    #: Without a connection, until verbs fail.
    patience: float = 15.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_number(f"ClientTimeouts.{name}", getattr(self, name), least=0.0)

    @classmethod
    def of(cls, given: ClientTimeouts | None) -> ClientTimeouts:
        """Return what was given, or the defaults; raises `ConfigError` for anything else."""
        if given is not None and not isinstance(given, cls):
            raise ConfigError(
                f"timeouts must be ClientTimeouts, ClientTimeouts(action=5.0) for example; "
                f"not {brief(given)}"
            )
        return given or cls()

    def seconds(self, request: EpisodeRequest, timeout: float | None) -> float:
        """Return how long a verb may take that was told `timeout`; None: it was told nothing.

        Raises:
            ConfigError: It is not positive and finite.
        """
        if timeout is None:
            return self.action if isinstance(request, GetAction) else self.other
        check_number("timeout", timeout, over=0.0, most=1e9)
        return timeout


class SimulatorVerbs(ABC):
    """What a simulator calls, in any of its threads; calls of one episode come one after another.

    With several agents observations, actions, rewards and infos are dicts by agent. For a client
    whose verbs are awaited there is `awaited`.
    """

    @abstractmethod
    def _perform(self, request: EpisodeRequest, timeout: float | None) -> Any:
        """Return what a verb returns, or an awaitable of that; or raise what went wrong."""

    def start_episode(
        self,
        episode_id: str | None = None,
        training_enabled: bool = True,
        *,
        timeout: float | None = None,
    ) -> str:
        """Begin an episode and return its id.

        Args:
            episode_id: Never used before; None: the bridge makes one up.
            training_enabled: Whether its steps may be trained on.
            timeout: Seconds; None: that of the client.

        Raises:
            EpisodeAlreadyStartedError: One of that id is open.
            EpisodeFinishedError: That id is used up.
            RequestTimeoutError: The bridge has not answered in time.
            PeerLostError: It is out of reach, or was started again.
            ClosedError: This client was closed.
        """
        request = StartEpisode(episode_id=episode_id, training_enabled=training_enabled)
        episode: str = self._perform(request, timeout)
        return episode

    def get_action(
        self, episode_id: str, observation: Element, *, timeout: float | None = None
    ) -> Element:
        """Tell an observation, wait for an action, and return that.

        Args:
            episode_id: Which episode.
            observation: What is seen: within the observation space.
            timeout: Seconds for the action; None: `ClientTimeouts.action`. A trainer that is there
                says that they are over. Where it does not, this returns a second later.

        Raises:
            ActionTimeoutError: None came in time; also a TimeoutError. The observation is void.
            SpaceMismatchError: The observation is outside its space. The episode goes on.
            EpisodeError: The episode is not open, or another call for it came meanwhile.
            Exception: What the policy raised, as its own class where that is known here.
            PeerLostError: The bridge is out of reach, or was started again.
            ClosedError: This client was closed.
            QueueFullError: It chooses itself, and too many steps wait to be sent.
        """
        request = GetAction(episode_id=episode_id, observation=to_wire(observation))
        return self._perform(request, timeout)

    def log_action(
        self,
        episode_id: str,
        observation: Element,
        action: Element,
        *,
        timeout: float | None = None,
    ) -> None:
        """Tell an observation, and the action that was taken upon it without being asked for.

        Raises as `get_action`; a time-out is a `RequestTimeoutError`, and the step counts all the
        same if it has reached the bridge: do not log it again.
        """
        request = LogAction(
            episode_id=episode_id, observation=to_wire(observation), action=to_wire(action)
        )
        done: None = self._perform(request, timeout)
        return done

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None = None,
        *,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Tell what the action before has led to.

        Rewards add up until the next observation, infos are merged.

        Args:
            episode_id: Which episode.
            reward: A number; with several agents a dict of them by agent.
            info: A dict; with several agents one by agent.
            terminateds: With several agents: who has come to an end.
            truncateds: With several agents: who was cut short.
            timeout: Seconds; None: that of the client.

        Raises as `log_action`.
        """
        request = LogReturns(
            episode_id=episode_id,
            reward=to_wire(reward),
            info=to_wire(info),
            terminateds=to_wire(terminateds),
            truncateds=to_wire(truncateds),
        )
        done: None = self._perform(request, timeout)
        return done

    def end_episode(
        self,
        episode_id: str,
        observation: Element,
        truncated: bool = False,
        *,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Tell the last observation.

        Args:
            episode_id: Which episode.
            observation: After the last action.
            truncated: It was cut short (a time limit) instead of having come to its end.
            terminateds: With several agents: for whom that is different.
            truncateds: The same.
            timeout: Seconds; None: that of the client.

        Raises as `log_action`.
        """
        request = EndEpisode(
            episode_id=episode_id,
            observation=to_wire(observation),
            truncated=truncated,
            terminateds=to_wire(terminateds),
            truncateds=to_wire(truncateds),
        )
        done: None = self._perform(request, timeout)
        return done


def awaited(
    verb: Callable[Concatenate[SimulatorVerbs, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a verb of `SimulatorVerbs` for a class whose `_perform` is a coroutine."""

    @functools.wraps(verb)
    async def perform(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked: Any = verb(self, *args, **kwargs)
        done: T = await asked
        return done

    return perform


class ClientState:
    """What one client knows, by which its requests are completed and its answers read.

    Args:
        observation_space: What this client has, by agent if there are several; None: the bridge's.
        action_space: The same.
        name: For people; None: a new one.

    Raises:
        ConfigError: The name is no text.
    """

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        name: str | None,
    ) -> None:
        if not isinstance(name, str | None):
            raise ConfigError(
                f'name must be a text, "sim-1" for example, or None; not {brief(name)}'
            )
        self._own = Agreement.of(observation_space, action_space)
        self.name = name or f"sim-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._joined: BridgeJoined | None = None
        self._agreement: Agreement | None = None
        self._open: set[str] = set()
        self._lost: dict[str, None] = {}
        #: How often a bridge was joined: at that episodes are lost.
        self.joins = 0
        #: By episode: the earliest question that was given up, of which the bridge may think that
        #: its action was taken; and the latest call, which it may never have got.
        self._given_up: dict[str, tuple[int | None, int]] = {}
        self._placeholders = Placeholders(("info", "steps[*].info"))

    def hello(self, heartbeat: float) -> Hello:
        """Return who this is, on the bus; raises `ConfigError`."""
        check_number("heartbeat", heartbeat, over=0.0, most=60.0)
        # The suffix: the same name may come back before its former self is missed.
        name = f"{self.name}-{secrets.token_hex(4)}"
        return Hello(name=name, pid=os.getpid(), heartbeat=heartbeat)

    def join(self, session: str) -> JoinBridge:
        """Return what to join with."""
        spaces = (None, None) if self._own is None else self._own.described
        return JoinBridge(
            client=self.name,
            observation_space=spaces[0],
            action_space=spaces[1],
            resume=session,
        )

    def on_joined(self, joined: BridgeJoined) -> None:
        """The bridge has told what it has. Episodes that it does not have any more are lost.

        Raises:
            SpaceMismatchError: Its spaces cannot be read.
        """
        if self._joined is None or self._agreement is None:
            self._agreement = Agreement.from_wire(joined.observation_space, joined.action_space)
        self._joined = joined
        self.joins += 1
        for episode_id in self._open - set(joined.episodes):
            self._lost[episode_id] = None
            self._given_up.pop(episode_id, None)
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._open = set(joined.episodes)

    @property
    def joined(self) -> BridgeJoined:
        """What the bridge has told last."""
        assert self._joined is not None, "the bridge has not answered yet"
        return self._joined

    @property
    def num_open(self) -> int:
        """Episodes that are open."""
        return len(self._open)

    @property
    def agreement(self) -> Agreement:
        """The spaces."""
        assert self._agreement is not None, "the bridge has not answered yet"
        return self._agreement

    @property
    def observation_space(self) -> Space:
        """The agent's, or an `AgentSpaces`."""
        return self.agreement.observation_space

    @property
    def action_space(self) -> Space:
        """The agent's, or an `AgentSpaces`."""
        return self.agreement.action_space

    # --- requests -----------------------------------------------------------------------------

    def prepared(self, request: EpisodeRequest) -> EpisodeRequest:
        """Return a verb's request as it is sent; raises `EpisodeLostError`."""
        if isinstance(request, StartEpisode):
            return request
        self.check_open(request.episode_id)
        given_up = self._given_up.get(request.episode_id)
        if given_up is None:
            return request
        return msgspec.structs.replace(request, not_taken=given_up[0], given_up=given_up[1])

    def encoded(self, request: Payload) -> Frames:
        """Return a request's frames; objects in infos that cannot cross have placeholders."""
        return encode(request, self._placeholders)

    # --- answers ------------------------------------------------------------------------------

    def result(self, payload: Payload, outcome: Outcome, request_id: int) -> Any:
        """Return what a verb returns, or raise what went wrong."""
        if self._given_up and isinstance(outcome, Reply):
            self._given_up.pop(getattr(payload, "episode_id", None) or "", None)
        if type(outcome) is ActionChosen:
            return self.agreement.take_action(outcome.action, "action from the bridge")
        if isinstance(outcome, EpisodeStarted):
            self._open.add(outcome.episode_id)
            self._lost.pop(outcome.episode_id, None)  # of that id another bridge may know nothing
            return outcome.episode_id
        if isinstance(outcome, EpisodeEnded):
            assert isinstance(payload, EndEpisode)
            self._open.discard(payload.episode_id)
            return None
        if isinstance(outcome, Reply):
            return outcome if isinstance(outcome, FragmentLogged | Model) else None
        self._raise(payload, outcome, request_id)

    def give_up(self, payload: Payload, request_id: int) -> None:
        """Nobody waits for an answer any more, which may come all the same."""
        if isinstance(payload, GetAction | LogAction | LogReturns):
            not_taken, latest = self._given_up.get(payload.episode_id, (None, 0))
            if not_taken is None and isinstance(payload, GetAction):
                not_taken = request_id
            self._given_up[payload.episode_id] = not_taken, max(latest, request_id)

    def _raise(self, payload: Payload, outcome: Failed | Exception, request_id: int) -> None:
        episode_id = getattr(payload, "episode_id", None) or ""
        cause: Exception | None = None
        error: Exception
        if isinstance(outcome, Failed):
            error = failure_to_error(outcome, request_id)
            if outcome.code is FailureCode.REMOTE:
                refusal = refusal_of(outcome)
                original = original_of("", outcome.remote_type, outcome.message, trusted=False)
                if refusal is not None:
                    error = refusal
                elif original is not None:
                    assert isinstance(error, RemoteError)
                    error, cause = original, error
        else:
            error = outcome
            self.give_up(payload, request_id)
        if isinstance(error, RequestTimeoutError) and isinstance(payload, GetAction):
            text, place = str(error).partition(": ")[2], f"episode {episode_id}:"
            timeout = ActionTimeoutError(
                text if place in text else f"{place} {text}",
                request_id=request_id,
                peer="bridge",
            )
            timeout.episode_id = episode_id
            error = timeout
        if isinstance(error, RequestIdUsedError):  # sent again: its action is forgotten there
            self.give_up(payload, request_id)
        if isinstance(error, EpisodeNotFoundError):
            self.check_open(episode_id)  # it was asked before another bridge was joined
        if isinstance(error, EpisodeLostError | EpisodeFinishedError):
            self._open.discard(episode_id)
            self._given_up.pop(episode_id, None)
        raise error from cause

    def check_open(self, episode_id: str) -> None:
        """Raise `EpisodeLostError` if the bridge has lost an episode."""
        if episode_id in self._lost:
            raise EpisodeLostError(
                f"Episode {episode_id} is gone: the bridge was started again, or was out of reach "
                "for longer than its lease."
            )
