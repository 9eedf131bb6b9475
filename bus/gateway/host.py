"""A gateway's process: take the listening sockets, and serve connections until told to stop.

The only asyncio in this package; each other process has one loop of its own. Each connection
performs what its `GatewaySession` says, over a DEALER by which it is a peer. Leaves out what frames
mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec
import zmq

from envbus.bus.brief import cut, printable
from envbus.bus.complaints import Complaints
from envbus.bus.descriptors import descriptors_left
from envbus.bus.errors import ClosedError, EnvbusError, TransportError
from envbus.bus.gateway.access import TurnedAwayError
from envbus.bus.gateway.client_framing import StreamFraming, WebSocketFraming
from envbus.bus.gateway.client_identity import GatewayClient, identity_of
from envbus.bus.gateway.config import RELOAD, GatewayBootstrap, GatewayConfig, GatewayTerms
from envbus.bus.gateway.session import Budget, GatewaySession
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe
from envbus.bus.supervision.liveness_probe import PROBE
from envbus.bus.transport.authentication import enable_client_curve
from envbus.bus.transport.curve_keys import Entrance
from envbus.bus.transport.zmq_sockets import LINGER_MS, NOBLOCK, NOBLOCK_MORE, prepare_large
from envbus.bus.wire.frames import Buffer, Frames
from envbus.bus.wire.messages import FailureCode

__all__ = ["PIECE", "Connection", "Crowd", "Dealer", "InPieces", "Turns", "main"]

logger = logging.getLogger("envbus.bus.gateway")

FramingMaker: TypeAlias = type[StreamFraming] | type[WebSocketFraming]

#: Seconds for clients to take their last messages when the gateway ends.
_END_TIMEOUT: Final = 1.0
#: Seconds for what the broker has said at its own end to come here and be passed on.
_LAST_WORDS: Final = 0.05
#: Seconds until the next try to accept a connection, after one has failed.
_ACCEPT_PAUSE: Final = 0.1
#: File descriptors besides those of connections.
_SPARE_DESCRIPTORS: Final = 256
#: Of the owner, below which nobody new comes in. Its endpoints take others while one is let in.
_LEAST_LEFT: Final = 32
#: Kept free for changes: a pipe has two. One comes with a change, TLS takes three for its files.
_RESERVED_PIPES: Final = 2
#: A DEALER's: libzmq's own, and its connection to the broker.
_DESCRIPTORS_PER_DEALER: Final = 2


def main(pipe: Pipe) -> None:
    """Serve until the driver at the other end of `pipe` says to stop."""
    # It warns for each message to a client that has closed its side, who thus could fill a disk.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    bootstrap = msgspec.msgpack.decode(pipe.receive(HANDOVER_TIMEOUT), type=GatewayBootstrap)
    config = bootstrap.terms.config
    listeners = [
        socket.socket(fileno=pipe.receive_fd(pipe.next_expected, HANDOVER_TIMEOUT))
        for _ in (*config.tcp, *config.websocket)
    ]
    clients = config.max_connections + config.max_peers * _DESCRIPTORS_PER_DEALER
    _allow_descriptors(clients + config.max_strangers + _SPARE_DESCRIPTORS)
    prepare_large()  # before strangers can have taken all of them
    asyncio.run(_serve(bootstrap, listeners, pipe))


async def _serve(bootstrap: GatewayBootstrap, listeners: list[socket.socket], pipe: Pipe) -> None:
    config = bootstrap.terms.config
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # One more than is allowed is told so, and lasts a moment.
    context.set(zmq.MAX_SOCKETS, config.max_peers)
    make_dealer = functools.partial(_make_dealer, context, bootstrap)
    crowd, door, complaints = Crowd(), _Door(bootstrap.terms), Complaints(logger)

    async def accept(listener: socket.socket, make_framing: FramingMaker) -> None:
        """Take in who comes; asyncio's own server would count nobody before TLS is through."""
        listener.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left, or who came is gone
                complaints.add("accept", f"a connection was not accepted: {error}")
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            opening = asyncio.ensure_future(open_connection(sock, make_framing))
            openings.add(opening)
            opening.add_done_callback(openings.discard)

    async def open_connection(sock: socket.socket, make_framing: FramingMaker) -> None:
        task = asyncio.current_task()
        assert task is not None
        config, tls = door.config, door.tls
        session = GatewaySession(make_framing(config), config)
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
    makers = (StreamFraming,) * len(config.tcp) + (WebSocketFraming,) * len(config.websocket)
    acceptors = [
        asyncio.ensure_future(accept(listener, maker))
        for listener, maker in zip(listeners, makers, strict=True)
    ]
    stopped = asyncio.Event()
    commands = _Commands(pipe, door, stopped)
    loop.add_reader(pipe.fileno(), commands.take)
    commands.give_sign()
    interval = min(config.handshake_timeout, config.keepalive, 2.0) / 2
    while not stopped.is_set():
        for connection in (*crowd, *crowd.leaving):
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


