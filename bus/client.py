"""The asking side of the bus: a client of a standalone broker.

Leaves out the thread that owns the socket (`client_loop.py`).
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any

from envbus.bus.client_loop import ClientLoop, ClientStatistics
from envbus.bus.client_orders import Question, Telling
from envbus.bus.errors import ClosedError, ConfigError, EncodeError, RequestTimeoutError
from envbus.bus.interrupts import uninterrupted, uninterrupted_call
from envbus.bus.keys import PathLike, PeerKeys
from envbus.bus.messages import Hello, Notice, Payload, R, Request
from envbus.bus.serve import Codec, PlainCodec
from envbus.bus.transport import Frames
from envbus.bus.zmq_peer import ZmqPeer

__all__ = ["Client"]

#: Seconds for the client's thread to end; it closes a socket with bounded linger.
_END_TIMEOUT = 5.0


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
            _check_seconds(setting, value)
        if max_pending < 1:
            raise ConfigError(f"max_pending must be positive, not {max_pending}")
        peer_keys = PeerKeys.load(keys, server_key)
        self._codec = codec or PlainCodec()
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self.name = name or f"client-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        identity = f"client.{secrets.token_hex(8)}".encode()
        hello = Hello(name=self.name, pid=os.getpid(), heartbeat=heartbeat)
        with uninterrupted():
            self._loop = ClientLoop(
                lambda: ZmqPeer(endpoint, identity, keys=peer_keys), hello, self._codec, max_pending
            )
            self._loop.start()
            # The thread must not keep this object alive, nor outlive it.
            self._finalizer = weakref.finalize(self, _stop, self._loop, self._owner)
        try:
            welcome = self._loop.joined.result(timeout)
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
        self._max_message_bytes = welcome.max_message_bytes

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
            and must not block. It fails with

            - `RequestTimeoutError` when `timeout` has passed,
            - `NoPeerError` at once if nobody ready has that name or offers that service,
            - `OverloadedError` at once if the peer, or the backlog of the service, is full,
            - `PeerLostError` when the worker died or its lease ran out, or the broker was started
              again; an idempotent request is asked once more before,
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
        self._assert_usable()
        _check_seconds("timeout", timeout)
        future: Future[Any] = Future()
        self._loop.submit(
            Question(
                request_id=next(self._numbers),
                to=_checked_name(to),
                payload_type=type(request).__name__,
                frames=self._encode(request),
                deadline=time.monotonic() + timeout,
                timeout=timeout,
                idempotent=type(request).idempotent,
                future=future,
            )
        )
        return future

    def tell(self, to: str, notice: Notice) -> None:
        """Send a notice to a peer or to one peer of a service; nobody says whether it arrived.

        Returns at once. May be called from any thread.

        Raises:
            ClosedError: This client was closed.
            OverloadedError: Too much of this client is unsettled. Nothing was sent.
            EncodeError: The notice cannot cross a socket, or is larger than the broker takes.
        """
        self._assert_usable()
        self._loop.submit(Telling(_checked_name(to), type(notice).__name__, self._encode(notice)))

    def statistics(self) -> ClientStatistics:
        """Return counts since the start, as a frozen struct."""
        return self._loop.statistics()

    @uninterrupted_call
    def close(self) -> None:
        """Close the connection; what is unsettled fails with `ClosedError`. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pending={self.statistics().pending_now}" if self._finalizer.alive else "closed"
        return f"<Client {self.name} {state}>"

    def _encode(self, payload: Payload) -> Frames:
        frames = self._codec.encode(payload)
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > self._max_message_bytes:
            raise EncodeError(
                f"{type(payload).__name__} has {size} bytes; the broker takes at most "
                f"{self._max_message_bytes}"
            )
        return frames

    def _assert_usable(self) -> None:
        if self._owner != os.getpid():
            raise ClosedError(f"this client belongs to process {self._owner}; make a new one here")


def _stop(loop: ClientLoop, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy has neither the thread nor the socket
        loop.stop(ClosedError("this client was closed"))
        loop.join(_END_TIMEOUT)


def _checked_name(to: str) -> str:
    if not to:
        raise ConfigError("a request needs the name of a peer or service")
    return to


def _check_seconds(setting: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{setting} must be a positive, finite number of seconds, not {value}")
