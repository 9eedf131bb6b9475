"""`ExternalEnvClient`: how a simulator in Python talks to a bridge, from any of its threads.

And what the client for asyncio (`aio.py`) shares with it. Leaves out the connection
(`link.py`), the protocol (`conversation.py`) and what the verbs mean (`verbs.py`).
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from envbus.actors.external.agreement import SpaceLike
from envbus.actors.external.conversation import Conversation
from envbus.actors.external.link import Link, Waiter
from envbus.actors.external.local_episodes import Choose, LocalEpisodes, Wait, Work, check_inference
from envbus.actors.external.local_policy import LocalSettings, PolicyOrFactory
from envbus.actors.external.protocol import GetAction
from envbus.actors.external.verbs import (
    ClientState,
    ClientTimeouts,
    EpisodeRequest,
    SimulatorVerbs,
    endpoint_of,
)
from envbus.actors.spaces.spaces import Space
from envbus.bus.errors import ClosedError
from envbus.bus.forking import StaysHere
from envbus.bus.interrupts import hand_out, interruptible, uninterrupted, uninterrupted_call
from envbus.bus.peer.worker import Heartbeats
from envbus.bus.transport.curve_keys import PathLike, PeerKeys
from envbus.bus.transport.local_first import LocalFirstPeer
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.messages import Failed, Request

__all__ = ["BridgeClient", "ExternalEnvClient"]

#: Seconds for which work waits without a look for Ctrl-C.
_LONGEST_WAIT = 0.1

T = TypeVar("T")


class BridgeClient(StaysHere, ABC):
    """A simulator's connection to a bridge, whoever looks at its socket.

    For arguments, attributes and errors see `ExternalEnvClient`.
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
        keys: PathLike | PeerKeys | None = None,
        server_key: PathLike | None = None,
        inference: Literal["server", "client"] = "server",
        policy: PolicyOrFactory | None = None,
        update_interval: float = 10.0,
        local: LocalSettings | None = None,
        local_links: bool = True,
    ) -> None:
        check_inference(inference, policy, update_interval)
        self.address = address = endpoint_of(address)
        self._timeouts = timeouts = ClientTimeouts.of(timeouts)
        self._state = state = ClientState(observation_space, action_space, name)
        self._heartbeat = heartbeat
        self._talk = Conversation(
            state.hello(heartbeat), state.join, state.on_joined, timeouts.patience
        )
        self.identity = identity = f"sim.{secrets.token_hex(8)}".encode()
        self._keys = peer_keys = PeerKeys.load(keys, server_key)
        self._open_transport = partial(
            LocalFirstPeer, address, identity, keys=peer_keys, local_links=local_links
        )
        self.local: LocalEpisodes | None = None
        self._make_local: Callable[[], LocalEpisodes] | None = None
        if inference == "client":
            settings = local, update_interval, timeouts.other, time.monotonic
            self._make_local = partial(LocalEpisodes, state, policy, *settings)
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Do what is left to be done to make a client."""

    @property
    def name(self) -> str:
        """For people."""
        return self._state.name

    @property
    def observation_space(self) -> Space:
        """What was agreed upon; an `AgentSpaces` with several agents."""
        return self._state.observation_space

    @property
    def action_space(self) -> Space:
        """What was agreed upon; an `AgentSpaces` with several agents."""
        return self._state.action_space

    @property
    def policy_ids(self) -> list[str]:
        """Who may act, as the bridge has told last."""
        return list(self._state.joined.policy_ids)

    @property
    def num_open(self) -> int:
        """Episodes that this client has begun, and that are not over as far as it knows."""
        return self._state.num_open

    @property
    def lease(self) -> float:
        """Seconds that the bridge keeps the episodes of a client that is gone."""
        return self._state.joined.lease


class ExternalEnvClient(BridgeClient, SimulatorVerbs):
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
            makes it (`envbus.runner.policies.policy_from_weights` does for `MlpPolicy` and ONNX).
            For all agents, which have the same spaces.
        local: Settings of that; None: the defaults.
        update_interval: Seconds between two looks for newer weights.
        local_links: Whether to reach a bridge of this user and host without ZeroMQ, if it can be.

    Attributes:
        local: What chooses here, with its `policy_version`, and how many steps are not sent yet
            (`num_unsent`) or became no rows (`num_dropped`); None: nothing does.
        address: With its scheme.
        identity: By which the bus knows this client, over all its connections.

    Raises:
        ConfigError: A setting or a key file cannot be used, or the bridge hands out no weights.
        RequestTimeoutError: No bridge has answered in time; if keys do not fit, it says so.
        SpaceMismatchError: The bridge has other spaces.
        VersionMismatchError: The bridge speaks another version of the protocol.
        ProtocolError: The bridge refuses this client.
    """

    def _begin(self) -> None:
        address, identity, keys = self.address, self.identity, self._keys
        with uninterrupted():  # libzmq waits for ever for sockets that nobody has closed
            link = Link(
                address,
                self._open_transport(),
                self._talk,
                Heartbeats(
                    lambda: ZmqPeer(address, identity + b".heartbeat", keys=keys),
                    identity,
                    self._heartbeat,
                    on_unknown=lambda: link.on_unknown(),
                ),
            )
            self._link = link
            self._finalizer = weakref.finalize(self, _close, link, None)
        try:
            link.connect(self._timeouts.connect)
            self._ask = _asker(link, self._state)
            self._inference: _LocalInference | None = None
            if self._make_local is not None:
                self.local = self._make_local()
                self._inference = _LocalInference(self.local, self._ask)
                self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _close, link, self._inference)
        except BaseException:
            self._finalizer()
            raise

    @uninterrupted_call
    def close(self) -> None:
        """Close the connection; who waits fails with `ClosedError`. Idempotent.

        Episodes that are open stay so for the bridge's lease, and end faulty then.
        """
        self._finalizer()

    def __enter__(self) -> ExternalEnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.address if self._finalizer.alive else "closed"
        return f"<ExternalEnvClient {self.name} {state}>"

    def _perform(self, request: EpisodeRequest, timeout: float | None) -> Any:
        seconds = self._timeouts.seconds(request, timeout)
        request = self._state.prepared(request)
        if self._inference is None or self.local is None:
            return self._ask(request, seconds)
        self._link.check_owner()
        if not self._finalizer.alive:
            raise ClosedError("this client was closed")
        work = self.local.perform(request, seconds)
        if isinstance(request, GetAction):
            return self._inference.act(work, request.episode_id)
        return self._inference.do(work)


