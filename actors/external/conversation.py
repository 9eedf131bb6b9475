"""A client's side of the talk with a bridge: hello, join, requests, and all that again if need be.

Pure: no socket, clock or thread in this file. Whoever owns those hands in what arrives and what
time it is, sends what `outgoing` holds, and looks again at `wake_at`. What the verbs mean is in
`verbs.py`.

```
GREETING ──welcome──▶ JOINING ──joined──▶ READY
    ▲                    │ session lost: anew   │
    └── connection lost, or the broker forgot us┘
any state ──refused──▶ REFUSED
```

Requests that are unanswered when a connection comes back are sent again under their ids: the
bridge answers each once. If the session is gone they fail, save those that begin an episode.
A bridge that stops says so: all that is unanswered fails at once, and so does what is asked of its
episodes later; a new episode waits for the next bridge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from envbus.actors.external.errors import SessionLostError, refusal_of
from envbus.actors.external.protocol import BRIDGE, BridgeJoined, JoinBridge, StartEpisode
from envbus.bus.broker import failure_to_error
from envbus.bus.codec import decode, decode_header, encode, encode_header
from envbus.bus.errors import (
    EncodeError,
    EnvbusError,
    PeerLostError,
    ProtocolError,
    RequestTimeoutError,
    VersionMismatchError,
)
from envbus.bus.messages import (
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
    Shutdown,
    Welcome,
)
from envbus.bus.serve import HELLO_ID
from envbus.bus.transport import Frames

__all__ = ["GRACE", "Call", "Conversation"]

#: Seconds beyond a request's time until this side gives it up: the bridge keeps that time, and
#: only one that does not look at its sockets says nothing for so long.
GRACE = 1.0
#: Seconds between the first two hellos while none is answered, and at most: it doubles.
_HELLO_INTERVAL = 0.5
_LONGEST_HELLO_INTERVAL = 8.0
#: Seconds between looks at a connection that is lost: nothing tells when it is back.
_LOST_INTERVAL = 0.05

Outcome: TypeAlias = "Reply | Failed | EnvbusError"


class Call(msgspec.Struct, eq=False):
    """A request and who waits for its end."""

    payload: Payload
    frames: Frames
    reply_type: type[Reply]
    #: Seconds of the caller's clock: when it was made, and until when an answer is of use.
    begun: float
    deadline: float
    #: Called once, with the reply or what took its place.
    settle: Callable[[Outcome], None]
    request_id: int = 0
    sent: bool = False


class Conversation:
    """One client's talk, over as many connections as it takes.

    Args:
        hello: Who this is.
        join: Returns what to join with, by the secret of the session so far, or "".
        on_joined: Told of each join; what it raises refuses the bridge.
        patience: Seconds without a connection after which requests fail.

    Attributes:
        outgoing: Frames to be sent, oldest first; the owner takes them out.
        calls: Unsettled requests by id.
        session: Secret of the present session; "": none yet.
        refused: Why there is nothing more to be said.
        ready: Whether requests are sent at once.
    """

    def __init__(
        self,
        hello: Hello,
        join: Callable[[str], JoinBridge],
        on_joined: Callable[[BridgeJoined], None],
        patience: float,
    ) -> None:
        self._hello = hello
        self._join = join
        self._on_joined = on_joined
        self._patience = patience
        self._numbers = itertools.count(1)
        self._join_id = 0
        #: When to say it, or to look whether it can be said.
        self._next_hello = 0.0
        self._interval = _HELLO_INTERVAL
        self._max_message_bytes = 0
        #: Whether there was no connection when the clock was looked at last.
        self._lost = False
        #: Whether the bridge of this session has stopped.
        self._stopped = False
        #: Why the bridge has no room for us yet, in its words; "": it has not said so.
        self._full = ""
        self.outgoing: list[Frames] = []
        self.calls: dict[int, Call] = {}
        self.session = ""
        self.refused: EnvbusError | None = None
        self.ready = False

    def submit(self, call: Call, now: float) -> None:
        """Begin a request; it will be settled once. It may be settled here."""
        call.request_id = next(self._numbers)
        if self.refused is not None:
            call.settle(self.refused)
            return
        if self._stopped and not isinstance(call.payload, StartEpisode):
            call.settle(_stopped(call))
            return
        self.calls[call.request_id] = call
        if self.ready:
            self._send_call(call, now)

    def abandon(self, call: Call) -> None:
        """Forget a request; its answer will be dropped. It is not settled."""
        self.calls.pop(call.request_id, None)

    def send_again(self, now: float) -> None:
        """Answers may have been lost on this side: ask for those that are missing once more."""
        if self.ready:
            for call in list(self.calls.values()):
                self._send_call(call, now)

    def received(self, frames: Frames, now: float) -> None:
        """Take a message.

        Raises:
            DecodeError: Its header cannot be read. Nothing has changed.
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
                self._on_welcome(decode(Welcome, frames[1:]))
            elif request_id == self._join_id:
                self._on_bridge_joined(decode(BridgeJoined, frames[1:]), now)
        elif header.kind is Kind.FAILURE:
            failed = decode(Failed, frames[1:])
            if failed.code is FailureCode.NOT_JOINED and request_id != HELLO_ID:
                self._on_not_joined()  # and what it was about is sent again
            elif call is not None:
                del self.calls[request_id]
                call.settle(failed)
                if failed.code is FailureCode.PEER_LOST and failed.peer == BRIDGE:
                    self._on_stop(now)
            else:
                self._on_failure(request_id, failed)
        elif header.kind is Kind.NOTICE and header.payload_type == Shutdown.__name__:
            self._on_stop(now)

    def tick(self, now: float, lost_for: float, trouble: str) -> None:
        """Look at the clock and at the connection.

        Args:
            now: Seconds of the caller's clock.
            lost_for: For how many seconds there has been no connection; 0.0: there is one.
            trouble: Why there is none, for people; "": nobody knows.
        """
        if lost_for > 0.0:
            self.ready = False
            self.outgoing.clear()  # a new connection begins with hello, and all is said again
            self._next_hello = now + _LOST_INTERVAL
            self._lost = True
            if lost_for > self._patience:
                why = trouble or "look whether it runs"
                text = f"the bridge has been out of reach for {lost_for:.1f} s; {why}"
                for call in [c for c in self.calls.values() if now - c.begun > self._patience]:
                    self._end(call, PeerLostError(text, request_id=call.request_id, peer=BRIDGE))
        elif not self.ready and self.refused is None and (self._lost or now >= self._next_hello):
            self._lost = False
            self._say_hello(now)
        for call in [c for c in self.calls.values() if now >= c.deadline + GRACE]:
            text = f"no answer within {call.deadline - call.begun:g} s; {trouble or self.state()}"
            self._end(call, RequestTimeoutError(text, request_id=call.request_id, peer=BRIDGE))

    def wake_at(self) -> float:
        """Return when to `tick` at the latest, if no message comes before; may be infinite."""
        settled = self.ready or self.refused is not None
        due = float("inf") if settled else self._next_hello
        for call in self.calls.values():
            due = min(due, call.deadline + GRACE)
        return due

    def beat(self, identity: bytes) -> None:
        """Give a sign of life over the connection itself, for one that has no thread to do so."""
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, Heartbeat.__name__)
        self.outgoing.append([encode_header(header), *encode(Heartbeat(identity=identity))])

    def forgotten(self) -> None:
        """The broker said that it does not know us."""
        self.ready = False
        self._next_hello, self._interval = 0.0, _HELLO_INTERVAL

    def end(self, error: EnvbusError) -> None:
        """Say goodbye to a bridge that was joined, and no more; what is unsettled fails."""
        if self.ready:
            header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, Goodbye.__name__)
            self.outgoing.append([encode_header(header), *encode(Goodbye())])
        self._refuse(error)

    def _on_not_joined(self) -> None:
        """Our lease is over, or the other side was started again: begin with hello."""
        if self.ready:  # else that is under way, and this is about what came before it
            self.forgotten()

    # --- hello and join -----------------------------------------------------------------------

    def _say_hello(self, now: float) -> None:
        self._next_hello = now + self._interval
        self._interval = min(2 * self._interval, _LONGEST_HELLO_INTERVAL)
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, HELLO_ID, Hello.__name__, self._interval)
        self.outgoing.append([encode_header(header), *encode(self._hello)])

    def _on_welcome(self, welcome: Welcome) -> None:
        if self.ready:
            return  # a former hello's
        self._max_message_bytes = welcome.max_message_bytes
        self._say_join()

    def _say_join(self) -> None:
        self._join_id = next(self._numbers)
        header = Header(
            PROTOCOL_VERSION, Kind.REQUEST, self._join_id, JoinBridge.__name__, 60.0, to=BRIDGE
        )
        self.outgoing.append([encode_header(header), *encode(self._join(self.session))])

    def _on_bridge_joined(self, joined: BridgeJoined, now: float) -> None:
        try:
            self._on_joined(joined)
        except EnvbusError as error:
            self._refuse(error)
            return
        self.session = joined.session
        self.ready = True
        self._stopped = False
        self._full = ""
        self._interval = _HELLO_INTERVAL
        for call in list(self.calls.values()):
            self._send_call(call, now)

    def _on_failure(self, request_id: int, failed: Failed) -> None:
        if failed.code is FailureCode.OVERLOADED and request_id in (self._join_id, HELLO_ID):
            self._full = failed.message  # and hello is said again
            return
        if request_id == self._join_id:
            refusal = refusal_of(failed)
            if isinstance(refusal, SessionLostError):
                self._lose_session(failed.message)
            else:
                self._refuse(refusal or failure_to_error(failed, request_id))
        elif request_id == HELLO_ID:
            if failed.code is FailureCode.VERSION:
                self._refuse(VersionMismatchError(failed.message))
            else:
                self._refuse(ProtocolError(f"the bridge refuses this client: {failed.message}"))

    def _lose_session(self, message: str) -> None:
        """The bridge was started again, or we were away for too long: begin anew."""
        self.session = ""
        for call in [c for c in self.calls.values() if c.sent]:
            if not isinstance(call.payload, StartEpisode):  # that is for a new session as well
                self._end(call, PeerLostError(message, request_id=call.request_id, peer=BRIDGE))
        self._say_join()

    def _on_stop(self, now: float) -> None:
        """The bridge has said that it stops; it may have said so in an answer already."""
        if self._stopped:
            return
        self._stopped = True
        self.ready = False
        self._next_hello = now + self._interval
        for call in list(self.calls.values()):
            self._end(call, _stopped(call))

    # --- calls --------------------------------------------------------------------------------

    def _send_call(self, call: Call, now: float) -> None:
        left = call.deadline - now
        if left <= 0.0:
            return  # `tick` sees to it
        size = 0
        for frame in call.frames:  # bytes, mostly: a view of them would take longer
            size += len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        if size > self._max_message_bytes:
            text = f"the message has {size} bytes, the bridge takes {self._max_message_bytes}"
            self._end(call, EncodeError(text))
            return
        call.sent = True
        header = Header(
            PROTOCOL_VERSION,
            Kind.REQUEST,
            call.request_id,
            type(call.payload).__name__,
            left,
            to=BRIDGE,
        )
        self.outgoing.append([encode_header(header), *call.frames])

    def _settle(self, call: Call, header: Header, frames: Frames) -> None:
        outcome: Outcome
        try:
            if header.payload_type != call.reply_type.__name__:
                raise ProtocolError(
                    f"{type(call.payload).__name__} was answered by a {header.payload_type}"
                )
            outcome = decode(call.reply_type, frames[1:], writable=True)
        except EnvbusError as error:
            outcome = error
        call.settle(outcome)

    def _end(self, call: Call, error: EnvbusError) -> None:
        del self.calls[call.request_id]
        call.settle(error)

    def _refuse(self, error: EnvbusError) -> None:
        self.refused = self.refused or error
        self.ready = False
        for call in list(self.calls.values()):
            self._end(call, self.refused)

    def state(self) -> str:
        """Return why the bridge has not answered, as far as is known here, for people."""
        if self.ready:
            return "it does not look at its sockets: does its owner poll?"
        if self._full:
            return f"it has no room for this client: {self._full}"
        return "is it running, and is the address right?"


def _stopped(call: Call) -> PeerLostError:
    return PeerLostError("the bridge was stopped", request_id=call.request_id, peer=BRIDGE)
