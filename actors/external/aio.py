"""`AsyncExternalEnvClient`: how a simulator with an event loop talks to a bridge.

As `client.py`, over the same `conversation.py` and `verbs.py`; the socket is looked at by the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from envbus.actors.external.agreement import SpaceLike
from envbus.actors.external.conversation import Call, Conversation, Outcome
from envbus.actors.external.elements import to_wire
from envbus.actors.external.link import PROGRESS_AFTER, told_if_slow
from envbus.actors.external.local_episodes import Choose, LocalEpisodes, Wait, Work, check_inference
from envbus.actors.external.local_policy import LocalSettings, PolicyOrFactory
from envbus.actors.external.protocol import (
    EndEpisode,
    GetAction,
    LogAction,
    LogReturns,
    StartEpisode,
)
from envbus.actors.external.verbs import (
    REPLY_TYPES,
    ClientState,
    ClientTimeouts,
    EpisodeRequest,
    endpoint_of,
)
from envbus.actors.spaces import Element, Space
from envbus.bus.codec import encode
from envbus.bus.errors import (
    ClosedError,
    EnvbusError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.keys import PathLike, PeerKeys
from envbus.bus.messages import Payload
from envbus.bus.near_peer import NearPeer
from envbus.bus.transport import AT_ONE_GO

__all__ = ["AsyncExternalEnvClient"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds between looks at the clock and the connection, at most.
_SLICE = 0.5
#: Seconds for a task that was cancelled; it ends at its next turn.
_STOP_TIMEOUT = 2.0

T = TypeVar("T")


class AsyncExternalEnvClient:
    """A simulator's connection to a bridge, for asyncio.

        async with AsyncExternalEnvClient("tcp://127.0.0.1:5556") as client:
            episode = await client.start_episode()
            action = await client.get_action(episode, observation)

    The verbs and what they raise are those of `ExternalEnvClient`. Any number of tasks of one loop
    may call them; calls of one episode come one after another. A verb that is cancelled has
    reached the bridge all the same: the next one of its episode takes its place.

    Args and errors are those of `ExternalEnvClient`; the errors of connecting come out of `connect`
    or of `async with`. With `inference="client"` the loop stands still while the policy chooses.

    Attributes:
        local: What chooses here, once it is connected; None: nothing does.
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
        self.address = address = endpoint_of(address)
        self._timeouts = ClientTimeouts.of(timeouts)
        self._heartbeat = heartbeat
        self._lanes = lanes
        self._keys = PeerKeys.load(keys, server_key)
        self._state = state = ClientState(observation_space, action_space, name)
        self._placeholders = state.placeholders()
        self._talk = Conversation(
            state.hello(heartbeat), state.join, state.on_joined, self._timeouts.patience
        )
        self._policy, self._update_interval, self._settings = policy, update_interval, local
        self.local: LocalEpisodes | None = None
        #: Sends fragments and pulls models, if this client chooses.
        self._sender: asyncio.Task[None] | None = None
        #: Who waits for something to change in `local`.
        self._waiting: set[asyncio.Future[None]] = set()
        self._transport: NearPeer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._joined: asyncio.Future[None] | None = None
        self._next_beat = 0.0
        self._again: asyncio.Handle | None = None
        self._closed = False

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

    async def connect(self) -> None:
        """Join the bridge; done by `async with`.

        Raises:
            ClosedError: This client was connected before.
            ConfigError: The bridge hands out no weights, and `inference` is `"client"`.
            RequestTimeoutError: No bridge has answered in time.
            EnvbusError: Why it refuses this client.
        """
        if self._transport is not None or self._closed:
            raise ClosedError("a client connects once")
        self._loop = asyncio.get_running_loop()
        identity = f"sim.{secrets.token_hex(8)}".encode()
        self._transport = NearPeer(self.address, identity, keys=self._keys, lanes=self._lanes)
        self._joined = self._loop.create_future()
        self._loop.add_reader(self._transport.fileno(), self._look)
        self._keeper = self._loop.create_task(self._keep())
        patience = self._loop.call_later(PROGRESS_AFTER, self._tell_of_patience)
        try:
            await asyncio.wait_for(asyncio.shield(self._joined), self._timeouts.connect)
        except (asyncio.TimeoutError, TimeoutError):
            why = self._transport.trouble() or self._talk.state()
            await self.close()
            raise RequestTimeoutError(
                f"no bridge was joined at {self.address} within {self._timeouts.connect:g} s; "
                f"{why}",
                request_id=0,
                peer="bridge",
            ) from None
        except BaseException:
            await self.close()
            raise
        finally:
            patience.cancel()
        if self._policy is not None:
            try:
                await self._start_local(self._policy)
            except BaseException:
                await self.close()
                raise

    async def start_episode(
        self,
        episode_id: str | None = None,
        training_enabled: bool = True,
        *,
        timeout: float | None = None,
    ) -> str:
        """As `ExternalEnvClient.start_episode`."""
        request = StartEpisode(episode_id=episode_id, training_enabled=training_enabled)
        episode: str = await self._perform(request, timeout)
        return episode

    async def get_action(
        self, episode_id: str, observation: Element, *, timeout: float | None = None
    ) -> Element:
        """As `ExternalEnvClient.get_action`."""
        request = GetAction(episode_id=episode_id, observation=to_wire(observation))
        return await self._perform(request, timeout)

    async def log_action(
        self,
        episode_id: str,
        observation: Element,
        action: Element,
        *,
        timeout: float | None = None,
    ) -> None:
        """As `ExternalEnvClient.log_action`."""
        request = LogAction(
            episode_id=episode_id, observation=to_wire(observation), action=to_wire(action)
        )
        await self._perform(request, timeout)

    async def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None = None,
        *,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As `ExternalEnvClient.log_returns`."""
        request = LogReturns(
            episode_id=episode_id,
            reward=to_wire(reward),
            info=to_wire(info),
            terminateds=to_wire(terminateds),
            truncateds=to_wire(truncateds),
        )
        await self._perform(request, timeout)

    async def end_episode(
        self,
        episode_id: str,
        observation: Element,
        truncated: bool = False,
        *,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As `ExternalEnvClient.end_episode`."""
        request = EndEpisode(
            episode_id=episode_id,
            observation=to_wire(observation),
            truncated=truncated,
            terminateds=to_wire(terminateds),
            truncateds=to_wire(truncateds),
        )
        await self._perform(request, timeout)

    async def close(self) -> None:
        """Close the connection; who waits fails with `ClosedError`. Idempotent."""
        self._closed = True
        self._talk.end(ClosedError("this client was closed"))
        if self.local is not None:
            self.local.stop()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.wait([sender], timeout=_STOP_TIMEOUT)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        transport, self._transport = self._transport, None
        if transport is not None and self._loop is not None:
            self._loop.remove_reader(transport.fileno())
            with told_if_slow(f"the client of {self.address} is being closed"):
                with contextlib.suppress(EnvbusError):  # without a connection nobody waits for it
                    self._flush(transport)  # the goodbye
                transport.close()

    async def __aenter__(self) -> AsyncExternalEnvClient:
        await self.connect()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _tell_of_patience(self) -> None:
        logger.warning(
            "no bridge was joined at %s for %g s, and is waited for until %g s are over; %s",
            self.address,
            PROGRESS_AFTER,
            self._timeouts.connect,
            self._talk.state(),
        )

    async def _start_local(self, policy: PolicyOrFactory) -> None:
        patience = self._timeouts.other
        self.local = LocalEpisodes(
            self._state, policy, self._settings, self._update_interval, patience, time.monotonic
        )
        self.local.changed = self._wake
        await self._do(self.local, self.local.start())
        self._sender = self._running().create_task(self._do(self.local, self.local.run()))

    def _wake(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def _perform(self, request: EpisodeRequest, timeout: float | None) -> Any:
        seconds = self._timeouts.seconds(request, timeout)
        if self.local is None:
            return await self._ask(self._state.prepared(request), seconds)
        await asyncio.sleep(0)  # others are to get on, too, though nothing here waits
        self._running()
        request = self._state.prepared(request)
        return await self._do(self.local, self.local.perform(request, seconds))

    async def _do(self, local: LocalEpisodes, work: Work[T]) -> T:
        """Do what work asks for; other tasks come in while it asks or waits."""
        outcome: Any = None
        error: Exception | None = None
        while True:
            try:
                effect = work.send(outcome) if error is None else work.throw(error)
            except StopIteration as stop:
                done: T = stop.value
                return done
            outcome = error = None
            try:
                if isinstance(effect, Wait):
                    await self._wait_for_change(effect.seconds)
                elif isinstance(effect, Choose):
                    outcome = local.choose(effect)
                else:
                    outcome = await self._ask(*effect)
            except Exception as exc:
                error = exc

    async def _wait_for_change(self, seconds: float) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await asyncio.wait([changed], timeout=seconds)
        finally:
            self._waiting.discard(changed)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._transport is None or self._loop is None:
            raise ClosedError("this client is not connected, or was closed")
        return self._loop

    async def _ask(self, payload: Payload, seconds: float) -> Any:
        done: asyncio.Future[Outcome] = self._running().create_future()

        def settle(outcome: Outcome) -> None:
            if not done.done():
                done.set_result(outcome)

        now = time.monotonic()
        frames = encode(payload, self._placeholders)
        call = Call(payload, frames, REPLY_TYPES[type(payload)], now, now + seconds, settle)
        self._talk.submit(call, now)
        self._look()
        try:
            outcome = await done
        except asyncio.CancelledError:
            self._talk.abandon(call)
            self._state.give_up(payload, call.request_id)
            raise
        return self._state.result(payload, outcome, call.request_id)

    async def _keep(self) -> None:
        """Look at the clock: hello, heartbeats, deadlines, lost connections."""
        assert self._transport is not None
        talk, transport = self._talk, self._transport
        while True:
            now = time.monotonic()
            talk.tick(now, transport.lost_for(), transport.trouble())
            if talk.ready and now >= self._next_beat:
                self._next_beat = now + self._heartbeat
                talk.beat(transport.identity)
            self._look()
            due = talk.wake_at() - time.monotonic()
            await asyncio.sleep(max(min(_SLICE, self._heartbeat, due), 0.01))

    def _look(self) -> None:
        """Send what is to be sent and take what is there; also called by the loop.

        ZeroMQ's descriptor tells of changes only, and sending takes note of them too: so the
        socket is looked at after each of both.
        """
        transport, talk = self._transport, self._talk
        if transport is None:
            return
        try:
            self._flush(transport)
            for _ in range(AT_ONE_GO):
                if (frames := transport.receive(0.0)) is None:
                    break
                try:
                    talk.received(frames, time.monotonic())
                except ProtocolError as exc:
                    logger.warning("%s sent what cannot be read: %s", self.address, exc)
                self._flush(transport)
            else:
                self._look_again()
        except EnvbusError as exc:  # the socket failed
            talk.end(exc)
        joined = self._joined
        if joined is not None and not joined.done():
            if talk.refused is not None:
                joined.set_exception(talk.refused)
            elif talk.ready:
                joined.set_result(None)

    def _look_again(self) -> None:
        """Look at what is left when others of the loop have had their turn."""
        if self._again is not None:
            self._again.cancel()
        self._again = self._running().call_soon(self._look)

    def _flush(self, transport: NearPeer) -> None:
        outgoing = self._talk.outgoing
        while outgoing:
            try:
                transport.send(outgoing[0])
            except QueueFullError:
                return
            del outgoing[0]
