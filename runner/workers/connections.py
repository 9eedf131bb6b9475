"""What a worker group has its processes by: a process group, a broker, and who is who on the bus.

Leaves out what is asked of actors (`worker_group.py`, `fleet.py`) and what follows from an actor's
end (`lifecycle.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import secrets
import select
import time
from collections.abc import Sequence
from typing import Generic

import msgspec

from envbus.actors.process.joining import Bootstrap
from envbus.actors.protocol import StepResult
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.deadlines import NO_DEADLINE
from envbus.bus.broker.events import MAX_HEARTBEAT, BrokerConfig
from envbus.bus.broker.loop import Broker
from envbus.bus.complaints import Lines
from envbus.bus.errors import ClosedError, EnvbusError, StartError, TransportError
from envbus.bus.folders import keep_endpoint, name_folder
from envbus.bus.peer.worker import PlainCodec
from envbus.bus.process.pipe import Pipe, PipeCodec
from envbus.bus.process.process_group import ProcessGroup
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.curve_keys import BrokerKeys, Entrance
from envbus.bus.transport.interface import RouterTransport
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST, LocalLinkEnd
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.transport.unix_sockets import wait_for
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.runner.errors import FaultCause
from envbus.runner.workers.config import FleetConfig, choose_start_method
from envbus.runner.workers.worker import ActorState, M

__all__ = ["Connections"]

logger = logging.getLogger("envbus.runner.workers.fleet")

#: Requests that one actor may have in flight: one per slot in the pool, and some for calls.
_IN_FLIGHT_PER_ACTOR = 4096
#: Passed descriptors that are taken out of a pipe at one look; twice as many are kept, each a
#: descriptor.
_DRAINED = 8


class Connections(Generic[M]):
    """Starts the processes of actors, knows their peers, and ends them.

    Args:
        actors: All of the worker group.
        config: How they are started and reached.
        entry: What a process of theirs runs, `"module:function"`; the fork server imports it.

    Attributes:
        process_group: The processes of the actors on this host.
        broker: What all actors are asked through.

    Raises:
        ConfigError: The endpoints cannot be bound as they are guarded.
        TransportError: They cannot be bound at all.
    """

    def __init__(self, actors: Sequence[M], config: FleetConfig, entry: str) -> None:
        self._actors = actors
        self._entry = entry
        self._method = choose_start_method(config.context)
        self._num_local = len(actors) - config.remote_actors
        timeout = config.timeouts.start
        self._start_timeout = NO_DEADLINE if timeout is None else timeout
        self._wait = config.wait
        self._by_identity: dict[bytes, M] = {}
        #: At the close: routing ids of those that have to be asked to leave.
        self._untold: list[bytes] = []
        #: Remote actors that joined and have no envs: routing id and name.
        self._spares: dict[bytes, str] = {}
        self._lines = Lines(logger)
        directory = name_folder()
        #: Where actors without local links come in. Beside TCP that is not the one in the folder.
        self._ipc_endpoint = f"ipc://{directory}/bus"
        self._entrance = Entrance(self._ipc_endpoint)
        #: Who is bound in the folder; None: nobody.
        self._private: ZmqRouter | None = None
        #: Carries the messages of local actors; None: ROUTER and DEALER do.
        self._local_links: LocalRouter | None = None
        self.process_group = ProcessGroup(
            (entry.partition(":")[0], *config.preload),
            directory=directory,
            threads_per_process=config.threads_per_process,
            processes=self._num_local,
        )
        try:
            router = self._make_router(config)
        except BaseException:
            self.process_group.close(0.0)
            raise
        limits = BrokerConfig(
            max_in_flight_per_peer=_IN_FLIGHT_PER_ACTOR,
            max_heartbeat=MAX_HEARTBEAT if config.bind else math.inf,
        )
        self.broker = Broker(router, BrokerCore(limits))
        self.broker.watch(self.process_group.fileno())

    @property
    def ringing_links(self) -> LocalRouter | None:
        """The local links, on which actors can ring; None: not all actors have one."""
        return None if any(actor.remote for actor in self._actors) else self._local_links

    @property
    def spins(self) -> bool:
        """Whether the owner and its actors spin in short waits."""
        if self._wait != "auto":
            return self._wait == "spin"
        # One more than there are cores: each gives its core away after a few looks (DECISIONS 138).
        return self._num_local <= usable_cores() > 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What remote actors join at; a `*` port is replaced by the real one."""
        return tuple(e for e in self.broker.endpoints if e != self._ipc_endpoint)

    def launch(self, actor: M) -> None:
        """Start an actor's process; its hello comes through the broker.

        A remote actor is not started: it waits for one that joins (`join`, `engage`).

        Raises:
            StartError: There is no process or no memory for it.
        """
        actor.state = ActorState.STARTING
        actor.abandoned = 0
        actor.kill_reason = None
        if actor.remote:
            actor.identity, actor.peer_name = b"", ""
            return
        self._keep_endpoint()
        actor.identity = f"{actor.name}.{actor.incarnation}.{secrets.token_hex(4)}".encode()
        self.broker.expect(actor.identity, actor.name, actor.incarnation)
        if actor.child is not None:
            actor.child.pipe.close()  # all that it sent was taken
        actor.child = self.process_group.start(
            actor.name, self._entry, method=self._method, timeout=self._start_timeout
        )
        actor.codec = PipeCodec(actor.child.pipe, lenient=(StepResult,), writable=True)
        self._by_identity[actor.identity] = actor
        bootstrap = Bootstrap(
            entrance=self._entrance if self._local_links is None else None,
            identity=actor.identity,
            name=actor.name,
            incarnation=actor.incarnation,
            spin=self.spins,
            capacity=_IN_FLIGHT_PER_ACTOR,
            authkey=bytes(multiprocessing.current_process().authkey),
        )
        try:
            self._equip(actor.child.pipe, bootstrap)
        except ClosedError:
            logger.info("%s ended at once", actor.describe())  # which its exit will tell
        except (OSError, TransportError) as exc:
            self.process_group.kill(actor.child)
            raise StartError(f"{actor.name} cannot be told what it is to do: {exc}") from exc

    def _keep_endpoint(self) -> None:
        """See that actors without local links can come in, also if TMPDIR was cleaned up meanwhile.

        Raises:
            StartError: They cannot.
        """
        if self._private is None:
            return
        try:
            keep_endpoint(self._ipc_endpoint, self._private.bind_private)
        except TransportError as exc:
            raise StartError(str(exc)) from exc

    def _equip(self, pipe: Pipe, bootstrap: Bootstrap) -> None:
        """Send a process what it begins with.

        Raises:
            ClosedError: It has ended.
            TransportError, OSError: There is no memory or descriptor for it.
        """
        pipe.send(msgspec.msgpack.encode(bootstrap))
        if self._local_links is None:
            return
        ours, theirs = LocalLinkEnd.pair()
        try:
            pipe.send_fd(pipe.next_number(), theirs.fileno())
            self._local_links.add_local_link(bootstrap.identity, ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    # --- who is who --------------------------------------------------------------------------

    def actor_of(self, peer: bytes) -> M | None:
        """Return which actor a peer is, or None: a spare, or one that is gone."""
        return self._by_identity.get(peer)

    def join(self, peer: bytes, name: str) -> None:
        """Keep a remote actor that said hello until `engage` takes it."""
        self._lines.add(logging.INFO, f"remote actor {name} joined")
        self._spares[peer] = name

    def engage(self) -> M | None:
        """Give a remote actor that has joined to one that waits for it; None: there is no pair."""
        if not self._spares:
            return None
        for actor in self._actors:
            if actor.remote and actor.state is ActorState.STARTING and not actor.identity:
                actor.identity = next(iter(self._spares))  # who has waited for longest
                actor.peer_name = self._spares.pop(actor.identity)
                actor.codec = PlainCodec(writable=True)
                self._by_identity[actor.identity] = actor
                return actor
        return None

    def leave(self, peer: bytes) -> M | None:
        """Forget a peer that left; return the remote actor that it was, if any.

        An own child's end is told by the exit of its process.
        """
        self._spares.pop(peer, None)
        actor = self._by_identity.get(peer)
        if actor is None or not actor.remote:
            return None
        del self._by_identity[peer]
        return actor

    def drain_pipes(self, *, everyone: bool) -> None:
        """Take what answers that were given up have left in the pipes.

        Else they fill up, and actors wait for room. To be called when all messages that had come
        were taken: what belongs to those that come meanwhile is among what is kept.

        Args:
            everyone: Also of actors that have answered all that was given up.
        """
        for actor in self._actors:
            if (everyone or actor.is_behind) and actor.child is not None:
                pipe = actor.child.pipe
                with contextlib.suppress(EnvbusError):  # who is told what belongs to it says so
                    if pipe.is_filling_up():
                        pipe.drain(_DRAINED, 2 * _DRAINED)

    # --- end ---------------------------------------------------------------------------------

    def kill(self, actor: M, cause: FaultCause = FaultCause.CRASH, reason: str = "") -> None:
        """Kill an actor's process tree; its end follows, with `cause` and `reason`."""
        if actor.kill_reason is None:
            actor.kill_reason = (cause, reason)
        if actor.state is not ActorState.LOST:
            actor.state = ActorState.DOWN
        if actor.remote and actor.identity:  # out of reach: it is left to itself
            self.broker.peer_gone(actor.identity, reason or "it is given up")
        if actor.child is not None:
            self.process_group.kill(actor.child)

    def end(self, actor: M) -> None:
        """Treat an actor that cannot be reached as ended, and see to it that it is."""
        if actor.state not in (ActorState.DOWN, ActorState.LOST):
            self.kill(actor)

    def cut(self, actor: M, reason: str) -> None:
        """Fail all that an actor holds whose process has ended."""
        self._by_identity.pop(actor.identity, None)
        self.broker.peer_gone(actor.identity, reason)

    def drop_local_link(self, actor: M) -> None:
        """Let go of the socket of an actor that has ended, once all that it sent was taken."""
        if self._local_links is not None:
            self._local_links.drop_local_link(actor.identity)

    def close(self, allowed: float, *, terminate: bool, hears: bool = False) -> None:
        """Ask all actors to leave within `allowed` seconds and kill the others, or kill all.

        Args:
            allowed: Seconds.
            terminate: Do not ask, kill.
            hears: Take what they still say meanwhile. Not where the broker is in use.
        """
        try:
            if not terminate:
                for actor in self._actors:
                    if actor.state is ActorState.STARTING and actor.child is not None:
                        self.process_group.kill(
                            actor.child
                        )  # it has no envs, and does not listen yet
                    elif actor.identity and actor.state is not ActorState.DOWN:
                        self._untold.append(actor.identity)
                self._untold += self._spares
                self._ask_to_leave()
            wait = self._hear_out if hears and not terminate else None
            for child in self.process_group.close(allowed, wait):
                if not terminate:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, allowed)
            if terminate:  # nobody here can kill those elsewhere
                with contextlib.suppress(ClosedError):  # a call that Ctrl-C broke off closed it
                    for actor in self._actors:
                        if actor.remote and actor.identity and actor.state is not ActorState.DOWN:
                            self.broker.shut_down(actor.identity)
                    for peer in self._spares:
                        self.broker.shut_down(peer)
        finally:  # also after Ctrl-C
            for actor in self._actors:
                if actor.child is not None:
                    actor.child.pipe.close()
            self.broker.close()

    def _hear_out(self, deadline: float) -> bool:
        """Wait for processes to end; return whether one may have.

        Answers are taken and dropped, and what waits for room is sent: an actor that waits for room
        itself, or that has not been told to leave, would never leave.
        """
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                self.broker.poll(left)
                self._ask_to_leave()
            except (EnvbusError, MemoryError):  # then without
                return bool(wait_for(self.process_group, select.POLLIN, deadline))
            for actor in self._actors:
                if actor.child is not None:
                    with contextlib.suppress(EnvbusError):  # it has ended
                        actor.child.pipe.drain()
            if wait_for(self.process_group, select.POLLIN, 0.0):
                return True
            if not left:
                return False

    def _ask_to_leave(self) -> None:
        """Ask those to leave that were not asked yet, as there was no room for it."""
        self._untold = [peer for peer in self._untold if not self.broker.shut_down(peer)]

    def _make_router(self, config: FleetConfig) -> RouterTransport:
        with_local_links = config.local_links and LOCAL_LINKS_EXIST
        by_tcp = any(endpoint.startswith("tcp:") for endpoint in config.bind)
        private = [] if with_local_links or by_tcp else [self._ipc_endpoint]
        router = None
        if private or config.bind:
            keys = BrokerKeys.load(config.keys, config.allow)
            router = ZmqRouter(config.bind, private=private, keys=keys, insecure=config.insecure)
        if with_local_links or router is None:
            self._local_links = LocalRouter(router, spin=self.spins)
            return self._local_links
        if (own := router.own_tcp) is not None:
            self._entrance = own
        else:
            self._private = router
        return router
