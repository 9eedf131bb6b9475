"""`AsyncExternalEnvClient`: how a simulator with an event loop talks to a bridge.

As `client.py`, over the same `conversation.py` and `verbs.py`; the socket is looked at by the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from envbus.actors.external.client import BridgeClient
from envbus.actors.external.conversation import BridgeCall, Outcome
from envbus.actors.external.link import SLICE, flush, not_joined, told_if_slow, warn_not_joined
from envbus.actors.external.local_episodes import Choose, LocalEpisodes, Wait, Work
from envbus.actors.external.protocol import StartEpisode
from envbus.actors.external.verbs import EpisodeRequest, SimulatorVerbs, awaited
from envbus.bus.complaints import PROGRESS_AFTER
from envbus.bus.errors import ClosedError, EnvbusError, ProtocolError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted
from envbus.bus.transport.interface import AT_ONE_GO
from envbus.bus.transport.local_first import LocalFirstPeer
from envbus.bus.wire.messages import Request

__all__ = ["AsyncExternalEnvClient"]

logger = logging.getLogger("envbus.actors.external")

#: Seconds for tasks that were cancelled; they end at their next turn.
_STOP_TIMEOUT = 2.0

T = TypeVar("T")


class AsyncExternalEnvClient(BridgeClient):
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

    def _begin(self) -> None:
        #: Sends fragments and pulls models, if this client chooses.
        self._sender: asyncio.Task[None] | None = None
        #: Who waits for something to change in `local`.
        self._waiting: set[asyncio.Future[None]] = set()
        self._transport: LocalFirstPeer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._joined: asyncio.Future[None] | None = None
        self._next_beat = 0.0
        self._again: asyncio.Handle | None = None
        self._closed = False

    start_episode = awaited(SimulatorVerbs.start_episode)
    get_action = awaited(SimulatorVerbs.get_action)
    log_action = awaited(SimulatorVerbs.log_action)
    log_returns = awaited(SimulatorVerbs.log_returns)
    end_episode = awaited(SimulatorVerbs.end_episode)

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
        disown_in_forks(self)
        with uninterrupted():  # libzmq waits for ever for sockets that nobody has closed
            self._transport = transport = self._open_transport()
            self._finalizer = weakref.finalize(self, transport.close)
        self._joined = self._loop.create_future()
        self._loop.add_reader(transport.fileno(), self._look)
        self._keeper = self._loop.create_task(self._keep())
        seconds, told = self._timeouts.connect, (self.address, transport, self._talk)
        patience = self._loop.call_later(PROGRESS_AFTER, warn_not_joined, seconds, *told)
        try:
            try:
                await asyncio.wait_for(asyncio.shield(self._joined), seconds)
            except (asyncio.TimeoutError, TimeoutError):
                raise not_joined(seconds, *told) from None
            finally:
                patience.cancel()
            if self._make_local is not None:
                await self._start_local(self._make_local)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; who waits fails with `ClosedError`. Idempotent."""
        self._closed = True
        self._talk.end(ClosedError("this client was closed"))
        if self.local is not None:
            self.local.stop()
        tasks = [task for task in (self._sender, self._keeper) if task is not None]
        self._sender = self._keeper = None
        if self._is_loop_over():
            tasks = []  # they ended with it
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_TIMEOUT)
        finally:  # also if this is cancelled
            self._disconnect()

    def disown(self) -> None:
        """In a forked copy: be closed, without a word to anybody.

        Its loop is left alone: the copy shares its epoll with the owner's.
        """
        self._closed = True
        self._transport = self._sender = self._keeper = self.local = None

    def _disconnect(self) -> None:
        """Say goodbye, and close the socket."""
        transport, self._transport = self._transport, None
        if transport is not None:
            if self._loop is not None and not self._is_loop_over():
                self._loop.remove_reader(transport.fileno())
            with told_if_slow(f"the client of {self.address} is being closed"):
                with contextlib.suppress(EnvbusError):  # without a connection nobody waits for it
                    flush(transport, self._talk)  # the goodbye
                self._finalizer()

    def _is_loop_over(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    async def __aenter__(self) -> AsyncExternalEnvClient:
        await self.connect()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _start_local(self, make: Callable[[], LocalEpisodes]) -> None:
        self.local = make()
        self.local.changed = self._wake
        await self._do(self.local, self.local.start())
        self._sender = self._running().create_task(self._do(self.local, self.local.run()))

    def _wake(self) -> None:
        for one in self._waiting:
            if not one.done() and not self._is_loop_over():
                one.set_result(None)

    async def _perform(self, request: EpisodeRequest, timeout: float | None) -> Any:
        seconds = self._timeouts.seconds(request, timeout)
        if self.local is None:
            return await self._ask(self._state.prepared(request), seconds)
        try:
            await asyncio.sleep(0)  # others are to get on, too, though nothing here waits
        except asyncio.CancelledError:
            if not isinstance(request, StartEpisode):  # which was not sent
                self._note(self.local, request)
            raise
        self._running()
        request = self._state.prepared(request)
        return await self._do(self.local, self.local.perform(request, seconds))

    def _note(self, local: LocalEpisodes, request: EpisodeRequest) -> None:
        """A verb was cancelled before it began: what was logged counts all the same.

        An observation has got no answer, or a row would lead over it.
        """
        with contextlib.suppress(Exception):  # the end of what only logs; or it would have failed
            work = local.perform(self._state.prepared(request), 0.0)
            next(work)
            work.close()

    async def _do(self, local: LocalEpisodes, work: Work[T]) -> T:
        """Do what work asks for; other tasks come in while it asks or waits."""
        outcome: Any = None
        error: BaseException | None = None
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
            except BaseException as exc:  # also where this is cancelled
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

    async def _ask(self, payload: Request[Any], seconds: float) -> Any:
        loop = self._running()
        done: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not done.done() and not loop.is_closed():
                done.set_result(outcome)

        now = time.monotonic()
        frames = self._state.encoded(payload)
        call = BridgeCall(payload, frames, payload.reply_type, now, now + seconds, settle)
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
        while self._transport is not None:
            try:
                due = self._look_at_clock()
            except Exception:  # memory ran out, e.g.: without a clock verbs would wait for ever
                logger.exception("the client of %s looks at its clock again", self.address)
                due = SLICE
            await asyncio.sleep(max(min(SLICE, self._heartbeat, due), 0.01))

    def _look_at_clock(self) -> float:
        """Do what the time asks for; return in how many seconds it asks again."""
        assert self._transport is not None
        talk, transport = self._talk, self._transport
        now = time.monotonic()
        talk.tick(now, transport.lost_for(), transport.trouble())
        if talk.ready and now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            talk.beat(transport.identity)
        self._look()
        return talk.wake_at() - time.monotonic()

    def _look(self) -> None:
        """Send what is to be sent and take what is there; also called by the loop.

        ZeroMQ's descriptor tells of changes only, and sending takes note of them too: so the
        socket is looked at after each of both.
        """
        transport, talk = self._transport, self._talk
        if transport is None:
            return
        try:
            flush(transport, talk)
            for _ in range(AT_ONE_GO):
                if (frames := transport.receive(0.0)) is None:
                    break
                try:
                    talk.received(frames, time.monotonic())
                except ProtocolError as exc:
                    logger.warning("%s sent what cannot be read: %s", self.address, exc)
                flush(transport, talk)
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
