"""The broker's shell: performs what `core.py` decides, over one transport.

Embedded, its owner calls `ask` and `poll` from one thread and no thread is added. Standalone
(`run`), the same loop serves peers only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from envbus.bus.brief import brief
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Accepted,
    Ask,
    BrokerStatistics,
    Cancel,
    Complete,
    Event,
    Expect,
    FailLocal,
    Log,
    Malformed,
    Notify,
    PeerGone,
    PeerLeft,
    PeerReady,
    Received,
    Refused,
    Send,
    Tick,
    Unsendable,
)
from envbus.bus.broker.stall_grace import StallGrace
from envbus.bus.complaints import Complaints, Lines
from envbus.bus.errors import (
    ConfigError,
    DecodeError,
    NoPeerError,
    OverloadedError,
    PeerLostError,
    ProtocolError,
    QueueFullError,
    RemoteError,
    RequestError,
    RequestTimeoutError,
    TransportError,
    UnknownPeerError,
    VersionMismatchError,
)
from envbus.bus.transport.interface import RouterTransport
from envbus.bus.transport.unix_sockets import Bell
from envbus.bus.wire.codec import decode_header, encode, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Kind,
    Notice,
    Payload,
    Reply,
    Shutdown,
)

__all__ = ["Broker", "Outcome", "failure_to_error"]

logger = logging.getLogger("envbus.bus.broker.loop")

#: Messages taken before deadlines are judged and the owner gets its turn. Peers that keep to the
#: protocol never have as many under way: a queue holds 1000, a request is one message.
_MAX_DRAINED = 10_000
#: Seconds of one wait at most; longer ones, as those without a deadline, are too large for `epoll`.
_LONGEST_WAIT = 1e6
#: Of a flood, so many messages, and then more for so many seconds only: a ROUTER takes one of each
#: peer by turns, so that all others were heard by then.
_FLOOD = 1000
_FLOOD_SECONDS = 0.1

# Looking up a member of an enum costs as much as a method call; these are read per message.
_REPLY = Kind.REPLY
_FAILURE = Kind.FAILURE

#: What `poll` returns: ends of local requests, and news of peers.
Outcome: TypeAlias = Complete | FailLocal | PeerReady | PeerLeft | Notify


class Broker:
    """One ROUTER socket, the requests pending on it, and the peers behind it.

    Not thread-safe: one thread creates, uses and closes it.

    Args:
        transport: The socket; the broker closes it.
        core: What decides.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        transport: RouterTransport,
        core: BrokerCore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._core = core
        self._clock = clock
        self._stall_grace = StallGrace()
        self._outcomes: list[Outcome] = []
        self._accepted = 0
        self._stopping = False
        self._has_more = False
        #: Beside the transport's descriptor, which tells of changes only, once somebody has asked
        #: for one: rings where that has told already of messages that are there.
        self._bell = Bell()
        self._outside: select.epoll | None = None
        #: Messages that were not sent since their peer does not read.
        self._unread = 0
        #: About messages that made this program raise what is no refusal.
        self.complaints = Complaints(logger)
        self._lines = Lines(logger)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What peers connect to."""
        return self._transport.endpoints

    def ask(self, to: bytes | str, payload_type: str, frames: Frames, *, timeout: float) -> int:
        """Send a request and return its id; `poll` returns its end, exactly once.

        Args:
            to: Routing id of a peer, or the name of a peer or service.
            payload_type: Name of the payload's class.
            frames: Payload and buffers. Buffers are sent without a copy: do not write to them
                until the end of the request.
            timeout: Seconds until it fails, counted from now; positive. `NO_DEADLINE` lifts it.

        Raises:
            OverloadedError: A limit of requests in flight is reached. Nothing was sent.
            NoPeerError: No ready peer has that name or offers that service.
            TransportError: There is no memory or descriptor left to send it.
        """
        if not timeout > 0:
            raise ConfigError(f"timeout must be positive, not {timeout}")
        now = self._clock()
        if self._stall_grace.is_away(now) and self._core.wake_at() is None:
            self._stall_grace.leaves(now)  # nobody was waiting for it meanwhile
        self._accepted = 0
        self._handle(Ask(to, payload_type, timeout, frames))
        return self._accepted

    def cancel(self, request_id: int) -> None:
        """Forget a local request; its reply will be dropped and counted as late."""
        self._handle(Cancel(request_id))

    def is_pending(self, request_id: int) -> bool:
        """Return whether the owner's request has not ended; asked after a `poll`."""
        return self._core.is_pending(request_id)

    def tell(self, peer: bytes, notice: Notice) -> bool:
        """Send a notice; return whether it was sent. If not it is dropped, with a log line."""
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, type(notice).__name__)
        return self._tell(peer, header, notice)

    def answer(self, peer: bytes, request_id: int, answer: Reply | Failed) -> bool:
        """Answer a peer's request that came as a `Notify`; return whether it was sent.

        A peer that is gone or does not read gets nothing: its request is its own to time out.

        Raises:
            EncodeError: The answer cannot be expressed. Nothing was sent.
        """
        kind = _FAILURE if type(answer) is Failed else _REPLY
        header = Header(PROTOCOL_VERSION, kind, request_id, type(answer).__name__)
        return self._tell(peer, header, answer)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is sent inside the context at its end, if that costs less: see `hold`."""
        self._transport.hold()
        try:
            yield
        finally:
            self._transport.release()

    def shut_down(self, peer: bytes) -> bool:
        """Ask a peer to finish what it does and leave; return whether that was sent."""
        return self.tell(peer, Shutdown())

    def expect(self, peer: bytes, name: str, incarnation: int) -> None:
        """Announce that a child process will say hello under this identity."""
        self._handle(Expect(peer, name, incarnation))

    def peer_gone(self, peer: bytes, reason: str) -> None:
        """Report that a peer's process has ended; everything it held fails."""
        self._handle(PeerGone(peer, reason))

    def fileno(self) -> int:
        """Return a descriptor to wait for beside others, readable while messages are there.

        Deadlines are nothing that it tells of. Where a system has no epoll, or no descriptor left,
        it is the transport's, which tells of changes only.
        """
        if self._outside is None:
            try:
                self._outside = self._open_outside()
            except (AttributeError, OSError, TransportError):
                return self._transport.fileno()
            self._look_behind()
        return self._outside.fileno()

    def ring(self) -> None:
        """Have `fileno` be readable until `poll` has found no more messages."""
        self._bell.ring()

    @property
    def has_more(self) -> bool:
        """Whether messages are there, which `poll` has left, or which have come since."""
        self._look_behind()
        return self._has_more

    def watch(self, fd: int) -> None:
        """Let `poll` return early when `fd` is readable; the caller reads it."""
        self._transport.watch(fd)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`."""
        self._transport.unwatch(fd)

    def poll(self, timeout: float, *, most: int = _MAX_DRAINED) -> list[Outcome]:
        """Wait up to `timeout` seconds for news and return them; 0 looks without waiting.

        All messages that are there are taken before deadlines and leases are judged, so that
        an owner that was away for minutes, or whose process was stopped, finds answers, not
        time-outs; see `stall_grace.py`. May return an empty
        list before the time is up, when a watched file descriptor has news.

        Args:
            timeout: Seconds.
            most: Messages to take before the owner gets its turn, while no deadline is near.
        """
        begun = self._clock()
        waited = 0.0
        self._has_more = True  # as long as no look has found that there are none
        try:
            if timeout > 0 and not self._outcomes:
                wake_at = self._core.wake_at()
                if wake_at is not None:
                    timeout = min(timeout, max(self._stall_grace.wake_at(wake_at) - begun, 0.0))
                timeout = min(timeout, _LONGEST_WAIT)
                self._transport.wait(timeout)
                waited = timeout
            now = self._clock()
            self._stall_grace.looks(begun, waited, now)
            self._drain(most)
            if self._stall_grace.may_judge(self._core.wake_at(), now):
                self._drain(thoroughly=True)  # what came meanwhile counts
                self._handle(Tick())
        finally:
            if self._has_more:
                self._bell.ring()
        outcomes, self._outcomes = self._outcomes, []
        self._stall_grace.leaves(self._clock())
        return outcomes

    def run(self) -> None:
        """Serve peers until `stop`; for a standalone broker."""
        while not self._stopping:
            for outcome in self.poll(1.0):
                if isinstance(outcome, PeerReady):
                    self._lines.add(logging.INFO, f"{outcome.hello.name} joined")
                elif isinstance(outcome, PeerLeft):
                    self._lines.add(logging.INFO, f"{outcome.name} left: {outcome.reason}")

    def stop(self) -> None:
        """Let `run` return within a second. May be called from a signal handler."""
        self._stopping = True

    def statistics(self) -> BrokerStatistics:
        """Return counts since the start."""
        return msgspec.structs.replace(
            self._core.statistics(),
            refused_connections=self._transport.refused_connections,
            unread=self._unread,
            queued_bytes_now=self._transport.queued_bytes,
        )

    def close(self) -> None:
        """Close the socket. Idempotent; pending requests get no outcome any more."""
        if self._outside is not None:
            self._outside.close()
        self._bell.close()
        self._transport.close()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open_outside(self) -> select.epoll:
        outside = select.epoll()
        try:
            outside.register(self._transport.fileno(), select.EPOLLIN)
            outside.register(self._bell.fileno(), select.EPOLLIN)
        except BaseException:
            outside.close()
            raise
        return outside

    def _look_behind(self) -> None:
        """Ring for messages of which the transport's descriptor does not tell, if there are any."""
        if not self._has_more and self._transport.hides_messages:
            self._has_more = True
        if self._has_more:
            self._bell.ring()

    def _drain(self, most: int = _MAX_DRAINED, *, thoroughly: bool = False) -> None:
        """Take the messages that are there; of a flood, so many that others get their turn.

        Args:
            most: How many at most.
            thoroughly: Look again for what the last `wait` has not seen.
        """
        receive = self._transport.receive
        until = math.inf
        self._has_more = True
        for taken in range(most):
            if taken >= _FLOOD:  # asked no sooner: it costs
                now = self._clock()
                until = min(until, now + _FLOOD_SECONDS)
                if now > until:
                    return
            message = receive()
            if message is None and thoroughly and self._transport.wait(0.0):
                message = receive()
            if message is None:
                self._bell.silence()
                self._has_more = False
                return
            peer, frames = message
            header = None
            try:
                try:
                    header = decode_header(frames[0])
                except IndexError:
                    self._handle(Malformed(peer, "a message without a header frame"))
                except VersionMismatchError as exc:
                    self._handle(Malformed(peer, str(exc), FailureCode.VERSION, exc.request_id))
                except DecodeError as exc:
                    self._handle(Malformed(peer, str(exc), request_id=exc.request_id))
                else:
                    # Asked once in a peer's life only: it costs a call into libzmq.
                    user = self._transport.user_of(frames) if header.payload_type == "Hello" else ""
                    self._handle(Received(peer, header, frames[1:], user))
            except TransportError:  # not the message: this socket itself is in trouble
                raise
            except Exception as exc:  # the border: a message of one peer ends nobody else's work
                self._on_surprise(peer, header, exc)

    def _on_surprise(self, peer: bytes, header: Header | None, error: Exception) -> None:
        """A message made this program raise what is no refusal."""
        what = f"{type(error).__name__}: {brief(str(error))}"
        name = self._core.peer_name(peer) or peer.hex()
        self.complaints.add("message", f"a message of {name} was not taken: {what}", error)
        if header is not None and header.kind is Kind.REQUEST:
            failed = Failed(code=FailureCode.PROTOCOL, message=f"it could not be taken: {what}")
            self.answer(peer, header.request_id, failed)

    def _handle(self, event: Event) -> None:
        for effect in self._core.handle(event, self._clock()):
            if type(effect) is Complete or type(effect) is Notify:  # most of all
                self._outcomes.append(effect)
            elif isinstance(effect, Send):
                self._send(effect, event)
            elif isinstance(effect, Accepted):
                self._accepted = effect.wire_id
            elif isinstance(effect, Refused):
                raise failure_to_error(Failed(code=effect.code, message=effect.message), 0)
            elif isinstance(effect, Log):
                self._lines.add(effect.level, effect.message)
            else:
                self._outcomes.append(effect)

    def _tell(self, peer: bytes, header: Header, payload: Payload) -> bool:
        """Send what nobody waits for to be answered; return whether it was sent."""
        try:
            self._put(peer, [encode_header(header), *encode(payload)])
        except (UnknownPeerError, QueueFullError) as exc:
            self._unread += isinstance(exc, QueueFullError)
            # Within a rate: who asks and does not read has it said for each request.
            self._lines.add(logging.INFO, f"{header.payload_type} to {peer!r} was not sent: {exc}")
            return False
        return True

    def _put(self, peer: bytes, frames: Frames) -> None:
        """Send, which may use up what the transport's descriptor had to tell."""
        try:
            self._transport.send(peer, frames)
        finally:
            if self._outside is not None:
                self._look_behind()

    def _send(self, effect: Send, event: Event) -> None:
        try:
            self._put(effect.peer, [encode_header(effect.header), *effect.frames])
        except UnknownPeerError as exc:
            code, message = FailureCode.PEER_LOST, str(exc)
        except QueueFullError as exc:
            self._unread += 1
            code, message = FailureCode.OVERLOADED, str(exc)
        except TransportError as exc:  # no memory or descriptor for it
            self._handle(Cancel(effect.wire_id))
            if isinstance(event, Ask) or not effect.wire_id or self.is_pending(effect.wire_id):
                raise
            name = self._core.peer_name(effect.peer) or ""
            failed = Failed(code=FailureCode.OVERLOADED, message=str(exc), peer=name)
            self._outcomes.append(FailLocal(effect.wire_id, failed))  # and others are sent
            return
        else:
            return
        self._handle(Unsendable(effect.peer, effect.wire_id, code, message))


def failure_to_error(failed: Failed, request_id: int) -> RequestError | ProtocolError:
    """Return the exception that a failure stands for, ready to be raised."""
    peer = failed.peer or None
    match failed.code:
        case FailureCode.TIMEOUT:
            return RequestTimeoutError(failed.message, request_id=request_id, peer=peer)
        case FailureCode.PEER_LOST | FailureCode.NOT_JOINED:
            return PeerLostError(failed.message, request_id=request_id, peer=peer)
        case FailureCode.OVERLOADED:
            return OverloadedError(failed.message, request_id=request_id, peer=peer)
        case FailureCode.NO_PEER:
            return NoPeerError(failed.message, request_id=request_id, peer=peer)
        case FailureCode.REMOTE:
            return RemoteError(
                failed.message,
                request_id=request_id,
                peer=peer,
                remote_type=failed.remote_type,
                remote_traceback=failed.remote_traceback,
            )
        case FailureCode.VERSION | FailureCode.PROTOCOL:
            return ProtocolError(failed.message)