class _LocalInference:
    """Does the work of a client that chooses, in the callers' threads and one of its own.

    That one sends fragments and pulls models.

    Args:
        episodes: Of the client.
        ask: `(request, seconds) -> reply`: sends and waits; may be called by any thread. Neither it
            nor anything here may keep the client alive.

    Raises:
        Exception: As `LocalEpisodes.start`.
    """

    def __init__(self, episodes: LocalEpisodes, ask: Callable[[Request[Any], float], Any]) -> None:
        self._episodes = episodes
        self._ask = ask
        #: Held while any of the episodes is touched, except that the policy chooses.
        self._changed = threading.Condition()
        #: One that asks its own client is to be told so, and not to wait for itself.
        self._choosing = threading.RLock()
        episodes.changed = self._changed.notify_all
        self.do(episodes.start())
        work = episodes.run()
        threading.Thread(target=self.do, args=(work,), name="envbus-fragments", daemon=True).start()

    def act(self, work: Work[T], episode_id: str) -> T:
        """Do what a verb of an episode asks for; what Ctrl-C keeps from the caller is not taken."""
        return hand_out(lambda: self.do(work), lambda _: self._take_back(episode_id))

    def do(self, work: Work[T]) -> T:
        """Do what work asks for; others come in while it asks, has the policy choose, or waits.

        Ctrl-C breaks these off, and nothing that is half done.
        """
        outcome: Any = None
        error: BaseException | None = None
        while True:
            with uninterrupted(), self._changed:
                try:
                    effect = work.send(outcome) if error is None else work.throw(error)
                except StopIteration as stop:
                    done: T = stop.value
                    return done
                if isinstance(effect, Wait):  # in parts, between which Ctrl-C may come
                    self._changed.wait(min(effect.seconds, _LONGEST_WAIT))
            outcome = error = None
            try:
                with interruptible():
                    if isinstance(effect, Choose):
                        with self._choosing:
                            outcome = self._episodes.choose(effect)
                    elif not isinstance(effect, Wait):
                        outcome = self._ask(*effect)
            except BaseException as exc:
                error = exc

    def _take_back(self, episode_id: str) -> None:
        with self._changed:
            self._episodes.take_back(episode_id)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._episodes.stop()


def _asker(link: Link, state: ClientState) -> Callable[[Request[Any], float], Any]:
    """Return what sends a request and waits for its answer, for so many seconds."""

    def ask(payload: Request[Any], seconds: float) -> Any:
        frames, waiter = state.encoded(payload), Waiter()
        try:
            return state.result(payload, *link.request(payload, frames, seconds, waiter))
        except BaseException:
            # Ctrl-C, or a time limit: an action may be on its way, or has come, and is not taken.
            if waiter.call is not None and not isinstance(waiter.outcome, Failed):
                state.give_up(payload, waiter.call.request_id)
            raise

    return ask


def _close(link: Link, inference: _LocalInference | None) -> None:
    if not link.is_here:
        return
    if inference is not None:
        inference.stop()
    link.close()
