"""How a process that was started here joins its owner's bus and serves it.

Leaves out what it answers: env actors (`host.py`), runners and others hand that in.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from envbus.bus.peer.worker import Handlers, Worker
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe, PipeCodec
from envbus.bus.transport.curve_keys import Entrance
from envbus.bus.transport.interface import PeerTransport
from envbus.bus.transport.local_link import LocalLinkEnd, LocalLinkPeer
from envbus.bus.transport.words import Doer
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.messages import Hello, Notice, Payload, Reply

__all__ = ["Bootstrap", "Hosted", "host"]


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """All that a child must know to join its owner's bus: the first passed descriptor on its pipe.

    The descriptor of its local link follows, if it has one.
    """

    #: Where the owner's ROUTER is bound; None: the child has a local link instead.
    entrance: Entrance | None
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
        words: By which its owner may ask it besides, where it has a local link.
        on_word: Does what a word asks, if one does; returns whether the owner sleeps, and is to be
            rung.
    """
    bootstrap = msgspec.msgpack.decode(pipe.receive(HANDOVER_TIMEOUT), type=Bootstrap)
    if bootstrap.authkey:
        multiprocessing.current_process().authkey = bootstrap.authkey
    hosted = make(lambda notice: worker.tell(notice))
    transport = _connect(bootstrap, pipe, words)

    def beside() -> None:
        if on_word is not None and on_word() and isinstance(transport, LocalLinkPeer):
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
        # Its owner may be away for as long as it likes; where that ends, so does the wait.
        codec=PipeCodec(pipe, lenient=lenient, timeout=math.inf),
        amend=hosted.amend,
        beside=None if on_word is None else beside,
    )
    try:
        worker.join(HANDOVER_TIMEOUT)
        worker.run()
    finally:
        hosted.close()


def _connect(bootstrap: Bootstrap, pipe: Pipe, words: Doer | None) -> PeerTransport:
    if bootstrap.entrance is not None:
        endpoint, keys = bootstrap.entrance
        return ZmqPeer(endpoint, bootstrap.identity, keys=keys)
    end = LocalLinkEnd.from_fd(pipe.receive_fd(pipe.next_expected, HANDOVER_TIMEOUT))
    return LocalLinkPeer(end, bootstrap.identity, spin=bootstrap.spin, words=words)
