"""What a crew has its processes by: a nursery of processes, a broker, and who is who on the bus.

Leaves out what is asked of actors (`crew.py`, `fleet.py`) and what follows from an actor's
end (`endings.py`).
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import secrets
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from envbus.actors.hosting import BOOTSTRAP_PARCEL, LANE_PARCEL, Bootstrap
from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import MAX_HEARTBEAT, BrokerConfig
from envbus.bus.errors import ClosedError, StartError, TransportError
from envbus.bus.folders import make_folder, name_folder
from envbus.bus.keys import BrokerKeys
from envbus.bus.lane import LANES_EXIST, LaneEnd, usable_cores
from envbus.bus.lane_router import LaneRouter
from envbus.bus.nursery import Nursery
from envbus.bus.pipe import Pipe, PipeCodec
from envbus.bus.serve import PlainCodec
from envbus.bus.transport import RouterTransport
from envbus.bus.zmq_sockets import ZmqRouter
from envbus.runner.actor import ActorState, Member
from envbus.runner.config import FleetConfig, choose_start_method
from envbus.runner.faults import FaultCause

__all__ = ["Links", "usable_cores"]

M = TypeVar("M", bound=Member)
logger = logging.getLogger("envbus.runner.fleet")

#: Requests that one actor may have in flight: one per slot in the pool, and some for calls.
_IN_FLIGHT_PER_ACTOR = 4096


class Links(Generic[M]):
    """Starts the processes of actors, knows their peers, and ends them.

    Args:
        actors: All of the crew.
        config: How they are started and reached.
        entry: What a process of theirs runs, `"module:function"`; the fork server imports it.

    Attributes:
        nursery: The processes of the actors on this host.
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
        self._wait = config.wait
        self._by_identity: dict[bytes, M] = {}
        #: Remote actors that joined and have no envs: routing id and name.
        self._spares: dict[bytes, str] = {}
        self._directory = name_folder()
        #: Where actors without lanes come in, and who is bound there; None: there are none.
        self._ipc_endpoint = self._first_endpoint = f"ipc://{self._directory}/bus"
        self._private: ZmqRouter | None = None
        #: Carries the messages of local actors; None: ROUTER and DEALER do.
        self._lanes: LaneRouter | None = None
        self.nursery = Nursery(
            (entry.partition(":")[0], *config.preload),
            directory=self._directory,
            threads_per_process=config.threads_per_process,
            processes=self._num_local,
        )
        try:
            router = self._make_router(config)
        except BaseException:
            self.nursery.close(0.0)
            raise
        limits = BrokerConfig(
            max_in_flight_per_peer=_IN_FLIGHT_PER_ACTOR,
            max_heartbeat=MAX_HEARTBEAT if config.bind else math.inf,
        )
        self.broker = Broker(router, BrokerCore(limits))
        self.broker.watch(self.nursery.fileno())

    @property
    def can_doze(self) -> bool:
        """Whether all actors are on this host and have a lane, on which they can ring."""
        return self._lanes is not None and not any(actor.remote for actor in self._actors)

    def ring(self, actor: M) -> None:
        """Wake an actor that sleeps, and that a word asks."""
        assert self._lanes is not None
        self._lanes.ring(actor.identity)

    def doze(self, timeout: float) -> bool:
        """Sleep until an actor rings; see `LaneRouter.doze`."""
        assert self._lanes is not None
        return self._lanes.doze(timeout)

    @property
    def spins(self) -> bool:
        """Whether the owner spins in short waits."""
        if self._wait != "auto":
            return self._wait == "spin"
        return self._num_local <= usable_cores() > 1

    def _may_spin(self, actor: M) -> bool:
        if self._wait != "auto":
            return self._wait == "spin"
        # One who spins per core, and the runner is one.
        return self._num_local <= usable_cores() and actor.index < usable_cores() - 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What remote actors join at; a `*` port is replaced by the real one."""
        return tuple(e for e in self.broker.endpoints if e != self._first_endpoint)

    def launch(self, actor: M) -> None:
        """Start an actor's process; its hello comes through the broker.

        A remote actor is not started: it waits for one that joins (`join`, `engage`).

        Raises:
            StartError: There is no process or no memory for it.
        """
        actor.state = ActorState.STARTING
        actor.abandoned = 0
        actor.doom = None
        if actor.remote:
            actor.identity, actor.peer_name = b"", ""
            return
        self._keep_door()
        actor.identity = f"{actor.name}.{actor.incarnation}.{secrets.token_hex(4)}".encode()
        self.broker.expect(actor.identity, actor.name, actor.incarnation)
        if actor.child is not None:
            actor.child.pipe.close()  # all that it sent was taken
        actor.child = self.nursery.start(actor.name, self._entry, method=self._method)
        actor.codec = PipeCodec(actor.child.pipe, writable=True)
        self._by_identity[actor.identity] = actor
        bootstrap = Bootstrap(
            endpoint="" if self._lanes is not None else self._ipc_endpoint,
            identity=actor.identity,
            name=actor.name,
            incarnation=actor.incarnation,
            spin=self._may_spin(actor),
            capacity=_IN_FLIGHT_PER_ACTOR,
            authkey=bytes(multiprocessing.current_process().authkey),
        )
        try:
            self._equip(actor.child.pipe, bootstrap)
        except ClosedError:
            logger.info("%s ended at once", actor.describe())  # which its exit will tell
        except (OSError, TransportError) as exc:
            self.nursery.kill(actor.child)
            raise StartError(f"{actor.name} cannot be told what it is to do: {exc}") from exc

    def _keep_door(self) -> None:
        """See that actors without lanes can come in, also if TMPDIR was cleaned up meanwhile.

        Raises:
            StartError: They cannot.
        """
        if self._private is None or os.path.exists(self._ipc_endpoint.removeprefix("ipc://")):
            return
        if not make_folder(self._directory):
            raise StartError(f"{self._directory} was removed, and cannot be made again")
        # Another name: to unbind the former one ends the connections of those who came in there.
        endpoint = f"{self._first_endpoint}.{secrets.token_hex(4)}"
        try:
            self._private.bind_private(endpoint)
        except TransportError as exc:
            raise StartError(str(exc)) from exc
        self._ipc_endpoint = endpoint

    def _equip(self, pipe: Pipe, bootstrap: Bootstrap) -> None:
        """Send a process what it begins with.

        Raises:
            ClosedError: It has ended.
            TransportError, OSError: There is no memory or descriptor for it.
        """
        number = pipe.next_number()
        assert number == BOOTSTRAP_PARCEL
        pipe.send_bytes(number, msgspec.msgpack.encode(bootstrap))
        if self._lanes is None:
            return
        ours, theirs = LaneEnd.pair()
        try:
            number = pipe.next_number()
            assert number == LANE_PARCEL
            pipe.send_fd(number, theirs.fileno())
            self._lanes.add_lane(bootstrap.identity, ours)
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
        logger.info("remote actor %s joined", name)
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

    # --- end ---------------------------------------------------------------------------------

    def kill(self, actor: M, cause: FaultCause = FaultCause.CRASH, reason: str = "") -> None:
        """Kill an actor's process tree; its end follows, with `cause` and `reason`."""
        if actor.doom is None:
            actor.doom = (cause, reason)
        if actor.state is not ActorState.LOST:
            actor.state = ActorState.DOWN
        if actor.remote and actor.identity:  # out of reach: it is left to itself
            self.broker.peer_gone(actor.identity, reason or "it is given up")
        if actor.child is not None:
            self.nursery.kill(actor.child)

    def end(self, actor: M) -> None:
        """Treat an actor that cannot be reached as ended, and see to it that it is."""
        if actor.state not in (ActorState.DOWN, ActorState.LOST):
            self.kill(actor)

    def cut(self, actor: M, reason: str) -> None:
        """Fail all that an actor holds whose process has ended."""
        self._by_identity.pop(actor.identity, None)
        self.broker.peer_gone(actor.identity, reason)

    def drop_lane(self, actor: M) -> None:
        """Let go of the socket of an actor that has ended, once all that it sent was taken."""
        if self._lanes is not None:
            self._lanes.drop_lane(actor.identity)

    def close(self, allowed: float, *, terminate: bool) -> None:
        """Ask all actors to leave within `allowed` seconds and kill the others, or kill all."""
        try:
            if not terminate:
                for actor in self._actors:
                    if actor.state is ActorState.STARTING and actor.child is not None:
                        self.nursery.kill(actor.child)  # it has no envs, and does not listen yet
                    elif actor.identity and actor.state is not ActorState.DOWN:
                        self.broker.shut_down(actor.identity)
            for child in self.nursery.close(allowed):
                if not terminate:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, allowed)
        finally:  # also after Ctrl-C
            for actor in self._actors:
                if actor.child is not None:
                    actor.child.pipe.close()
            self.broker.close()

    def _make_router(self, config: FleetConfig) -> RouterTransport:
        with_lanes = config.lanes and LANES_EXIST
        private = [] if with_lanes else [self._ipc_endpoint]
        router = None
        if private or config.bind:
            keys = BrokerKeys.load(config.keys, config.allow)
            router = ZmqRouter(config.bind, private=private, keys=keys, insecure=config.insecure)
        if with_lanes or router is None:
            self._lanes = LaneRouter(router, spin=self.spins)
            return self._lanes
        self._private = router
        return router