class _Door:
    """By what those are judged who come from now on: tokens, and the certificate that is shown."""

    def __init__(self, terms: GatewayTerms) -> None:
        self.change(terms)

    def change(self, terms: GatewayTerms) -> None:
        """Judge those who come from now on by other terms."""
        tls = None if terms.tls is None else terms.tls.context()
        self.config, self.tls = terms.config, tls


class _Commands:
    """What comes over the pipe: questions whether this loop goes round, changes, and the end."""

    def __init__(self, pipe: Pipe, door: _Door, stopped: asyncio.Event) -> None:
        self._pipe = pipe
        self._door = door
        self._stopped = stopped
        #: Descriptors that are closed while changes come, which clients may have left none for: one
        #: that was lost would never be heard of again.
        self._reserve: list[int] = []
        self._hold_reserve()

    def give_sign(self) -> None:
        """Say that this loop goes round."""
        with contextlib.suppress(EnvbusError):  # the driver is gone, or about to be heard of
            self._pipe.send(b"")

    def take(self) -> None:
        """The pipe is readable."""
        while self._reserve:
            os.close(self._reserve.pop())
        try:
            self._take()
        finally:
            self._hold_reserve()

    def _hold_reserve(self) -> None:
        with contextlib.suppress(OSError):  # a thread of libzmq was faster; there is a next time
            while len(self._reserve) < 2 * _RESERVED_PIPES:
                self._reserve += os.pipe()

    def _take(self) -> None:
        try:
            while (said := self._pipe.receive(0.0)) == PROBE or said.startswith(RELOAD):
                if said == PROBE:
                    self.give_sign()
                else:
                    terms = msgspec.msgpack.decode(said[len(RELOAD) :], type=GatewayTerms)
                    try:
                        self._door.change(terms)
                    except OSError as error:  # no descriptor, or no memory
                        logger.warning("the former tokens and certificate hold on: %s", error)
        except ClosedError:
            pass  # the driver is gone, and its watchdog about to end this process
        except TransportError:
            return  # no complete message yet
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._stopped.set()


async def _wait(event: asyncio.Event, timeout: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)


def _make_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    bootstrap: GatewayBootstrap,
    client: GatewayClient,
    on_message: Callable[[list[bytes]], object],
    on_writable: Callable[[], object],
) -> Dealer:
    """Return a new connection to the broker.

    Raises:
        zmq.ZMQError: There are too many, here or in the owner, where strangers at a TCP endpoint
            can take all descriptors. It would not be taken in before some are gone.
    """
    left = descriptors_left(bootstrap.owner)
    if left is not None and left < _LEAST_LEFT:
        raise zmq.ZMQError(errno.EMFILE)
    identity = identity_of(client, bootstrap.secret, secrets.token_hex(8))
    return Dealer(context, bootstrap.entrance, identity, on_message, on_writable)


def _allow_descriptors(wanted: int) -> None:
    """Raise this process' soft limit of open files as far as is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


#: Seconds for a client to take the last words.
_LINGER: Final = 1.0
#: What came is read in pieces, for so many seconds at one go; then others get their turn.
_TURN: Final = 0.005
#: Seconds for all turns of those who have just begun to send, and for all of the others, until the
#: loop looks for what else there is: new data, and whether the owner wants a sign of life.
_ROUND: Final = 0.02
#: Most and least bytes of a piece. One of nothing but pings takes 15 ms, and 2 ms. So who sends
#: what takes long is read in small ones.
PIECE: Final = 4096
_LEAST_PIECE: Final = 512
#: Seconds of a piece from which on the next is a small one, and below which it is a larger one.
_SLOW: Final = 0.001
_QUICK: Final = 0.0003

#: Ids of a connection's marks begin between this and twice it, less what it may use of them.
_MARKS: Final = 2**62

#: Characters of why a connection was ended in the log: strangers' own words may be in it.
_LONGEST: Final = 300

MakeDealer: TypeAlias = Callable[
    [GatewayClient, Callable[[list[bytes]], object], Callable[[], object]], "Dealer"
]


class Turns:
    """Whose turn it is to be read, in one loop: many that flood must not keep one waiting.

    Those who have just begun to send come first. Who has more than a turn's worth comes behind.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun: deque[Connection] = deque()
        self._others: deque[Connection] = deque()
        self._complaints = Complaints(logger)

    def begin(self, connection: Connection) -> None:
        """Read one that has something unread: at once if nobody waits, else when it is its turn."""
        connection.has_turn = True
        if self._begun or self._others:
            self._begun.append(connection)
            return
        self._give(connection)
        if self._others:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        for waiting in (self._begun, self._others):
            until = self._loop.time() + _ROUND
            for _ in range(len(waiting)):
                self._give(waiting.popleft())
                if self._loop.time() >= until:
                    break
        if self._begun or self._others:
            self._loop.call_soon(self._go_on)

    def _give(self, connection: Connection) -> None:
        try:
            connection.has_turn = connection.read_on()
        except Exception as error:  # the border: what one has sent ends nobody else's turn
            what = f"what a client sent could not be read: {type(error).__name__}: {error}"
            self._complaints.add("reading", what, error)
            connection.break_off()
        if connection.has_turn:
            self._others.append(connection)


