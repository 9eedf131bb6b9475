"""Entry of a gateway's process: take the listening sockets, and serve until told to stop.

The only asyncio in this package; each other process has one loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
from typing import Final, TypeAlias

import msgspec
import zmq

from envbus.bus.complaints import Complaints
from envbus.bus.errors import ClosedError, EnvbusError, TransportError
from envbus.bus.gateway.carriage import StreamCarriage, WebSocketCarriage
from envbus.bus.gateway.config import BOOTSTRAP_PARCEL, PROBE, Bootstrap
from envbus.bus.gateway.connection import PIECE, Connection, Crowd, Dealer
from envbus.bus.gateway.session import Session
from envbus.bus.messages import FailureCode
from envbus.bus.pipe import Pipe
from envbus.bus.transport import Buffer

__all__ = ["InPieces", "main"]

logger = logging.getLogger("envbus.bus.gateway")

CarriageMaker: TypeAlias = type[StreamCarriage] | type[WebSocketCarriage]

#: Seconds to wait for the driver's side of a hand-over that it has begun.
_HANDOVER_TIMEOUT: Final = 30.0
#: Seconds for clients to take their last messages when the gateway ends.
_END_TIMEOUT: Final = 1.0
#: Seconds for what the broker has said at its own end to come here and be passed on.
_LAST_WORDS: Final = 0.05
#: Seconds until the next try to accept a connection, after one has failed.
_ACCEPT_PAUSE: Final = 0.1
#: File descriptors besides those of connections.
_SPARE_DESCRIPTORS: Final = 256
_DESCRIPTORS_PER_CONNECTION: Final = 3


def main(pipe: Pipe) -> None:
    """Serve until the driver at the other end of `pipe` says to stop."""
    # It warns for each message to a client that has closed its side, who thus could fill a disk.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    bootstrap = msgspec.msgpack.decode(
        pipe.receive_bytes(BOOTSTRAP_PARCEL, _HANDOVER_TIMEOUT), type=Bootstrap
    )
    config = bootstrap.config
    count = len(config.tcp) + len(config.websocket)
    first = BOOTSTRAP_PARCEL + 1
    listeners = [
        socket.socket(fileno=pipe.receive_fd(number, _HANDOVER_TIMEOUT))
        for number in range(first, first + count)
    ]
    clients = config.max_connections * _DESCRIPTORS_PER_CONNECTION
    _allow_descriptors(clients + config.max_strangers + _SPARE_DESCRIPTORS)
    asyncio.run(_serve(bootstrap, listeners, pipe, first + count))


async def _serve(
    bootstrap: Bootstrap, listeners: list[socket.socket], pipe: Pipe, next_parcel: int
) -> None:
    config = bootstrap.config
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # One more than is allowed is told so, and lasts a moment.
    context.set(zmq.MAX_SOCKETS, 2 * config.max_connections + 64)
    make_dealer = functools.partial(Dealer, context, bootstrap.endpoint)
    crowd, tls, complaints = Crowd(), config.tls(), Complaints(logger)

    async def accept(listener: socket.socket, make_carriage: CarriageMaker) -> None:
        """Take in who comes; asyncio's own server would count nobody before TLS is through."""
        listener.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left, or who came is gone
                complaints.add("accept", f"a connection was not accepted: {error}")
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            opening = asyncio.ensure_future(open_connection(sock, make_carriage))
            openings.add(opening)
            opening.add_done_callback(openings.discard)

    async def open_connection(sock: socket.socket, make_carriage: CarriageMaker) -> None:
        task = asyncio.current_task()
        assert task is not None
        session = Session(make_carriage(config), config)
        connection = Connection(session, config, make_dealer, crowd, task.cancel)
        if tls is not None:
            sock = InPieces(fileno=sock.detach())
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else config.handshake_timeout,
            )
        except (OSError, asyncio.CancelledError):  # of TLS, or too slow, or one of too many
            connection.forget()
            sock.close()

    openings: set[asyncio.Future[None]] = set()
    makers = (StreamCarriage,) * len(config.tcp) + (WebSocketCarriage,) * len(config.websocket)
    acceptors = [
        asyncio.ensure_future(accept(listener, maker))
        for listener, maker in zip(listeners, makers, strict=True)
    ]
    stopped = asyncio.Event()
    orders = _Orders(pipe, next_parcel, stopped)
    loop.add_reader(pipe.fileno(), orders.take)
    orders.give_sign()
    interval = min(config.handshake_timeout, config.keepalive, 2.0) / 2
    while not stopped.is_set():
        for connection in list(crowd):
            connection.look_after(loop.time())
        await _wait(stopped, interval)
    for acceptor in acceptors:
        acceptor.cancel()
    await asyncio.sleep(_LAST_WORDS)
    for connection in list(crowd):
        connection.end("the gateway ends", FailureCode.PEER_LOST)
        connection.hang_up()
    until = loop.time() + _END_TIMEOUT
    while any(crowd) and loop.time() < until:
        await asyncio.sleep(0.01)
    context.destroy(linger=int(_END_TIMEOUT * 1000))


class InPieces(socket.socket):
    """Gives TLS no more than a piece at one go, and then others have their turn.

    asyncio would take 256 KiB. Of nothing but changes of keys (RFC 8446, 4.6.3), which TLS keeps to
    itself, those take half a second, and a piece takes 7 ms.
    """

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Return what came, a piece at most: what Python 3.10 calls."""
        return super().recv(min(bufsize, PIECE), flags)

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Take what came, a piece at most."""
        return super().recv_into(buffer, min(nbytes or len(memoryview(buffer)), PIECE), flags)


class _Orders:
    """What comes over the pipe: questions whether this loop goes round, and the end."""

    def __init__(self, pipe: Pipe, next_parcel: int, stopped: asyncio.Event) -> None:
        self._pipe = pipe
        self._next_parcel = next_parcel
        self._stopped = stopped

    def give_sign(self) -> None:
        """Say that this loop goes round."""
        with contextlib.suppress(EnvbusError):  # the driver is gone, or about to be heard of
            self._pipe.send_bytes(self._pipe.next_number(), b"")

    def take(self) -> None:
        """The pipe is readable."""
        try:
            while self._pipe.receive_bytes(self._next_parcel, 0.0) == PROBE:
                self._next_parcel += 1
                self.give_sign()
        except ClosedError:
            pass  # the driver is gone, and its watchdog about to end this process
        except TransportError:
            return  # no complete parcel yet
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._stopped.set()


async def _wait(event: asyncio.Event, timeout: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)


def _allow_descriptors(wanted: int) -> None:
    """Raise this process' soft limit of open files as far as is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
