"""What a client's own thread does: it alone uses the socket, keeps deadlines, settles futures.

Leaves out what callers see (`client.py`), and how their threads meet this one
(`client_orders.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import msgspec

from envbus.bus.brief import brief
from envbus.bus.broker import failure_to_error
from envbus.bus.client_orders import Cancelled, Orders, Question, Telling
from envbus.bus.codec import decode, decode_header, encode, encode_header
from envbus.bus.complaints import Complaints
from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    EnvbusError,
    OverloadedError,
    PeerLostError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    VersionMismatchError,
)
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Reply,
    Welcome,
)
from envbus.bus.pending import LOCAL, Pending, PendingRequests
from envbus.bus.serve import HELLO_ID, Codec
from envbus.bus.transport import Frames, PeerTransport

__all__ = ["ClientLoop", "ClientStatistics", "ClientTransport"]

logger = logging.getLogger("envbus.bus.client")

P = TypeVar("P", bound=Payload)

#: Seconds beyond a request's deadline, which the broker keeps, until this side gives it up: only
#: a broker that is gone says nothing for so long.
GRACE = 1.0
#: Seconds between two hellos while none is answered.
_HELLO_INTERVAL = 1.0
#: What a lease is to the loop: it wakes up this often at least, in seconds.
_LONGEST_WAIT = 1.0


class ClientTransport(PeerTransport, Protocol):
    """A peer's side that can also wait for a file descriptor."""

    def wait(self, timeout: float) -> bool:
        """Wait until a message or a watched file descriptor is there, or `timeout` seconds."""
        ...

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` is readable or hung up."""
        ...


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one client. Those without `now` only grow."""

    #: Requests whose future is not done.
    pending_now: int
    #: Requests asked, and how they ended.
    asked: int
    replies: int
    failures: int
    timeouts: int
    cancelled: int
    #: Asked a second time, after their holder was lost.
    resent: int
    #: Replies to requests that had ended already.
    late_replies: int
    #: Notices told, and those of them that were dropped as the broker did not read.
    told: int
    dropped_notices: int
    #: Times that the broker, started again or out of patience, had to be told who this is.
    rejoined: int


class _Counts(msgspec.Struct):
    asked: int = 0
    replies: int = 0
    failures: int = 0
    timeouts: int = 0
    cancelled: int = 0
    resent: int = 0
    late_replies: int = 0
    told: int = 0
    dropped_notices: int = 0
    rejoined: int = 0


class ClientLoop:
    """The thread of one client.

    Args:
        connect: Makes the transport; called in the thread.
        hello: Who this is; `heartbeat` is how often it gives signs of life, in seconds.
        codec: How replies are decoded.
        max_pending: Most requests and notices that may be unsettled at one time.
    """

    def __init__(
        self,
        connect: Callable[[], ClientTransport],
        hello: Hello,
        codec: Codec,
        max_pending: int,
    ) -> None:
        self._connect = connect
        self._hello = hello
        self._codec = codec
        #: Done when the broker has answered the first hello.
        self.joined: Future[Welcome] = Future()
        #: Why there is no connection, for people, as last seen by the thread; "" if unknown.
        self.trouble = ""
        #: What callers hand over; all below is the thread's own.
        self._orders = Orders(max_pending)
        self._pending = PendingRequests()
        self._questions: dict[int, Question] = {}
        #: What waits for the broker, by a number: a request's own, or a negative one. Those that
        #: have ended meanwhile are in it no more.
        self._held: dict[int, Question | Telling] = {}
        self._numbers = itertools.count(-1, -1)
        self._counts = _Counts()
        self._complaints = Complaints(logger)
        self._ready = False
        self._was_lost = False
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._thread = threading.Thread(target=self._run, name="envbus-client", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------

    def submit(self, order: Question | Telling) -> None:
        """Hand something to be sent to the thread.

        Raises:
            ClosedError: The client was closed.
            ProtocolError: The broker refuses this client.
            OverloadedError: Too much is unsettled. Nothing will be sent.
        """
        self._orders.submit(order)

    def stop(self, reason: Exception) -> None:
        """End the thread; what is unsettled fails with `reason`. Idempotent."""
        self._orders.close(reason)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def statistics(self) -> ClientStatistics:
        """Return the counts so far."""
        return ClientStatistics(
            pending_now=self._orders.unsettled, **msgspec.structs.asdict(self._counts)
        )

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason: Exception | None = None
        try:
            transport = self._connect()
            try:
                transport.watch(self._orders.fileno())
                self._serve(transport)
            finally:
                transport.close()
        except Exception as exc:  # whatever it is, no future may be left waiting
            reason = exc
            if not isinstance(exc, EnvbusError):
                logger.exception("the client's thread ended")
        finally:
            self._end(reason)

    def _serve(self, transport: ClientTransport) -> None:
        self._transport = transport
        while self._orders.closing is None:
            transport.wait(self._patience(time.monotonic()))
            while (frames := transport.receive(0.0)) is not None:
                self._take(frames)
            self._look_at_clock(time.monotonic())
            self._take_orders()

    def _patience(self, now: float) -> float:
        due = min(self._next_heartbeat if self._ready else self._next_hello, now + _LONGEST_WAIT)
        deadline = self._pending.next_deadline()
        return max(due - now if deadline is None else min(due, deadline) - now, 0.0)

    def _take_orders(self) -> None:
        for order in self._orders.take():
            if isinstance(order, Cancelled):
                self._forget(order.request_id)
                continue
            if isinstance(order, Question):
                self._counts.asked += 1
                self._keep(order)
            if self._ready:
                self._send_order(order)
            elif isinstance(order, Question):
                self._held[order.request_id] = order
            else:
                self._held[next(self._numbers)] = order

    def _look_at_clock(self, now: float) -> None:
        lost = self._transport.lost_for() > 0.0
        self.trouble = self._transport.trouble()
        for pending in self._pending.expire(now):
            self._counts.timeouts += 1
            question = self._questions[pending.wire_id]
            text = (
                f"timed out after {question.timeout:g} s and the broker said nothing; "
                f"{self.trouble or 'look whether it runs'}"
            )
            self._fail(
                question,
                RequestTimeoutError(text, request_id=question.request_id, peer=question.to),
            )
        asleep = self._ready and now > self._next_heartbeat + self._hello.heartbeat
        if (self._was_lost or asleep) and not lost:
            # It may be another broker by now. One that does not know us says so at once, and then
            # welcomes us; one that does only welcomes us, and what is in flight goes on.
            self._ready = False
            self._say_hello(now, alive=True)
        elif not self._ready and not lost and now >= self._next_hello:
            self._say_hello(now)
        elif self._ready and lost:
            self._ready = False
        elif self._ready and now >= self._next_heartbeat:
            self._beat(now)
        self._was_lost = lost

    def _say_hello(self, now: float, *, alive: bool = False) -> None:
        if alive:
            self._beat(now)
        self._next_hello = now + _HELLO_INTERVAL
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, HELLO_ID, Hello.__name__, _HELLO_INTERVAL)
        with contextlib.suppress(QueueFullError):
            self._transport.send([encode_header(header), *encode(self._hello)])

    def _beat(self, now: float) -> None:
        self._next_heartbeat = now + self._hello.heartbeat
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, Heartbeat.__name__)
        heartbeat = Heartbeat(identity=self._transport.identity)
        with contextlib.suppress(QueueFullError):
            self._transport.send([encode_header(header), *encode(heartbeat)])

    # --- sending -----------------------------------------------------------------------------

    def _keep(self, question: Question) -> None:
        self._questions[question.request_id] = question
        self._pending.open(
            Pending(
                LOCAL,
                question.request_id,
                question.request_id,
                b"",
                question.to,
                question.deadline + GRACE,
                question.timeout,
                question.payload_type,
                question.idempotent,
            )
        )

    def _send_order(self, order: Question | Telling) -> None:
        if isinstance(order, Telling):
            self._send_notice(order)
            return
        if order.request_id not in self._questions:
            return  # it ended while it was held
        left = order.deadline - time.monotonic()
        if left <= 0.0:
            self._pending.settle(order.request_id, b"")
            self._counts.timeouts += 1
            text = f"timed out after {order.timeout:g} s: the broker could not be reached"
            text += f"; {self.trouble}" if self.trouble else ""
            self._fail(order, RequestTimeoutError(text, request_id=order.request_id, peer=order.to))
            return
        header = Header(
            PROTOCOL_VERSION,
            Kind.REQUEST,
            order.request_id,
            order.payload_type,
            left,
            to=order.to,
        )
        try:
            self._transport.send([encode_header(header), *order.frames])
        except QueueFullError as exc:
            self._pending.settle(order.request_id, b"")
            self._counts.failures += 1
            self._fail(order, OverloadedError(str(exc), request_id=order.request_id, peer=order.to))

    def _send_notice(self, telling: Telling) -> None:
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, telling.payload_type, to=telling.to)
        self._counts.told += 1
        try:
            self._transport.send([encode_header(header), *telling.frames])
        except QueueFullError as exc:
            self._counts.dropped_notices += 1
            logger.warning("%s to %s was dropped: %s", telling.payload_type, telling.to, exc)
        finally:
            self._orders.release()

    # --- receiving ---------------------------------------------------------------------------

    def _take(self, frames: Frames) -> None:
        try:
            header = decode_header(frames[0])
        except VersionMismatchError as exc:
            raise VersionMismatchError(f"the broker refuses this client: {exc}") from exc
        except (ProtocolError, IndexError) as exc:
            self._drop(exc)
            return
        if header.kind is Kind.REPLY:
            if header.request_id == HELLO_ID:
                welcome = self._read(Welcome, frames)
                if welcome is not None:
                    self._on_welcome(welcome)
            else:
                self._on_reply(header, frames[1:])
        elif header.kind is Kind.FAILURE:
            failed = self._read(Failed, frames)
            if failed is None:
                text = "it failed, and how cannot be read"
                failed = Failed(code=FailureCode.REMOTE, message=text)
            self._on_failure(header, failed)
        elif header.kind is Kind.REQUEST:
            self._refuse(header)

    def _read(self, payload_type: type[P], frames: Frames) -> P | None:
        """Return the payload; None if it cannot be read, which ends nothing else."""
        try:
            return decode(payload_type, frames[1:])
        except ProtocolError as exc:
            self._drop(exc)
            return None

    def _drop(self, error: Exception) -> None:
        text = f"{self._hello.name} dropped a message: {type(error).__name__}: {brief(str(error))}"
        self._complaints.add("message", text)

    def _on_welcome(self, welcome: Welcome) -> None:
        if not self.joined.done():
            self.joined.set_result(welcome)
        if self._ready:
            return
        self._ready = True
        self._next_heartbeat = time.monotonic() + self._hello.heartbeat
        held, self._held = self._held, {}
        for order in held.values():
            self._send_order(order)

    def _on_reply(self, header: Header, frames: Frames) -> None:
        question = self._settle(header.request_id)
        if question is None:
            return
        reply_type = Payload.registry.get(header.payload_type)
        try:
            if reply_type is None or not issubclass(reply_type, Reply):
                raise DecodeError(
                    f"{question.to} answered {question.payload_type} with {header.payload_type}, "
                    "which is no reply that is known here; import the module that defines it"
                )
            reply = self._codec.decode(reply_type, frames)
        except Exception as exc:  # the border: also what a caller's own codec raises
            self._counts.failures += 1
            self._fail(question, exc)
            return
        self._counts.replies += 1
        self._finish(question)
        if question.future.set_running_or_notify_cancel():
            question.future.set_result(reply)

    def _on_failure(self, header: Header, failed: Failed) -> None:
        if header.request_id == HELLO_ID:
            self._on_refusal(failed)
            return
        if not header.request_id:
            self._on_complaint(failed)
            return
        question = self._settle(header.request_id)
        if question is None:
            return
        if (
            failed.code is FailureCode.PEER_LOST
            and question.idempotent
            and not question.resent
            and question.deadline > time.monotonic()
        ):
            question.resent = True
            self._counts.resent += 1
            self._keep(question)
            self._send_order(question)
            return
        if failed.code is FailureCode.TIMEOUT:
            self._counts.timeouts += 1
        else:
            self._counts.failures += 1
        self._fail(question, failure_to_error(failed, question.request_id))

    def _on_refusal(self, failed: Failed) -> None:
        """The broker does not take our hello."""
        if failed.code is FailureCode.VERSION:
            raise VersionMismatchError(failed.message)
        if failed.code is FailureCode.OVERLOADED and self.joined.done():
            return  # there will be room again: it is said once more
        raise ProtocolError(f"the broker refuses {self._hello.name}: {failed.message}")

    def _on_complaint(self, failed: Failed) -> None:
        """The broker does not know us any more."""
        if failed.code is not FailureCode.NOT_JOINED or not self.joined.done():
            self._complaints.add("told", f"{self._hello.name} was told: {failed.message}")
            return
        self._complaints.add("rejoined", f"{self._hello.name} joins again: {failed.message}")
        self._counts.rejoined += 1
        self._ready = False
        self._next_hello = 0.0
        for question in list(self._questions.values()):
            if question.request_id in self._held:
                continue
            self._pending.settle(question.request_id, b"")
            self._counts.failures += 1
            text = "the broker was started again, or had given this client up, and forgot it"
            self._fail(
                question, PeerLostError(text, request_id=question.request_id, peer=question.to)
            )

    def _refuse(self, header: Header) -> None:
        failed = Failed(
            code=FailureCode.PROTOCOL,
            message=f"{self._hello.name} answers no requests, also not {header.payload_type}",
        )
        answer = Header(PROTOCOL_VERSION, Kind.FAILURE, header.request_id, Failed.__name__)
        with contextlib.suppress(QueueFullError):
            self._transport.send([encode_header(answer), *encode(failed)])

    # --- ends --------------------------------------------------------------------------------

    def _settle(self, request_id: int) -> Question | None:
        if self._pending.settle(request_id, b"") is None:
            self._counts.late_replies += 1
            return None
        return self._questions[request_id]

    def _forget(self, request_id: int) -> None:
        """A caller cancelled its future."""
        if self._pending.settle(request_id, b"") is not None:
            self._counts.cancelled += 1
            self._finish(self._questions[request_id])

    def _fail(self, question: Question, error: Exception) -> None:
        """End a request that was settled."""
        self._finish(question)
        if question.future.set_running_or_notify_cancel():
            question.future.set_exception(error)

    def _finish(self, question: Question) -> None:
        del self._questions[question.request_id]
        self._held.pop(question.request_id, None)
        self._orders.release()

    def _end(self, reason: Exception | None) -> None:
        """Refuse what comes from now on, and fail what is unsettled."""
        error, orders = self._orders.end(reason or ClosedError("the client has ended"))
        for order in orders:
            if isinstance(order, Question):
                self._questions[order.request_id] = order
        for question in list(self._questions.values()):
            self._fail(question, error)
        if not self.joined.done():
            self.joined.set_exception(error)
