"""A peer's side of the talk with its broker: hello, signs of life, requests, and hello again.

Pure: no socket, clock or thread in this file. Whoever owns those hands in what arrives and what
time it is, sends what `outgoing` holds, and looks again at `wake_at`.

```
GREETING ──welcome──▶ READY
    ▲                   │
    └── connection lost, or the broker forgot us
any state ──refused──▶ REFUSED
```

What is asked meanwhile is sent when the broker has welcomed us. A broker that was started again, or
has given us up, says that it does not know us: what it had of us is lost, and fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Final, TypeAlias

import msgspec

from envbus.bus.errors import (
    DecodeError,
    EncodeError,
    PeerLostError,
    ProtocolError,
    RequestTimeoutError,
    VersionMismatchError,
)
from envbus.bus.wire.codec import decode, decode_header, encode_header, message
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import lengths_of
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Reply,
    Welcome,
)

__all__ = ["GRACE", "HELLO_ID", "Outcome", "PeerCall", "PeerSession"]

#: Request id of a hello; requests, counted from 1, never get that far. So its refusal is told
#: from complaints, which have the id 0, and from failures of requests.
HELLO_ID: Final = 2**62
#: Seconds beyond a request's time until this side gives it up: the other side keeps that time, and
#: only one that does not look at its sockets says nothing for so long.
GRACE: Final = 1.0
#: Seconds between the first two hellos while none is answered, and at most: it doubles.
_HELLO_INTERVAL: Final = 0.5
_LONGEST_HELLO_INTERVAL: Final = 8.0
#: Seconds between looks at a connection that is lost: nothing tells when it is back.
_LOST_INTERVAL: Final = 0.05

#: How a request ends. Exceptions that are none of ours are those of a caller's own codec.
Outcome: TypeAlias = "Reply | Failed | Exception"


class PeerCall(msgspec.Struct, eq=False):
    """A request and who waits for its end."""

    payload: Payload
    frames: Frames
    #: None: any that is known here.
    reply_type: type[Reply] | None
    #: Seconds of the caller's clock: when it was made, and until when an answer is of use.
    begun: float
    deadline: float
    #: Called once, with the reply or what took its place.
    settle: Callable[[Outcome], None]
    #: Name of a peer or service.
    to: str = ""
    request_id: int = 0
    #: Whether the other side may have it.
    sent: bool = False
    #: Whether its first holder was lost and it was sent again.
    resent: bool = False
    #: What was put into `outgoing` of it last.
    message: Frames = ()


class PeerSession:
    """One peer's talk, over as many connections as it takes.

    Args:
        hello: Who this is.
        incarnation: Which life of this peer this is, from 0.
        identity: Under which `tick` gives signs of life, each `hello.heartbeat` seconds, over the
            connection itself; empty: somebody else does.
        patience: Seconds without a connection after which requests fail.
        decode: Makes a payload of frames.
        complain: Told what is wrong, by kind and as text, where nobody waits for an answer.

    Attributes:
        outgoing: Frames to be sent, oldest first; the owner takes them out.
        calls: Unsettled requests by id.
        refused: Why there is nothing more to be said.
        ready: Whether requests are sent at once.
        welcome: The last one; None: there was none.
        rejoined: How often the broker had to be told anew who this is.
        resent: Requests that were sent a second time, after their holder was lost.
        late: Answers to requests that had ended.
    """

    #: For messages to people: who is at the other side.
    other: ClassVar[str] = "broker"

    def __init__(
        self,
        hello: Hello,
        *,
        incarnation: int = 0,
        identity: bytes = b"",
        patience: float = math.inf,
        decode: Callable[[type[Reply], Frames], Reply] = decode,
        complain: Callable[[str, str], object] = lambda _kind, _text: None,
    ) -> None:
        self._hello = hello
        self._incarnation = incarnation
        self._identity = identity
        self._patience = patience
        self._decode = decode
        self._complain = complain
        self._numbers = itertools.count(1)
        #: When to say it, or to look whether it can be said.
        self._next_hello = 0.0
        self._interval = _HELLO_INTERVAL
        #: Whether the next hello is one of `forgotten`, and when the last such was said.
        self._hurries, self._hurried_at = False, -math.inf
        #: Whether a hello was said that no welcome has come to.
        self._greeting = False
        self._next_beat = 0.0
        #: Whether there was no connection when the clock was looked at last.
        self._lost = False
        #: Whether the broker has said since its last welcome that it forgot us.
        self._was_forgotten = False
        #: No request is to be given up before.
        self._due = math.inf
        #: Why there is no room for us yet, in the other side's words; "": it has not said so.
        self._full = ""
        self.outgoing: list[Frames] = []
        self.calls: dict[int, PeerCall] = {}
        self.refused: Exception | None = None
        self.ready = False
        self.welcome: Welcome | None = None
        self.rejoined = self.resent = self.late = 0

    def number(self, call: PeerCall) -> None:
        """Give a request its id, if it has none."""
        call.request_id = call.request_id or next(self._numbers)

    def submit(self, call: PeerCall, now: float) -> None:
        """Begin a request; it will be settled once. It may be settled here.

        Its id is given here, unless its owner has chosen it.
        """
        self.number(call)
        if self.refused is not None:
            call.settle(self.refused)
            return
        self.calls[call.request_id] = call
        self._due = min(self._due, call.deadline + GRACE)
        if self.ready:
            self._send_call(call, now)

    def abandon(self, call: PeerCall) -> None:
        """Forget a request; its answer will be dropped. It is not settled."""
        self.calls.pop(call.request_id, None)
        self._withdraw(call)

    def received(self, frames: Frames, now: float) -> None:
        """Take a message.

        Raises:
            DecodeError: It cannot be read, and is no answer to a request. Nothing has changed.
        """
        try:
            header = decode_header(frames[0])
        except VersionMismatchError as error:
            self._refuse(error)
            return
        request_id = header.request_id
        call = self.calls.get(request_id)
        if header.kind is Kind.REPLY:
            if call is not None:
                del self.calls[request_id]
                self._settle(call, header, frames)
            elif request_id == HELLO_ID:
                self._on_welcome(decode(Welcome, frames[1:]), now)
            else:
                self._on_reply(request_id, frames, now)
        elif header.kind is Kind.FAILURE:
            failed = _failed(frames, call)
            if failed.code is FailureCode.NOT_JOINED and request_id != HELLO_ID:
                self._on_not_joined(call, failed)
            elif call is not None:
                del self.calls[request_id]
                self._on_failed_call(call, failed, now)
            else:
                self._on_failure(request_id, failed)
        elif header.kind is Kind.NOTICE:
            self._on_notice(header, now)
        elif header.kind is Kind.REQUEST:
            text = f"{self._hello.name} answers no requests, also not {header.payload_type}"
            refusal = Failed(code=FailureCode.PROTOCOL, message=text)
            self.outgoing.append(message(Kind.FAILURE, refusal, request_id))

    def tick(self, now: float, lost_for: float, trouble: str) -> None:
        """Look at the clock and at the connection.

        Args:
            now: Seconds of the caller's clock.
            lost_for: For how many seconds there has been no connection; 0.0: there is one.
            trouble: Why there is none, for people; "": nobody knows.
        """
        if lost_for > 0.0:
            self.ready = False
            self.outgoing.clear()  # a new connection begins with hello
            self._next_hello = now + _LOST_INTERVAL
            self._lost = True
            if lost_for > self._patience:
                why = trouble or "look whether it runs"
                text = f"the {self.other} has been out of reach for {lost_for:.1f} s; {why}"
                for call in [c for c in self.calls.values() if now - c.begun > self._patience]:
                    self._lose(call, text)
        elif self.refused is None:
            if self.ready and self._identity:
                self._keep_alive(now)
            if not self.ready and (self._lost or now >= self._next_hello):
                self._say_hello(now)
        if now >= self._due:
            for call in [c for c in self.calls.values() if now >= c.deadline + GRACE]:
                text = (
                    f"no answer within {call.deadline - call.begun:g} s; {trouble or self.state()}"
                )
                error = RequestTimeoutError(text, request_id=call.request_id, peer=call.to)
                self._end(call, error)
            self._due = min((c.deadline + GRACE for c in self.calls.values()), default=math.inf)

    def wake_at(self) -> float:
        """Return when to `tick` at the latest, if no message comes before; may be infinite."""
        due = self._due if self.calls else math.inf
        if not self.ready:
            return due if self.refused is not None else min(due, self._next_hello)
        return min(due, self._next_beat) if self._identity else due

    def beat(self, identity: bytes) -> None:
        """Give a sign of life over the connection itself, for one that has no thread to do so."""
        self.outgoing.append(message(Kind.NOTICE, Heartbeat(identity=identity)))

    def forgotten(self) -> None:
        """The broker said that it does not know us."""
        self.ready = False
        # At once, and with a pause from the second time on: one may forget us each time.
        self._next_hello = self._hurried_at + _HELLO_INTERVAL
        self._hurries, self._interval = True, _HELLO_INTERVAL

    def end(self, error: Exception) -> None:
        """Say goodbye to who knows us, and no more; what is unsettled fails."""
        if self.ready:
            self.outgoing.append(message(Kind.NOTICE, Goodbye()))
        self._refuse(error)

    def state(self) -> str:
        """Return why the other side has not answered, as far as is known here, for people."""
        if self._full:
            return f"it has no room for this client: {self._full}"
        return "is it running, and is the endpoint right?"

    # --- hello ----------------------------------------------------------------------------------

    def _keep_alive(self, now: float) -> None:
        """Give a sign of life if it is time to; say hello if it has been for too long."""
        if now > self._next_beat + self._hello.heartbeat:
            self.ready, self._lost = False, True  # the broker may have given us up meanwhile
        elif now >= self._next_beat:
            self._next_beat = now + self._hello.heartbeat
            self.beat(self._identity)

    def _say_hello(self, now: float) -> None:
        if self._lost and self.welcome is not None and self._identity:
            # A broker that does not know us says so to a sign of life, and then welcomes us; one
            # that does only welcomes us, and what is under way goes on.
            self.beat(self._identity)
        self._lost, self._greeting = False, True
        if self._hurries:
            self._hurries, self._hurried_at = False, now
        self._next_hello = now + self._interval
        self._interval = min(2 * self._interval, _LONGEST_HELLO_INTERVAL)
        hello = message(
            Kind.REQUEST,
            self._hello,
            HELLO_ID,
            ttl=self._interval,
            incarnation=self._incarnation,
        )
        self.outgoing.append(hello)

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if self.ready or not self._greeting:
            return  # a former hello's
        self._greeting = False
        self.rejoined += self._was_forgotten
        self._was_forgotten = False
        self.welcome = welcome
        self._begin(now)

    def _begin(self, now: float) -> None:
        """The broker knows us: send what waits."""
        self.ready = True
        self._full = ""
        self._interval = _HELLO_INTERVAL
        self._next_beat = now + self._hello.heartbeat
        self._send_calls([call for call in self.calls.values() if not call.sent], now)

    def _on_not_joined(self, call: PeerCall | None, failed: Failed) -> None:
        """Our lease is over, or the other side was started again: begin with hello."""
        if self.welcome is not None:
            self._was_forgotten = True
            self._lose_sent(call)
        self._complain("told", f"{self._hello.name} was told: {failed.message}")
        if self.ready:  # else that is under way, and this is about what came before it
            self.forgotten()

    def _lose_sent(self, refused: PeerCall | None) -> None:
        """What the broker had of us is lost with what it knew of us; `refused` it did not take."""
        if refused is not None:
            refused.sent = False  # and it is sent again
        text = "the broker was started again, or had given this client up, and forgot it"
        for call in [call for call in self.calls.values() if call.sent]:
            self._lose(call, text)

    def _on_failure(self, request_id: int, failed: Failed) -> None:
        """Something failed that is none of the calls."""
        if request_id == HELLO_ID:
            self._on_refusal(failed)
        elif request_id:
            self.late += 1
        else:
            self._complain("told", f"{self._hello.name} was told: {failed.message}")

    def _on_refusal(self, failed: Failed) -> None:
        """The broker does not take our hello."""
        if failed.code is FailureCode.VERSION:
            self._refuse(VersionMismatchError(failed.message))
        elif failed.code is FailureCode.OVERLOADED and self.welcome is not None:
            self._full = failed.message  # there will be room again: hello is said once more
        else:
            text = f"the {self.other} refuses {self._hello.name}: {failed.message}"
            self._refuse(ProtocolError(text))

    def _on_reply(self, _request_id: int, _frames: Frames, _now: float) -> None:
        """Something was answered that is none of the calls."""
        self.late += 1

    def _on_notice(self, _header: Header, _now: float) -> None:
        """A notice came; none means anything to a peer that only asks."""

    # --- calls ----------------------------------------------------------------------------------

    def _send_calls(self, calls: Iterable[PeerCall], now: float) -> None:
        """Send requests that may have been sent before."""
        waiting = set(map(id, self.outgoing))
        for call in calls:
            if id(call.message) not in waiting:
                call.message = ()  # else each would be looked for among all
            self._send_call(call, now)

    def _send_call(self, call: PeerCall, now: float) -> None:
        left = call.deadline - now
        if left <= 0.0:
            return  # `tick` sees to it
        assert self.welcome is not None
        size = sum(lengths_of(call.frames))
        if size > (most := self.welcome.max_message_bytes):
            text = f"the message has {size} bytes, the {self.other} takes {most}"
            self._end(call, EncodeError(text))
            return
        name = type(call.payload).__name__
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, call.request_id, name, left, to=call.to)
        try:
            frames = [encode_header(header), *call.frames]
        except EncodeError as error:  # nobody has such a name
            self._end(call, error)
            return
        self._withdraw(call)
        call.message = frames
        self.outgoing.append(frames)
        call.sent = True

    def _on_failed_call(self, call: PeerCall, failed: Failed, now: float) -> None:
        """A request has failed, and is none of the calls any more."""
        is_lost = failed.code is FailureCode.PEER_LOST
        if is_lost and call.payload.idempotent and not call.resent and call.deadline > now:
            call.resent = True
            self.resent += 1
            self.calls[call.request_id] = call
            self._send_call(call, now)
        else:
            call.settle(failed)

    def _settle(self, call: PeerCall, header: Header, frames: Frames) -> None:
        asked, name = type(call.payload).__name__, header.payload_type
        outcome: Outcome
        try:
            if call.reply_type is None:
                reply_type = Payload.registry.get(name)
                if reply_type is None or not issubclass(reply_type, Reply):
                    raise DecodeError(
                        f"{call.to} answered {asked} with {name}, which is no reply that is known "
                        "here; import the module that defines it"
                    )
            elif name == call.reply_type.__name__:
                reply_type = call.reply_type
            else:
                raise ProtocolError(f"{asked} was answered by a {name}")
            outcome = self._decode(reply_type, frames[1:])
        except Exception as error:  # the border: also what a caller's own codec raises
            outcome = error
        call.settle(outcome)

    def _lose(self, call: PeerCall, text: str) -> None:
        self._end(call, PeerLostError(text, request_id=call.request_id, peer=call.to))

    def _end(self, call: PeerCall, error: Exception) -> None:
        del self.calls[call.request_id]
        self._withdraw(call)
        call.settle(error)

    def _withdraw(self, call: PeerCall) -> None:
        """Send no more of it: whoever has asked may write to its arrays from now on."""
        if call.message:
            for index, frames in enumerate(self.outgoing):
                if frames is call.message:
                    del self.outgoing[index]
                    return

    def _refuse(self, error: Exception) -> None:
        self.refused = self.refused or error
        self.ready = False
        for call in list(self.calls.values()):
            self._end(call, self.refused)


def _failed(frames: Frames, call: PeerCall | None) -> Failed:
    """Return what a failure says; of one that cannot be read, only its request has to know."""
    try:
        return decode(Failed, frames[1:])
    except ProtocolError:
        if call is None:
            raise
        text = "it failed, and how cannot be read"
        return Failed(code=FailureCode.REMOTE, message=text)
