"""`ExternalEnvClient`: how a simulator in Python talks to a bridge, from any of its threads.

Leaves out the connection (`link.py`), the protocol (`conversation.py`) and what the verbs mean
(`verbs.py`).
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from envbus.actors.external.agreement import SpaceLike
from envbus.actors.external.conversation import Conversation
from envbus.actors.external.link import Link
from envbus.actors.external.local_inference import (
    LocalInference,
    check_inference,
    local_episodes,
)
from envbus.actors.external.local_policy import LocalSettings, PolicyOrFactory
from envbus.actors.external.verbs import ClientTimeouts, Verbs, endpoint_of
from envbus.actors.spaces import Element, Space
from envbus.bus.codec import encode
from envbus.bus.errors import ClosedError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import uninterrupted, uninterrupted_call
from envbus.bus.keys import PathLike, PeerKeys
from envbus.bus.messages import Payload
from envbus.bus.near_peer import NearPeer
from envbus.bus.serve import Heartbeats
from envbus.bus.zmq_peer import ZmqPeer

__all__ = ["ExternalEnvClient"]


class ExternalEnvClient(StaysHere):
    """A simulator's connection to a bridge.

        with ExternalEnvClient("tcp://127.0.0.1:5556") as client:
            episode = client.start_episode()
            observation = simulator.reset()
            while not simulator.over:
                action = client.get_action(episode, observation)
                observation, reward = simulator.advance(action)
                client.log_returns(episode, reward)
            client.end_episode(episode, observation)

    Any thread may call it, and any number of episodes may be open; calls of one episode come one
    after another. With several agents observations, actions, rewards and infos are dicts by agent,
    which may name different agents each time.

    When the connection is lost it is made again, with pauses that grow, and what was under way is
    sent again: the bridge does nothing twice. If the bridge does not know this client any more, as
    it was started again or the lease is over, what was under way fails with `PeerLostError`, and
    the episodes that were open raise `EpisodeLostError`; new ones can be started.
    The same holds when a bridge says that it stops, at once; `start_episode` waits for another one.

    Args:
        address: Of the bridge, e.g. `"tcp://127.0.0.1:5556"`, which may be written without `tcp://`.
        observation_space: What this simulator has, by agent if it has several; the bridge refuses
            it if it has others. None: whatever the bridge has.
        action_space: The same.
        name: For people; None: from the host's name and the process id.
        timeouts: None: the defaults.
        heartbeat: Seconds between signs of life; after four of them without one the bridge takes
            this client for gone, and keeps its episodes for its lease.
        keys: File of this client's secret key, for a bridge that has keys: see docs/security.md.
        server_key: File of the bridge's public key.
        inference: `"server"`: the bridge is asked for actions. `"client"`: they are chosen here, by
            weights that the bridge hands out, with the same verbs: `get_action` does not wait for
            the bridge, the steps are sent behind it in fragments, and `end_episode` returns when
            the bridge has all of them. Steps that were not sent yet are lost with this process.
        policy: Of a client that chooses: what has `compute_actions` and `set_weights`, as a
            runner's policies do; or a function `(observation_space, action_space, weights)` that
            makes it (`envbus.runner.policy_from_weights` does for `MlpPolicy` and ONNX). For all
            agents, which have the same spaces.
        local: Settings of that; None: the defaults.
        update_interval: Seconds between two looks for newer weights.
        lanes: Whether to reach a bridge of this user and host without ZeroMQ, if it can be.

    Attributes:
        local: What chooses here; None: nothing does.
        address: With its scheme.
        identity: By which the bus knows this client, over all its connections.

    Raises:
        ConfigError: A setting or a key file cannot be used, or the bridge hands out no weights.
        RequestTimeoutError: No bridge has answered in time; if keys do not fit, it says so.
        SpaceMismatchError: The bridge has other spaces.
        VersionMismatchError: The bridge speaks another version of the protocol.
        ProtocolError: The bridge refuses this client.
    """

    def __init__(
        self,
        address: str,
        *,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        name: str | None = None,
        timeouts: ClientTimeouts | None = None,
        heartbeat: float = 2.0,
        keys: PathLike | None = None,
        server_key: PathLike | None = None,
        inference: Literal["server", "client"] = "server",
        policy: PolicyOrFactory | None = None,
        update_interval: float = 10.0,
        local: LocalSettings | None = None,
        lanes: bool = True,
    ) -> None:
        check_inference(inference, policy, update_interval)
        self._timeouts = ClientTimeouts.of(timeouts)
        self._verbs = Verbs(observation_space, action_space, name)
        self._placeholders = self._verbs.placeholders()
        hello = self._verbs.hello(heartbeat)
        self.address = address = endpoint_of(address)
        peer_keys = PeerKeys.load(keys, server_key)
        self.identity = identity = f"sim.{secrets.token_hex(8)}".encode()
        with uninterrupted():  # libzmq waits for ever for sockets that nobody has closed
            self._link = Link(
                address,
                NearPeer(address, identity, keys=peer_keys, lanes=lanes),
                Conversation(
                    hello, self._verbs.join, self._verbs.on_joined, self._timeouts.patience
                ),
                Heartbeats(
                    lambda: ZmqPeer(address, identity + b".heartbeat", keys=peer_keys),
                    identity,
                    heartbeat,
                    on_unknown=lambda: link.on_unknown(),
                ),
            )
            link = self._link
            self._finalizer = weakref.finalize(self, _close, link, None)
        try:
            link.connect(self._timeouts.connect)
            self.local: LocalInference | None = None
            if inference == "client":
                self.local = self._make_local(policy, update_interval, local)
                self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _close, link, self.local)
        except BaseException:
            self._finalizer()
            raise

    @property
    def name(self) -> str:
        """For people."""
        return self._verbs.name

    @property
    def observation_space(self) -> Space:
        """What was agreed upon; an `AgentSpaces` with several agents."""
        return self._verbs.observation_space

    @property
    def action_space(self) -> Space:
        """What was agreed upon; an `AgentSpaces` with several agents."""
        return self._verbs.action_space

    @property
    def policy_ids(self) -> list[str]:
        """Who may act, as the bridge has told last."""
        return list(self._verbs.joined.policy_ids)

    @property
    def lease(self) -> float:
        """Seconds that the bridge keeps the episodes of a client that is gone."""
        return self._verbs.joined.lease

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
        request = self._verbs.start_episode(episode_id, training_enabled)
        episode: str = self._ask(request, timeout)
        if self.local is not None:
            self.local.begin(episode)
        return episode

    def get_action(
        self, episode_id: str, observation: Element, *, timeout: float | None = None
    ) -> Element:
        """Tell an observation, wait for an action, and return that.

        Raises:
            ActionTimeoutError: None came in time; also a TimeoutError. The observation is void.
            SpaceMismatchError: The observation is outside its space. The episode goes on.
            EpisodeError: The episode is not open, or another call for it came meanwhile.
            Exception: What the policy raised, as its own class where that is known here.
            PeerLostError: The bridge is out of reach, or was started again.
            ClosedError: This client was closed.
            QueueFullError: It chooses itself, and too many steps wait to be sent.
        """
        if self.local is not None:
            self._assert_open()
            self._verbs.check_open(episode_id)
            return self.local.get_action(episode_id, observation)
        request = self._verbs.get_action(episode_id, observation)
        return self._ask(request, self._timeouts.action if timeout is None else timeout)

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
        if self.local is not None:
            self._assert_open()
            self._verbs.check_open(episode_id)
            self.local.log_action(episode_id, observation, action)
            return
        self._ask(self._verbs.log_action(episode_id, observation, action), timeout)

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
        if self.local is not None:
            self._assert_open()
            self._verbs.check_open(episode_id)
            self.local.log_returns(episode_id, reward, info, terminateds, truncateds)
            return
        request = self._verbs.log_returns(episode_id, reward, info, terminateds, truncateds)
        self._ask(request, timeout)

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
        request = self._verbs.end_episode(
            episode_id, observation, truncated, terminateds, truncateds
        )
        if self.local is not None:
            self._assert_open()
            self.local.end(episode_id, request, self._timeouts.seconds(timeout))
            return
        self._ask(request, timeout)

    @uninterrupted_call
    def close(self) -> None:
        """Close the connection; who waits fails with `ClosedError`. Idempotent.

        Episodes that are open stay so for the bridge's lease, and end faulty then.
        """
        self._finalizer()

    def __enter__(self) -> ExternalEnvClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.address if self._finalizer.alive else "closed"
        return f"<ExternalEnvClient {self.name} {state}>"

    def _ask(self, payload: Payload, timeout: float | None) -> Any:
        frames = encode(payload, self._placeholders)
        outcome, request_id = self._link.request(payload, frames, self._timeouts.seconds(timeout))
        return self._verbs.result(payload, outcome, request_id)

    def _assert_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this client was closed")

    def _make_local(
        self, policy: PolicyOrFactory, update_interval: float, settings: LocalSettings | None
    ) -> LocalInference:
        link, verbs, placeholders = self._link, self._verbs, self._placeholders

        def ask(payload: Payload, timeout: float) -> Any:  # must not keep the client alive
            outcome, request_id = link.request(payload, encode(payload, placeholders), timeout)
            return verbs.result(payload, outcome, request_id)

        patience = self._timeouts.other
        return LocalInference(
            local_episodes(verbs, policy, settings, update_interval, patience), ask
        )


def _close(link: Link, local: LocalInference | None) -> None:
    if local is not None:
        local.stop()
    link.close()
