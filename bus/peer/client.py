"""The asking side of the bus: a client of a standalone broker.

A thread of its own has the socket and a `PeerSession`, which decides what is said; this file
performs it, and is where callers' threads meet that one.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, TypeAlias

import msgspec

from envbus.bus.brief import brief
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.complaints import Complaints
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    EncodeError,
    EnvbusError,
    OverloadedError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
)
from envbus.bus.interrupts import join_ending, uninterrupted, uninterrupted_call
from envbus.bus.peer.session import Outcome, PeerCall, PeerSession
from envbus.bus.peer.worker import IDLE_WAIT, Codec, PlainCodec
from envbus.bus.settings import check_number
from envbus.bus.transport.curve_keys import PathLike, PeerKeys
from envbus.bus.transport.interface import AT_ONE_GO
from envbus.bus.transport.unix_sockets import Bell
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import lengths_of
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    Header,
    Hello,
    Kind,
    Notice,
    Payload,
    R,
    Reply,
    Request,
)

__all__ = ["Client"]

logger = logging.getLogger("envbus.bus.peer.client")


class ClientStatistics(msgspec.Struct, kw_only=True):
    """Counts of one client. Those without `now` only grow."""

    #: Requests asked, and how they ended.
    asked: int = 0
    replies: int = 0
    failures: int = 0
    timeouts: int = 0
    cancelled: int = 0
    #: Notices told, and those of them that were dropped as the broker did not read.
    told: int = 0
    dropped_notices: int = 0
    #: Requests whose future is not done.
    pending_now: int = 0
    #: Asked a second time, after their holder was lost.
    resent: int = 0
    #: Replies to requests that had ended already.
    late_replies: int = 0
    #: Times that the broker, started again or out of patience, had to be told who this is.
    rejoined: int = 0


class Client:
    """A connection to a standalone broker, usable from any thread.

    One thread of its own owns the socket. When the broker is started again, the client joins it
    again by itself: what was in flight fails with `PeerLostError`, what comes after is sent.

    Args:
        endpoint: What the broker is bound to, e.g. `"tcp://127.0.0.1:5555"`.
        name: For messages to people, unique on the bus; None: a new one.
        timeout: Seconds to wait for the broker's answer now.
        heartbeat: Seconds between signs of life; after some four of them without one the broker
            forgets this client.
        max_pending: Most requests and notices that may be unsettled at one time.
        codec: How payloads become frames; None: what can cross a socket and nothing else.
        keys: File of this client's secret key, for a broker that has keys: see
            docs/security.md.
        server_key: File of the broker's public key.

    Raises:
        ConfigError: A setting or a key file cannot be used.
        RequestTimeoutError: No broker answered within `timeout`; if keys do not fit, the message
            says so.
        VersionMismatchError: The broker speaks another protocol version.
        ProtocolError: The broker refuses this client, e.g. as its name is taken.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str | None = None,
        timeout: float = 10.0,
        heartbeat: float = 2.0,
        max_pending: int = 1024,
        codec: Codec | None = None,
        keys: PathLike | None = None,
        server_key: PathLike | None = None,
    ) -> None:
        for setting, value in (("timeout", timeout), ("heartbeat", heartbeat)):
            check_number(setting, value, over=0.0, finite=True)
        check_number("max_pending", max_pending, whole=True, least=1)
        peer_keys = PeerKeys.load(keys, server_key)
        self._codec = codec or PlainCodec()
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self.name = name or f"client-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        identity = f"client.{secrets.token_hex(8)}".encode()
        hello = Hello(name=self.name, pid=os.getpid(), heartbeat=heartbeat)
        with uninterrupted():
            self._loop = _Loop(
                lambda: ZmqPeer(endpoint, identity, keys=peer_keys),
                PeerSession(
                    hello,
                    identity=identity,
                    decode=self._codec.decode,
                    complain=Complaints(logger).add,
                ),
                max_pending,
            )
            self._loop.start()
            # The thread must not keep this object alive, nor outlive it.
            self._finalizer = weakref.finalize(self, self._loop.stop, self._owner)
        try:
            self._loop.joined.result(timeout)
        except FutureTimeoutError:
            self._finalizer()
            why = self._loop.trouble or "is it running, and is the endpoint right?"
            raise RequestTimeoutError(
                f"no broker answered at {endpoint} within {timeout:g} s; {why}",
                request_id=0,
                peer="broker",
            ) from None
        except BaseException:
            self._finalizer()
            raise

    def ask(self, to: str, request: Request[R], *, timeout: float) -> Future[R]:
        """Send `request` to a peer or service and return a future for its reply.

        Returns at once; waiting is `future.result()`. Requests of one thread to one peer are
        done in their order. May be called from any thread.

        Args:
            to: Name of a peer, or of a service: then its least-loaded ready peer gets it.
            request: Payload. Its arrays are sent without a copy: do not write to them until the
                future is done.
            timeout: Seconds until the request fails, counted from this call. Positive and
                finite; queueing counts.

        Returns:
            A future. Cancelling it frees the caller only: a worker that has the request is not
            interrupted, and its reply is dropped as late. Callbacks run in the client's thread
            and must not block. An idempotent request whose peer is lost is asked once more. The
            future fails with

            - `RequestTimeoutError` when `timeout` has passed,
            - `NoPeerError` at once if nobody ready has that name or offers that service,
            - `OverloadedError` at once if the peer, or the backlog of the service, is full,
            - `PeerLostError` when the worker died, its lease ran out, or the broker is another one,
            - `RemoteError` when the worker's handler raised,
            - `DecodeError` when the reply cannot be read here,
            - `ClosedError` when this client was closed meanwhile.

        Raises:
            ClosedError: This client was closed.
            OverloadedError: Too many requests of this client are unsettled. Nothing was sent.
            EncodeError: The request cannot cross a socket, or is larger than the broker takes.
            ConfigError: `timeout` is not positive and finite.

        Source:
            A deadline carried as time left: https://grpc.io/docs/guides/deadlines/.
            Leases: ZeroMQ Majordomo, https://rfc.zeromq.org/spec/7/.
        """
        self._check_usable(to)
        check_number("timeout", timeout, over=0.0, finite=True)
        future: Future[R] = Future()
        number, now = next(self._numbers), time.monotonic()
        loop = self._loop
        frames, settle = self._encode(request), partial(loop.settle, future, number)
        call = PeerCall(request, frames, None, now, now + timeout, settle, to, number)
        loop.submit(partial(loop.begin, call), to, number)
        # Without the call: its frames would stay until a garbage collection.
        future.add_done_callback(partial(loop.on_done, number))
        return future

    def tell(self, to: str, notice: Notice) -> None:
        """Send a notice to a peer or to one peer of a service; nobody says whether it arrived.

        Returns at once. May be called from any thread.

        Raises:
            ClosedError: This client was closed.
            OverloadedError: Too much of this client is unsettled. Nothing was sent.
            EncodeError: The notice cannot cross a socket, or is larger than the broker takes.
        """
        self._check_usable(to)
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, type(notice).__name__, to=to)
        frames = [encode_header(header), *self._encode(notice)]
        self._loop.submit(partial(self._loop.tell, frames), to)

    def statistics(self) -> ClientStatistics:
        """Return counts since the start."""
        return self._loop.statistics()

    @uninterrupted_call
    def close(self) -> None:
        """Close the connection; what is unsettled fails with `ClosedError`. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pending={self.statistics().pending_now}" if self._finalizer.alive else "closed"
        return f"<Client {self.name} {state}>"

    def _encode(self, payload: Payload) -> Frames:
        frames = self._codec.encode(payload)
        size = sum(lengths_of(frames))
        welcome = self._loop.session.welcome
        if welcome is not None and size > (most := welcome.max_message_bytes):
            raise EncodeError(
                f"{type(payload).__name__} has {size} bytes; the broker takes at most {most}"
            )
        return frames

    def _check_usable(self, to: str) -> None:
        if self._owner != os.getpid():
            raise ClosedError(f"this client belongs to process {self._owner}; make a new one here")
        if not to:
            raise ConfigError("a request needs the name of a peer or service")


#: What a caller wants of the client's thread, which calls it with the time.
Command: TypeAlias = Callable[[float], None]


class _Loop:
    """The thread of one client, which alone uses its socket and session, and its callers' queue.

    Args:
        connect: Makes the socket; called in the thread.
        session: Decides what is said.
        max_pending: Most requests and notices that may be unsettled at one time.
    """

    def __init__(
        self, connect: Callable[[], ZmqPeer], session: PeerSession, max_pending: int
    ) -> None:
        self._connect = connect
        self.session = session
        self._max_pending = max_pending
        #: Done when the broker has answered the first hello.
        self.joined: Future[None] = Future()
        #: Why there is no connection, for people, as last seen by the thread; "" if unknown.
        self.trouble = ""
        #: Guards the next three. The bell is rung with it held, so that `_take` finds it rung.
        #: Taken twice where a garbage collection, which may come anywhere, ends the client.
        self._lock = threading.RLock()
        self._commands: deque[Command] = deque()
        self._unsettled = 0
        #: Why nothing is taken any more.
        self._closing: Exception | None = None
        self._bell = Bell()
        #: Frames of what waits for the broker.
        self._notices: deque[Frames] = deque()
        self._counts = ClientStatistics()
        self._complaints = Complaints(logger)
        self._thread = threading.Thread(target=self._run, name="envbus-client", daemon=True)

    # --- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def stop(self, owner: int) -> None:
        """Take nothing any more, and wait until the thread has ended. Idempotent."""
        if os.getpid() != owner:
            return  # a forked copy has neither the thread nor the socket
        with self._lock:
            self._closing = self._closing or ClosedError("this client was closed")
            self._bell.ring()
        join_ending(self._thread)

    def statistics(self) -> ClientStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(
            self._counts,
            pending_now=self._unsettled,
            resent=self.session.resent,
            late_replies=self.session.late,
            rejoined=self.session.rejoined,
        )

    def submit(self, command: Command, to: str, request_id: int = 0) -> None:
        """Hand over what is to be sent.

        Raises:
            OverloadedError: Too much is unsettled. Nothing will be sent.
            Exception: Why the thread has ended, or was to.
        """
        with self._lock:
            if self._closing is not None:
                raise self._closing
            if self._unsettled >= self._max_pending:
                raise OverloadedError(
                    f"{self._unsettled} requests of this client are unsettled, which is the "
                    "limit; wait for some, or raise max_pending",
                    request_id=request_id,
                    peer=to,
                )
            self._unsettled += 1
            self._commands.append(command)
            self._bell.ring()

    def on_done(self, request_id: int, future: Future[Any]) -> None:
        """A future is done: if by its caller, its request is to be forgotten."""
        if future.cancelled():
            with self._lock:
                self._commands.append(partial(self._cancel, request_id))
                self._bell.ring()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason: Exception | None = None
        try:
            transport = self._connect()
            try:
                transport.watch(self._bell.fileno())
                self._serve(transport)
            finally:
                transport.close()
        except Exception as exc:  # whatever it is, no future may be left waiting
            reason = exc
            if not isinstance(exc, EnvbusError):
                logger.exception("the client's thread ended")
        finally:
            self._end(reason)

    def _serve(self, transport: ZmqPeer) -> None:
        """Do what there is to do until the client is closed, or refused."""
        session, joined = self.session, self.joined
        while (closing := self._closing) is None:
            patience = session.wake_at() - time.monotonic()
            transport.wait(min(max(patience, 0.0), IDLE_WAIT))
            now = time.monotonic()
            self._receive(transport, now)
            self._flush(transport)  # before `tick`, which drops it where the connection is lost
            lost_for, self.trouble = transport.lost_for(), transport.trouble()
            session.tick(now, lost_for, self.trouble)
            self._tell()  # what has waited goes first
            self._obey(now)
            self._flush(transport)
            if session.refused is not None:
                raise session.refused
            if session.ready and not joined.done():
                joined.set_result(None)
        session.end(closing)
        self._flush(transport)

    def _receive(self, transport: ZmqPeer, now: float) -> None:
        for _ in range(AT_ONE_GO):
            if (frames := transport.receive(0.0)) is None:
                return
            try:
                self.session.received(frames, now)
            except (ProtocolError, IndexError) as exc:
                text = f"a message was dropped: {type(exc).__name__}: {brief(str(exc))}"
                self._complaints.add("message", text)

    def _take(self) -> deque[Command]:
        """Return what was handed over since the last call, in order."""
        with self._lock:
            commands, self._commands = self._commands, deque()
            self._bell.silence()
        return commands

    def _obey(self, now: float) -> None:
        """Do what was handed over; nothing of it is kept here, as the thread may wait for long."""
        for command in self._take():
            command(now)

    def begin(self, call: PeerCall, now: float) -> None:
        """Ask."""
        self._counts.asked += 1
        self.session.submit(call, now)

    def tell(self, frames: Frames, _now: float) -> None:
        """Send a notice, as soon as the broker knows this client."""
        self._notices.append(frames)
        self._tell()

    def _cancel(self, request_id: int, _now: float) -> None:
        if request_id in self.session.calls:
            self.session.abandon(self.session.calls[request_id])
            self._counts.cancelled += 1
            self._release()

    def _tell(self) -> None:
        while self.session.ready and self._notices:
            self.session.outgoing.append(self._notices.popleft())
            self._counts.told += 1
            self._release()

    def _release(self) -> None:
        """One that was submitted is settled."""
        with self._lock:
            self._unsettled -= 1

    def _flush(self, transport: ZmqPeer) -> None:
        # All at once: what fails below is taken out of the list there, which would skip the next.
        outgoing = self.session.outgoing.copy()
        self.session.outgoing.clear()
        for frames in outgoing:
            try:
                transport.send(frames)
            except QueueFullError as exc:
                self._on_full(decode_header(frames[0]), exc)

    def _on_full(self, header: Header, why: QueueFullError) -> None:
        """The broker does not read: fail the request that was to be sent, or drop the notice."""
        call = self.session.calls.get(header.request_id)
        if header.kind is Kind.REQUEST and call is not None:
            self.session.abandon(call)
            call.settle(OverloadedError(str(why), request_id=call.request_id, peer=call.to))
        elif header.kind is Kind.NOTICE and header.to:
            self._counts.dropped_notices += 1
            logger.warning("%s to %s was dropped: %s", header.payload_type, header.to, why)

    def settle(self, future: Future[Any], request_id: int, outcome: Outcome) -> None:
        """A request has ended."""
        if isinstance(outcome, Failed):
            outcome = failure_to_error(outcome, request_id)
        counts = self._counts
        if isinstance(outcome, Reply):
            counts.replies += 1
        elif isinstance(outcome, RequestTimeoutError):
            counts.timeouts += 1
        else:
            counts.failures += 1
        self._release()
        if not future.set_running_or_notify_cancel():
            return
        try:
            if isinstance(outcome, Reply):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        except BaseException:  # SystemExit of a callback; of errors the future itself tells
            logger.exception("a callback of request %d raised; others go on", request_id)

    def _end(self, reason: Exception | None) -> None:
        """Refuse what comes from now on, and fail what is unsettled."""
        with self._lock:
            self._closing = error = self._closing or reason or ClosedError("the client has ended")
        self.session.end(error)
        self._obey(time.monotonic())
        self._bell.close()
        if not self.joined.done():
            self.joined.set_exception(error)
