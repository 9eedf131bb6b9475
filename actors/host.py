"""Entry of an env actor's process: read the bootstrap parcel, join the bus, serve."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import msgspec

from envbus.actors.env_actor import EnvActor
from envbus.actors.protocol import CallResult, StepResult
from envbus.bus.codec import encode
from envbus.bus.lane import LaneEnd, LanePeer
from envbus.bus.messages import Hello, Tree
from envbus.bus.pipe import Pipe, PipeOutbox
from envbus.bus.pipe_codec import PipeCodec
from envbus.bus.serve import Worker
from envbus.bus.transport import PeerTransport
from envbus.bus.zmq_transport import ZmqPeer

__all__ = ["BOOTSTRAP_PARCEL", "ENTRY", "HOST_MODULE", "LANE_PARCELS", "Bootstrap", "main"]

#: What the fork server imports before it forks actors.
HOST_MODULE = __name__
#: What it runs in the child.
ENTRY = f"{HOST_MODULE}:main"
#: Numbers of the first parcels on the pipe: the bootstrap, and, with a lane, its descriptors.
BOOTSTRAP_PARCEL, *LANE_PARCELS = 1, 2, 3
#: Seconds to wait for the runner's side of a hand-over that it has begun.
_HANDOVER_TIMEOUT = 30.0


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """All that a child must know to join its runner's bus."""

    #: Where the runner's ROUTER is bound; empty: the child has a lane instead.
    endpoint: str
    #: Routing id of this life.
    identity: bytes
    name: str
    incarnation: int
    #: Whether there is a core to spare for short waits.
    spin: bool
    #: Most requests that its runner has in flight to it at one time.
    capacity: int
    #: The runner's `multiprocessing` key, by which proxies of its managers are let in.
    authkey: bytes = b""


def main(pipe: Pipe) -> None:
    """Serve the runner at the other end of `pipe` until it says to stop."""
    bootstrap = msgspec.msgpack.decode(
        pipe.receive_bytes(BOOTSTRAP_PARCEL, _HANDOVER_TIMEOUT), type=Bootstrap
    )
    if bootstrap.authkey:
        multiprocessing.current_process().authkey = bootstrap.authkey
    actor = EnvActor(
        receive_fd=lambda number: pipe.receive_fd(number, _HANDOVER_TIMEOUT),
        check=_checker(pipe),
        report=lambda making: worker.tell(making),
    )
    worker = Worker(
        _connect(bootstrap, pipe),
        Hello(
            name=bootstrap.name,
            services=["env"],
            capacity=bootstrap.capacity,
            pid=os.getpid(),
        ),
        actor.handlers,
        incarnation=bootstrap.incarnation,
        codec=PipeCodec(pipe, lenient=(StepResult,)),
    )
    try:
        worker.join(_HANDOVER_TIMEOUT)
        worker.run()
    finally:
        actor.close()


def _checker(pipe: Pipe) -> Callable[[object], None]:
    trial = PipeOutbox(pipe)

    def check(value: object) -> None:
        try:
            encode(CallResult(values=Tree(value)), trial)
        finally:
            trial.discard()

    return check


def _connect(bootstrap: Bootstrap, pipe: Pipe) -> PeerTransport:
    if bootstrap.endpoint:
        return ZmqPeer(bootstrap.endpoint, bootstrap.identity)
    packets, parcels = (pipe.receive_fd(number, _HANDOVER_TIMEOUT) for number in LANE_PARCELS)
    end = LaneEnd.from_fds((packets, parcels))
    return LanePeer(end, bootstrap.identity, spin=bootstrap.spin)