class Crowd:
    """All connections of a gateway, and whose turn it is."""

    def __init__(self) -> None:
        self.turns = Turns()
        #: Those that have said hello and go on.
        self.admitted: set[Connection] = set()
        #: The others, oldest first: not through yet, or about to end.
        self.strangers: dict[Connection, None] = {}
        #: Those that have ended, and whose messages the broker has not all taken.
        self.leaving: set[Connection] = set()

    def __iter__(self) -> Iterator[Connection]:
        """Return those that have not ended."""
        return iter((*self.strangers, *self.admitted))


class Connection(asyncio.Protocol):
    """Passes messages between a client and a DEALER of its own, in order, untouched.

    A stranger until it has said hello: before that it has no DEALER, and is not counted among those
    who are let in.

    Args:
        session: Decides.
        config: Limits.
        make_dealer: From who it is for, and what to call for messages and for room.
        crowd: All connections; this one is among them from its first to its last moment.
        cut: Ends the connection before it has a transport: TLS is under way.

    Attributes:
        has_turn: Whether `read_on` is about to be called.
    """

    def __init__(
        self,
        session: GatewaySession,
        config: GatewayConfig,
        make_dealer: MakeDealer,
        crowd: Crowd,
        cut: Callable[[], object] = lambda: None,
    ) -> None:
        self._session = session
        self._config = config
        self._make_dealer = make_dealer
        self._crowd = crowd
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._dealer: Dealer | None = None
        first_mark = _MARKS + secrets.randbelow(_MARKS - 2**32)
        self._budget = Budget(config.max_untaken_bytes, first_mark)
        self.has_turn = False
        #: What came and was not read yet, and how much of it is read at one go.
        self._unread = memoryview(b"")
        self._piece = _LEAST_PIECE
        #: Messages for which the broker's queue had no room; nothing is read meanwhile.
        self._waiting: deque[Frames] = deque()
        #: When it began, when anything came, and when a message for the broker did.
        self._since = self._heard = self._told = self._loop.time()
        self._probed = False
        self._abort_at: float | None = None
        #: What the broker is to be told of its end.
        self._farewell: Frames | None = None
        crowd.strangers[self] = None
        if len(crowd.strangers) > config.max_strangers:
            next(iter(crowd.strangers)).cut_off()

    # --- the client ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; TLS, where there is any, is done."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self not in self._crowd.strangers:  # cut off meanwhile
            transport.abort()
            return
        _set_options(transport.get_extra_info("socket"), self._config.keepalive)

    def data_received(self, data: bytes) -> None:
        """Something came from the client."""
        self._heard, self._probed = self._loop.time(), False
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        if not self.has_turn:
            self._crowd.turns.begin(self)
        if self.has_turn:
            self._hold_back()  # also its end, with which asyncio closes, and nothing is read

    def eof_received(self) -> bool:
        """The client sends no more: its transport closes, when what is unsent is, or soon."""
        self._begin_to_end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes or goes any more: tell the broker, who would wait for heartbeats else."""
        del exc
        self._leave()
        if self._dealer is not None:
            self._waiting.clear()
            self._farewell = self._session.goodbye()
            self._crowd.leaving.add(self)
            self._go()
        if self._session.ended:
            logger.info("a connection was ended: %s", printable(cut(self._session.ended, _LONGEST)))
        # What came and was not passed on need not wait for the broker.
        self._unread = memoryview(b"")
        self._session = GatewaySession(StreamFraming(self._config), self._config)

    def cut_off(self) -> None:
        """End it at once: it is a stranger, and there are too many of those."""
        self._leave()
        if self._transport is None:
            self._cut()
            return
        if self._session.ended is None:
            limit = self._config.max_strangers
            self.end(f"more than {limit} connections have not said hello; the oldest is cut off")
        self._transport.abort()

    def break_off(self) -> None:
        """End it at once, without a word: it is in no state to say one."""
        self.has_turn, self._unread = False, memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    def read_on(self) -> bool:
        """Read what came, as much as the broker takes; return whether it takes another turn."""
        assert self._transport is not None
        at = self._loop.time()
        until = at + _TURN
        while self._unread and not self._waiting and at <= until:
            if self._session.ended is not None or self._transport.is_closing():
                self._unread = memoryview(b"")
                break
            piece, self._unread = bytes(self._unread[: self._piece]), self._unread[self._piece :]
            messages = self._session.receive(piece)
            if messages:
                self._told = self._heard
                if self._dealer is not None or self._admit():
                    self._waiting += messages
                    self._pass_on()
            self._say(self._session.take_unsent())
            began, at = at, self._loop.time()
            if at - began > _SLOW:
                self._piece = _LEAST_PIECE
            elif at - began < _QUICK:
                self._piece = min(2 * self._piece, PIECE)
        self._hold_back()
        return bool(self._unread) and not self._waiting

    def _hold_back(self) -> None:
        """Let nothing more come before what came is read."""
        assert self._transport is not None
        if self._unread or self._waiting:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _admit(self) -> bool:
        """Make a client of a stranger that has said hello, if there is room."""
        crowd, limit = self._crowd, self._config.max_connections
        if len(crowd.admitted) >= limit:
            self.end(f"{limit} clients are connected, which is the limit (max_connections)")
            return False
        assert self._transport is not None
        client = GatewayClient(
            self._session.client, _shown(self._transport.get_extra_info("peername"))
        )
        try:
            self._dealer = self._make_dealer(client, self._on_message, self._on_writable)
        except zmq.ZMQError as error:
            self.end(f"the gateway has no room for one more client: {error}")
            return False
        self._leave()
        crowd.admitted.add(self)
        return True

    def forget(self) -> None:
        """It did not come about."""
        if self._transport is None:
            self._leave()

    def _leave(self) -> None:
        self._crowd.strangers.pop(self, None)
        self._crowd.admitted.discard(self)

    def _go(self) -> None:
        """Say goodbye, and go once the broker has taken all that it was sent.

        While its owner is away it holds that, and, behind a full queue, the descriptor of a peer
        that has gone. So one that leaves counts among the broker's peers as long.
        """
        assert self._dealer is not None
        self._mark(is_last=True)
        if self._farewell is not None and self._dealer.send(self._farewell):
            self._farewell = None
        if self._farewell is None and self._budget.is_empty:
            self._dealer.close()
            self._dealer = None
            self._crowd.leaving.discard(self)

    # --- the broker ----------------------------------------------------------------------------

    def _on_message(self, frames: list[bytes]) -> None:
        if self._budget.takes(frames):
            self._loop.call_soon(self._on_writable)  # later: this may be within a `send`
            return
        if self in self._crowd.leaving:
            return  # its transport, of which Python 3.10 leaves half behind TLS, takes no more
        before = self._session.take_unsent()  # what the session says itself, as HTTP's answer
        words = self._session.wrap(frames)
        self._say(before + words + self._session.take_unsent())

    def _on_writable(self) -> None:
        if self in self._crowd.leaving:
            self._go()
            return
        if self._dealer is None:
            return  # it has gone
        self._pass_on()
        if not self._waiting and not self.has_turn:
            self._crowd.turns.begin(self)

    def _pass_on(self) -> None:
        """Hand messages to the broker as long as it takes them."""
        if self._dealer is None:
            return
        self._mark()
        while self._waiting:
            if self._budget.is_full or not self._dealer.send(self._waiting[0]):
                return
            self._budget.add(self._waiting.popleft())
            self._mark()

    def _mark(self, *, is_last: bool = False) -> None:
        """Ask the broker at times whether it has taken what came before."""
        assert self._dealer is not None
        now = self._loop.time()
        # Noted before it is sent: its answer may come within `send`.
        wanted = self._budget.wants_mark(now, is_last=is_last)
        if wanted and not self._dealer.send(self._budget.mark(now)):
            self._budget.unmark()

    # --- time, and the end ---------------------------------------------------------------------

    def look_after(self, now: float) -> None:
        """Judge how long things take; called about once a second."""
        if self in self._crowd.leaving:
            self._go()  # a mark may have been lost
            return
        if self._transport is None:
            return  # TLS, which has a time-out of its own
        if self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
            return
        config, lease = self._config, self._session.lease
        if self._waiting:
            self._heard = self._told = now  # it is not heard, as nobody listens
            self._on_writable()
        if not self._session.joined and now - self._since > config.handshake_timeout:
            self.end(f"no hello came within {config.handshake_timeout:g} s", FailureCode.TIMEOUT)
        elif lease and now - self._told > lease:
            self.end(
                f"no message came for {lease:g} s, which is the lease: connect and say hello again",
                FailureCode.NOT_JOINED,
            )
        elif now - self._heard > config.keepalive and not self._probed:
            probe = self._session.probe()
            self._probed = bool(probe)
            self._say(probe)
        elif self._probed and now - self._heard > 2 * config.keepalive:
            self.end(f"no sign of life for {2 * config.keepalive:g} s", FailureCode.TIMEOUT)

    def end(self, why: str, code: FailureCode = FailureCode.OVERLOADED) -> None:
        """Say why and close the connection."""
        self._session.end(TurnedAwayError(why, code))
        self._say(self._session.take_unsent())

    def hang_up(self) -> None:
        """Close the connection once the last words are sent."""
        if self._transport is None:
            self.cut_off()
        else:
            self._transport.close()

    def _say(self, words: bytes) -> None:
        """Write to the client, and nothing more after its session's end.

        Then the client is left to close the connection, for a while: closed here, with something
        unread in it, the system would take the last words back (a reset).
        """
        transport = self._transport
        if transport is None or transport.is_closing() or self._abort_at is not None:
            return
        unsent = transport.get_write_buffer_size()
        if unsent > self._config.max_unsent_bytes and self._session.ended is None:
            self.end(f"{unsent} bytes wait for this client, which does not read")
            return
        if words:
            transport.write(words)
        if self._session.ended is not None:
            self._begin_to_end()
            if transport.can_write_eof():
                with contextlib.suppress(OSError):  # the client is gone: about to be noticed
                    transport.write_eof()
            else:  # TLS
                transport.close()

    def _begin_to_end(self) -> None:
        """Make room for another client, and leave this one a while for what it has not read."""
        self._abort_at = self._loop.time() + _LINGER
        if self in self._crowd.admitted:  # it is bounded still
            self._leave()
            self._crowd.strangers[self] = None


def _shown(address: object) -> str:
    """Return a client's address for people; of one that has gone nothing is known any more."""
    if not isinstance(address, tuple):
        return "unknown"
    host, port = address[:2]
    host = str(host).partition("%")[0]  # behind it stands the name of an interface
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_options(sock: socket.socket, keepalive: float) -> None:
    """Small messages leave at once; the system looks whether a silent client lives."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(round(keepalive), 1)
    # macOS calls the first one otherwise.
    for option in ("TCP_KEEPIDLE", "TCP_KEEPALIVE"):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_KEEPINTVL"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 4, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


#: Messages that wait for the broker, or for this process, per connection.
_HIGH_WATER_MARK: Final = 256
#: Messages of the broker that one connection takes before others get their turn.
_BATCH: Final = 64


class Dealer:
    """Connects to a broker under `identity` and hands on what comes.

    Args:
        context: Shared by all of a process.
        entrance: The broker's.
        identity: Routing id; must be fresh.
        on_message: Called with the frames of each message.
        on_writable: Called when `send`, which returned False, is worth another try.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        entrance: Entrance,
        identity: bytes,
        on_message: Callable[[list[bytes]], object],
        on_writable: Callable[[], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_writable = on_writable
        self._blocked = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        if entrance.keys is not None:
            enable_client_curve(self._socket, entrance.keys)
        self._socket.connect(entrance.endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def send(self, frames: Frames) -> bool:
        """Queue a message for the broker; False: there is no room now. Never blocks."""
        last = len(frames) - 1
        sent = True
        try:
            for index, frame in enumerate(frames):
                flags = NOBLOCK if index == last else NOBLOCK_MORE
                self._socket.send(frame, flags, copy=len(frame) < zmq.COPY_THRESHOLD)
        except zmq.Again:
            self._blocked, sent = True, False
        self._look()  # what the descriptor had to tell may have been told to `send`
        return sent

    def close(self) -> None:
        """Close the socket, giving the last messages a bounded time. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(LINGER_MS)

    def _look(self) -> None:
        """Take what has come. The descriptor tells only once of each change."""
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if self._blocked and events & zmq.POLLOUT:
                self._blocked = False
                self._loop.call_soon(self._on_writable)
            if not events & zmq.POLLIN:
                return
            self._on_message(self._socket.recv_multipart(NOBLOCK))
        self._loop.call_soon(self._look)
