"""The worker's side of the bus: say hello, answer requests one by one, leave.

Leaves out what requests mean (the handlers are the caller's) and how the process was started.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from envbus.bus.brief import brief
from envbus.bus.complaints import Complaints
from envbus.bus.errors import (
    ClosedError,
    EncodeError,
    EnvbusError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    TransportError,
)
from envbus.bus.interrupts import join_ending
from envbus.bus.peer.session import PeerSession
from envbus.bus.transport.interface import AT_ONE_GO, PeerTransport
from envbus.bus.wire.codec import (
    Placeholders,
    decode,
    decode_header,
    encode,
    encode_header,
    message,
)
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Notice,
    Payload,
    Reply,
    Request,
    Shutdown,
    Welcome,
)

__all__ = ["IDLE_WAIT", "Codec", "Handlers", "Heartbeats", "PlainCodec", "Worker", "describe"]

logger = logging.getLogger("envbus.bus.peer.worker")

P = TypeVar("P", bound=Payload)
Handlers = Mapping[type[Request[Any]], Callable[[Any], Reply]]

#: Seconds between looks at the connection, and at whether there is still anything to do.
IDLE_WAIT: Final = 1.0
#: Seconds without an answer after which a worker says whom it waits for.
_TOLD_AFTER = 2.0
_ASKED = "is it running, and is the endpoint right?"


class Codec(Protocol):
    """Turns payloads into frames and back; a local worker's also uses its pipe."""

    def encode(self, payload: Payload) -> Frames:
        """Return payload and buffer frames."""

    def decode(self, payload_type: type[P], frames: Frames) -> P:
        """Return the payload; raises `DecodeError`."""


class PlainCodec:
    """What can cross a socket and nothing else.

    Args:
        placeholders: Payload fields, as `Placeholders` takes them, in which an object that cannot
            cross is replaced by a `Placeholder`, with one warning, instead of failing the payload.
        writable: Decoded arrays are copies of the caller's own, not read-only views.
    """

    def __init__(self, *, placeholders: tuple[str, ...] = (), writable: bool = False) -> None:
        self._outbox = Placeholders(placeholders, self._warn_once) if placeholders else None
        self._writable = writable
        self._warned = False

    def encode(self, payload: Payload) -> Frames:
        """Return payload and buffer frames; raises `EncodeError` for what cannot cross."""
        return encode(payload, self._outbox)

    def decode(self, payload_type: type[P], frames: Frames) -> P:
        """Return the payload; raises `DecodeError`."""
        return decode(payload_type, frames, writable=self._writable)

    def _warn_once(self, place: str, type_name: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is a %s, which cannot cross a socket: a placeholder stands there and "
                "wherever else this happens",
                place,
                type_name,
            )


