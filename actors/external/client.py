"""`ExternalEnvClient`: how a simulator in Python talks to a bridge, from any of its threads.

Leaves out the protocol (`conversation.py`) and what the verbs mean (`verbs.py`).

There is no thread between a caller and the socket: of the callers that wait, one *leads*, which
means that it sends and receives for all. When it has its answer another one takes over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from envbus.actors.external.agreement import SpaceLike
from envbus.actors.external.conversation import GRACE, Call, Conversation, Outcome
from envbus.actors.external.fragments import Fragments
from envbus.actors.external.local_inference import LocalInference
from envbus.actors.external.local_policy import LocalPolicy, LocalSettings, PolicyOrFactory
from envbus.actors.external.verbs import REPLY_TYPES, ClientTimeouts, Verbs
from envbus.actors.spaces import Element, Space
from envbus.bus.codec import encode
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.keys import PathLike, PeerKeys
from envbus.bus.messages import Payload
from envbus.bus.serve import Heartbeats
from envbus.bus.zmq_transport import ZmqPeer

__all__ = ["ExternalEnvClient"]

logger = logging.getLogger("envbus.actors.external")

#: Longest wait of who leads, in seconds, between looks at the connection.
_SLICE = 0.5


class ExternalEnvClient:
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

    Args:
        address: Of the bridge, e.g. `"tcp://127.0.0.1:5556"`.
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

    Attributes:
        local: What chooses here; None: nothing does.

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
    ) -> None:
        if inference not in ("server", "client"):
            raise ConfigError(f'inference must be "server" or "client", not {inference!r}')
        if (policy is None) != (inference == "server"):
            raise ConfigError('policy belongs to inference="client", which needs one')
        if not 0.0 < update_interval < 1e9:
            raise ConfigError(f"update_interval must be positive and finite, not {update_interval}")
        self._timeouts = timeouts or ClientTimeouts()
        if not 0.0 < heartbeat <= 60.0:
            raise ConfigError(f"heartbeat must be over 0 and at most 60 s, not {heartbeat}")
        self._verbs = Verbs(observation_space, action_space, name)
        self._placeholders = self._verbs.placeholders()
        self.address = address
        peer_keys = PeerKeys.load(keys, server_key)
        identity = f"sim.{secrets.token_hex(8)}".encode()
        self._link = _Link(
            address,
            ZmqPeer(address, identity, keys=peer_keys),
            Conversation(
                self._verbs.hello(heartbeat),
                self._verbs.join,
                self._verbs.on_joined,
                self._timeouts.patience,
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
                self.local = self._make_local(policy, update_interval, local or LocalSettings())
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

        Raises as `get_action`; a time-out is a `RequestTimeoutError`.
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
            self.local.end(episode_id, request, self._seconds(timeout))
            return
        self._ask(request, timeout)

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
        outcome, request_id = self._link.request(payload, frames, self._seconds(timeout))
        return self._verbs.result(payload, outcome, request_id)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._timeouts.other
        if not 0.0 < timeout < 1e9:
            raise ConfigError(f"timeout must be positive and finite, not {timeout}")
        return timeout

    def _assert_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this client was closed")

    def _make_local(
        self, policy: PolicyOrFactory, update_interval: float, settings: LocalSettings
    ) -> LocalInference:
        link, verbs, placeholders = self._link, self._verbs, self._placeholders

        def ask(payload: Payload, timeout: float) -> Any:  # must not keep the client alive
            outcome, request_id = link.request(payload, encode(payload, placeholders), timeout)
            return verbs.result(payload, outcome, request_id)

        policy_id = settings.policy_id or verbs.joined.policy_ids[0]
        return LocalInference(
            verbs,
            ask,
            LocalPolicy(
                policy, self.observation_space, self.action_space, explore=settings.explore
            ),
            policy_id,
            Fragments(
                policy_id,
                settings.fragment_length,
                settings.max_unsent,
                multi_agent=verbs.joined.multi_agent,
            ),
            update_interval,
            self._timeouts.other,
        )


def _close(link: _Link, local: LocalInference | None) -> None:
    if local is not None:
        local.stop()
    link.close()


class _Waiter:
    """A caller and what it waits for."""

    __slots__ = ("bell", "call", "leads", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.call: Call | None = None
        #: Whether it has to lead now.
        self.leads = False
        #: Locked while it waits for another thread; None: it never did.
        self.bell: threading.Lock | None = None

    def settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        if self.bell is not None and self.bell.locked():
            self.bell.release()


class _Link:
    """The socket, and who leads."""

    def __init__(
        self,
        address: str,
        transport: ZmqPeer,
        conversation: Conversation,
        heartbeats: Heartbeats,
    ) -> None:
        self._address = address
        self._transport = transport
        self._conversation = conversation
        self._heartbeats = heartbeats
        self._owner = os.getpid()
        #: Guards what follows. Transport and conversation belong to who leads.
        self._mutex = threading.Lock()
        self._led = False
        self._orders: deque[tuple[_Waiter, Call]] = deque()
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        self._rung = False
        self._unknown = False
        self._waker, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        transport.watch(self._ear.fileno())

    def connect(self, timeout: float) -> None:
        """Join the bridge; raises `RequestTimeoutError`, or why it refuses."""
        talk, nobody = self._conversation, _Waiter()
        self._led = True
        try:
            self._heartbeats.start()
            deadline = time.monotonic() + timeout
            while not talk.ready:
                if talk.refused is not None:
                    raise talk.refused
                now = time.monotonic()
                if now >= deadline:
                    why = self._transport.trouble() or "is it running, and is the address right?"
                    raise RequestTimeoutError(
                        f"no bridge answered at {self._address} within {timeout:g} s; {why}",
                        request_id=0,
                        peer="bridge",
                    )
                self._turn(min(deadline - now, _SLICE / 5), nobody)
        finally:
            self._led = False

    def request(self, payload: Payload, frames: Any, timeout: float) -> tuple[Outcome, int]:
        """Return how a request has ended, and its id."""
        now = time.monotonic()
        waiter = _Waiter()
        call = waiter.call = Call(
            payload, frames, REPLY_TYPES[type(payload)], now, now + timeout, waiter.settle
        )
        with self._mutex:
            if self._closed:
                raise ClosedError("this client was closed")
            if self._owner != os.getpid():
                raise ClosedError(
                    f"this client belongs to process {self._owner}; make a new one here"
                )
            if self._led:
                waiter.bell = threading.Lock()
                waiter.bell.acquire()
                self._orders.append((waiter, call))
                self._waiters[waiter] = None
                self._ring()
            else:
                self._led = waiter.leads = True
        if waiter.bell is None:
            self._conversation.submit(call, now)
        else:
            self._follow(waiter, waiter.bell, timeout)
        if waiter.leads:
            self._lead(waiter)
        assert waiter.outcome is not None
        return waiter.outcome, call.request_id

    def _follow(self, waiter: _Waiter, bell: threading.Lock, timeout: float) -> None:
        """Wait until who leads has the answer, or leaves the lead to this one."""
        try:
            # Whoever leads judges the deadline; beyond it only a bug keeps one waiting.
            if not bell.acquire(timeout=timeout + 10 * GRACE):
                raise AssertionError("nobody leads")
        except BaseException:  # Ctrl-C
            if waiter.leads:
                self._hand_over(waiter)
            raise
        finally:
            with self._mutex:
                if not waiter.leads:
                    self._waiters.pop(waiter, None)

    def on_unknown(self) -> None:
        """The broker does not know this client any more; called in the heartbeats' thread."""
        self._unknown = True
        with self._mutex:
            self._ring()

    def close(self) -> None:
        """Wake everybody up, and close when nobody leads any more. Idempotent."""
        if self._owner != os.getpid():
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._ring()
            alone = not self._led
        if alone:
            self._end()
        self._heartbeats.stop()

    def _ring(self) -> None:
        """Let who leads look at the orders; the mutex is held."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                self._waker.send(b".")

    def _lead(self, waiter: _Waiter) -> None:
        """Send and receive for all, until this one's answer is there; then hand over."""
        try:
            self._flush()
            while waiter.outcome is None:
                self._turn(_SLICE, waiter)
        except BaseException:  # Ctrl-C: nobody waits for that answer any more
            if waiter.call is not None:
                self._conversation.abandon(waiter.call)
            raise
        finally:
            self._hand_over(waiter)

    def _hand_over(self, waiter: _Waiter) -> None:
        with self._mutex:
            self._waiters.pop(waiter, None)
            for other in self._waiters:
                if other.outcome is None:
                    other.leads = True
                    other.wake()
                    return
            self._led = False
            ending = self._closed
        if ending:
            self._end()

    def _turn(self, timeout: float, waiter: _Waiter) -> None:
        """Wait for a message, a bell or the time, and do what follows.

        What comes behind this one's answer is left to who leads next.
        """
        transport, talk = self._transport, self._conversation
        now = time.monotonic()
        patience = min(timeout, max(talk.wake_at() - now, 0.0))
        silent = not transport.wait(patience)
        now = time.monotonic()
        while waiter.outcome is None and (frames := transport.receive(0.0)) is not None:
            try:
                talk.received(frames, now)
            except ProtocolError as exc:
                logger.warning("%s sent what cannot be read: %s", self._address, exc)
        if self._rung:
            self._take_orders(now)
        if self._unknown:
            self._unknown = False
            talk.forgotten()
        if silent or not talk.ready:
            lost_for = transport.lost_for()
            talk.tick(now, lost_for, transport.trouble())
        self._flush()

    def _take_orders(self, now: float) -> None:
        with self._mutex:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(64)
            orders, self._orders = self._orders, deque()
            closed = self._closed
        for _, call in orders:
            self._conversation.submit(call, now)
        if closed:
            self._conversation.end(ClosedError("this client was closed"))

    def _flush(self) -> None:
        outgoing = self._conversation.outgoing
        while outgoing:
            try:
                self._transport.send(outgoing[0])
            except QueueFullError:
                return  # tried again with the next turn; each request has its time
            del outgoing[0]

    def _end(self) -> None:
        """Close the socket; nobody leads, and nobody will."""
        self._transport.close()
        self._waker.close()
        self._ear.close()
