"""How a process that was started here joins its owner's bus and serves it.

Leaves out what it answers: env actors (`host.py`), runners and others hand that in.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from envbus.bus.lane import LaneEnd, LanePeer
from envbus.bus.messages import Hello, Notice, Payload, Reply
from envbus.bus.pipe import Pipe, PipeCodec
from envbus.bus.serve import Handlers, Worker
from envbus.bus.transport import PeerTransport
from envbus.bus.words import Doer
from envbus.bus.zmq_sockets import ZmqPeer

__all__ = ["BOOTSTRAP_PARCEL", "HANDOVER_TIMEOUT", "LANE_PARCEL", "Bootstrap", "Hosted", "host"]

#: Numbers of the first parcels on the pipe: the bootstrap, and, with a lane, its descriptor.
BOOTSTRAP_PARCEL, LANE_PARCEL = 1, 2
#: Seconds to wait for the owner's side of a hand-over that it has begun.
HANDOVER_TIMEOUT: Final = 30.0


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """All that a child must know to join its owner's bus."""

    #: Where the owner's ROUTER is bound; empty: the child has a lane instead.
    endpoint: str
    #: Routing id of this life.
    identity: bytes
    name: str
    incarnation: int
    #: Whether there is a core to spare for short waits.
    spin: bool
    #: Most requests that its owner has in flight to it at one time.
    capacity: int
    #: The owner's `multiprocessing` key, by which proxies of its managers are let in.
    authkey: bytes = b""


class Hosted(Protocol):
    """What answers requests in a child."""

    @property
    def handlers(self) -> Handlers:
        """One function per request type."""
        ...

    @property
    def amend(self) -> Callable[[Any, Reply], Reply] | None:
        """As in `Worker`."""
        ...

    def close(self) -> object:
        """Let go of all; called once, at the end."""
        ...


def host(
    pipe: Pipe,
    make: Callable[[Callable[[Notice], None]], Hosted],
    *,
    service: str,
    lenient: tuple[type[Payload], ...] = (),
    words: Doer | None = None,
    on_word: Callable[[], bool] | None = None,
) -> None:
    """Serve the owner at the other end of `pipe` until it says to stop.

    Args:
        pipe: This process' end.
        make: Makes what answers; gets the function by which notices are sent.
        service: What it offers, for the hello.
        lenient: As in `PipeCodec`.
        words: By which its owner may ask it besides, where it has a lane.
        on_word: Does what a word asks, if one does; returns whether the owner sleeps, and is to be
            rung.
    """
    bootstrap = msgspec.msgpack.decode(
        pipe.receive_bytes(BOOTSTRAP_PARCEL, HANDOVER_TIMEOUT), type=Bootstrap
    )
    if bootstrap.authkey:
        multiprocessing.current_process().authkey = bootstrap.authkey
    hosted = make(lambda notice: worker.tell(notice))
    transport = _connect(bootstrap, pipe, words)

    def beside() -> None:
        if on_word is not None and on_word() and isinstance(transport, LanePeer):
            transport.ring()

    worker = Worker(
        transport,
        Hello(
            name=bootstrap.name,
            services=[service],
            capacity=bootstrap.capacity,
            pid=os.getpid(),
        ),
        hosted.handlers,
        incarnation=bootstrap.incarnation,
        codec=PipeCodec(pipe, lenient=lenient),
        amend=hosted.amend,
        beside=None if on_word is None else beside,
    )
    try:
        worker.join(HANDOVER_TIMEOUT)
        worker.run()
    finally:
        hosted.close()


def _connect(bootstrap: Bootstrap, pipe: Pipe, words: Doer | None) -> PeerTransport:
    if bootstrap.endpoint:
        return ZmqPeer(bootstrap.endpoint, bootstrap.identity)
    end = LaneEnd.from_fd(pipe.receive_fd(LANE_PARCEL, HANDOVER_TIMEOUT))
    return LanePeer(end, bootstrap.identity, spin=bootstrap.spin, words=words)