class Worker:
    """Answers requests in the order in which they come, in the thread that calls `run`.

    One with heartbeats leaves when its broker, started again or after a long silence, does not know
    it any more: what it holds belongs to somebody who has given it up.

    Args:
        transport: Connected to the broker; the worker closes it.
        hello: Who this is and what it offers.
        handlers: One function per request type. What it raises fails that request, with type
            and traceback as text, and nothing else.
        incarnation: Which life of this peer this is, from 0.
        codec: How payloads become frames.
        patience: Seconds that the broker may be out of reach before `run` gives up; None: for
            ever, for a worker whose process is watched over another way.
        amend: `(request, reply) -> reply`, asked for another reply where one cannot be sent.
            None: the request fails then.
        beside: Called when no message has come: does what a word in shared memory asks.
    """

    def __init__(
        self,
        transport: PeerTransport,
        hello: Hello,
        handlers: Handlers,
        *,
        incarnation: int = 0,
        codec: Codec | None = None,
        patience: float | None = None,
        amend: Callable[[Any, Reply], Reply] | None = None,
        beside: Callable[[], object] | None = None,
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._handlers = {cls.__name__: (cls, handler) for cls, handler in handlers.items()}
        self._incarnation = incarnation
        self._codec = codec or PlainCodec()
        self._patience = patience
        self._amend = amend
        self._beside = beside
        self._unknown = False
        self._stopping = False
        self._complaints = Complaints(logger)

    def stop(self) -> None:
        """Let `run` return after the present request. May be called from a handler."""
        self._stopping = True

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._transport.close()

    def tell(self, notice: Notice) -> None:
        """Send a notice, unless the broker does not read. May be called from a handler."""
        with contextlib.suppress(QueueFullError):
            self._send(Kind.NOTICE, 0, notice)

    def on_unknown(self) -> None:
        """The broker does not know this worker any more. May be called from any thread."""
        self._unknown = True

    def join(self, timeout: float) -> Welcome:
        """Say hello and return the broker's answer.

        Raises:
            RequestTimeoutError: No broker answered within `timeout` seconds.
            VersionMismatchError: The broker speaks another protocol version.
            ProtocolError: The broker refuses this peer; the message says why.
        """
        transport, begun, told = self._transport, time.monotonic(), False
        session = PeerSession(self._hello, incarnation=self._incarnation)
        while session.welcome is None:
            now = time.monotonic()
            session.tick(now, transport.lost_for(), transport.trouble())
            why = transport.trouble() or _ASKED
            if now - begun >= timeout:
                raise RequestTimeoutError(
                    f"no broker answered within {timeout} s; {why}", request_id=0, peer="broker"
                )
            if not told and now - begun >= _TOLD_AFTER:
                told = True
                logger.warning(
                    "%s: no broker has answered for %g s, and is waited for until %g s are over; "
                    "%s",
                    self._hello.name,
                    _TOLD_AFTER,
                    timeout,
                    why,
                )
            while session.outgoing:
                transport.send(session.outgoing.pop(0))
            told_at = begun + (timeout if told else min(_TOLD_AFTER, timeout))
            patience = min(session.wake_at(), told_at) - now
            frames = transport.receive(min(max(patience, 0.0), IDLE_WAIT))
            if frames is not None:
                try:
                    session.received(frames, now)
                except (ProtocolError, IndexError) as exc:
                    self._drop(exc)
            if session.refused is not None:
                raise session.refused
        return session.welcome

    def run(self) -> bool:
        """Serve until `stop`, a `Shutdown`, or the loss of the broker; then say goodbye.

        Returns:
            Whether it was told to leave; else the log says how it has lost the broker.
        """
        told = True
        try:
            while not self._stopping:
                frames = self._transport.receive(0.0 if self._unknown else IDLE_WAIT)
                if self._unknown:
                    logger.error("%s leaves: the broker has given it up", self._hello.name)
                    told = False
                    break
                if frames is not None:
                    self._take(frames)
                    continue
                if self._beside is not None:
                    self._beside()
                if self._patience is not None and self._transport.lost_for() > self._patience:
                    logger.error(
                        "%s: the broker has been out of reach for %s s; leaving",
                        self._hello.name,
                        self._patience,
                    )
                    told = False
                    break
            self._send(Kind.NOTICE, 0, Goodbye())
        except ClosedError:
            pass
        finally:
            self._transport.close()
        return told

    def _take(self, frames: Frames) -> None:
        try:
            header = decode_header(frames[0])
            if header.kind is Kind.REQUEST:
                self._answer(header, frames)
            elif header.kind is Kind.NOTICE and header.payload_type == Shutdown.__name__:
                self._stopping = True
            elif header.kind is Kind.FAILURE:
                self._on_failure(decode(Failed, frames[1:]))
        except TransportError:  # not the message: this socket itself is in trouble
            raise
        except Exception as exc:  # the border: a message ends nobody else's work
            self._drop(exc)

    def _drop(self, error: Exception) -> None:
        """A message cannot be used, and there is nobody to tell."""
        text = f"{self._hello.name} dropped a message: {type(error).__name__}: {brief(str(error))}"
        self._complaints.add("message", text)

    def _on_failure(self, failed: Failed) -> None:
        """The broker complains."""
        self._complaints.add("told", f"{self._hello.name} was told: {failed.message}")
        if self._hello.heartbeat and failed.code is FailureCode.NOT_JOINED:
            self._unknown = True

    def _answer(self, header: Header, frames: Frames) -> None:
        try:
            request_type, handler = self._handlers[header.payload_type]
        except KeyError:
            known = ", ".join(sorted(self._handlers))
            message = f"{self._hello.name} does not answer {header.payload_type}; it does: {known}"
            self._fail(header, Failed(code=FailureCode.PROTOCOL, message=message))
            return
        try:
            request = self._codec.decode(request_type, frames[1:])
            reply = handler(request)
        except Exception as exc:  # the border: a handler's exception fails its request only
            self._fail(header, describe(exc))
            return
        try:
            try:
                self._send(Kind.REPLY, header.request_id, reply)
            except EncodeError:
                if self._amend is None:
                    raise
                self._send(Kind.REPLY, header.request_id, self._amend(request, reply))
        except QueueFullError:
            logger.error(
                "%s: the broker does not read; the reply to request %d is lost",
                self._hello.name,
                header.request_id,
            )
        except Exception as exc:  # what the handler returned
            self._fail(header, describe(exc))

    def _fail(self, header: Header, failed: Failed) -> None:
        try:
            self._send(Kind.FAILURE, header.request_id, failed)
        except QueueFullError:
            logger.error("%s: the broker does not read; lost: %s", self._hello.name, failed)

    def _send(self, kind: Kind, request_id: int, payload: Payload) -> None:
        frames = self._codec.encode(payload)
        name = type(payload).__name__
        header = Header(PROTOCOL_VERSION, kind, request_id, name, 0.0, self._incarnation)
        self._transport.send([encode_header(header), *frames])


def describe(exc: BaseException) -> Failed:
    """Return what of an exception may cross: its type, text and traceback."""
    cls = type(exc)
    code = FailureCode.PROTOCOL if isinstance(exc, ProtocolError) else FailureCode.REMOTE
    try:
        message = str(exc)
    except Exception:  # a broken __str__ must not hide the failure
        message = f"<{cls.__qualname__} whose str() raises>"
    return Failed(
        code=code,
        message=message,
        remote_type=f"{cls.__module__}.{cls.__qualname__}",
        remote_traceback="".join(traceback.format_exception(exc)),
    )


class Heartbeats:
    """Signs of life from a thread with a socket of its own, while the worker is busy.

    Args:
        connect: Makes the thread's transport; called in the thread that uses it.
        identity: Routing id of the peer that is alive.
        interval: Seconds between two.
        on_unknown: Called, in the thread, when the broker says that it does not know that peer.
    """

    def __init__(
        self,
        connect: Callable[[], PeerTransport],
        identity: bytes,
        interval: float,
        on_unknown: Callable[[], object] | None = None,
    ) -> None:
        self._connect = connect
        self._identity = identity
        self._interval = interval
        self._on_unknown = on_unknown
        #: Held until it is to stop. No `Event`, whose `wait` holds a lock that its `set` wants: a
        #: garbage collection, which may come in between, stops this.
        self._going = threading.Lock()
        self._going.acquire()
        self._thread = threading.Thread(target=self._run, name="envbus-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending; returns when the thread's socket is closed, or at once in that thread."""
        with contextlib.suppress(RuntimeError):  # it was stopped already
            self._going.release()
        join_ending(self._thread, self._interval + IDLE_WAIT)

    def _run(self) -> None:
        frames = message(Kind.NOTICE, Heartbeat(identity=self._identity))
        if (transport := self._connected()) is None:
            return
        try:
            while not self._going.acquire(timeout=self._interval):
                try:
                    transport.send(frames)
                except QueueFullError:
                    logger.debug("heartbeat skipped: the broker does not read")
                for _ in range(AT_ONE_GO):
                    if (answer := transport.receive(0.0)) is None:
                        break
                    self._take(answer)
        finally:
            transport.close()

    def _connected(self) -> PeerTransport | None:
        """Return the transport as soon as it can be made; None: it was stopped before."""
        told = False
        while True:
            try:
                return self._connect()
            except EnvbusError as exc:
                if not told:
                    logger.error("no heartbeats, which is tried again: %s", exc)
                told = True
            if self._going.acquire(timeout=self._interval):
                return None

    def _take(self, frames: Frames) -> None:
        """Read the only answer that a heartbeat ever gets: that its peer is not known."""
        try:
            header = decode_header(frames[0])
        except (ProtocolError, IndexError):
            return
        if header.kind is Kind.FAILURE and self._on_unknown is not None:
            self._on_unknown()
