"""A client's side of the talk with a bridge: hello, join, requests, and all that again if need be.

Pure: no socket, clock or thread in this file. What any peer says to its broker is in
`bus/peer/session.py`; this is what bridges add. What the verbs mean is in `verbs.py`.

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

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from envbus.actors.external.errors import SessionLostError, refusal_of
from envbus.actors.external.protocol import BRIDGE, BridgeJoined, JoinBridge, StartEpisode
from envbus.bus.broker.loop import failure_to_error
from envbus.bus.errors import EnvbusError, PeerLostError
from envbus.bus.peer import session as peer_session
from envbus.bus.peer.session import GRACE, HELLO_ID, Outcome, PeerSession
from envbus.bus.wire.codec import decode, message
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Failed, FailureCode, Header, Hello, Kind, Shutdown

__all__ = ["GRACE", "BridgeCall", "Conversation", "Outcome"]


class BridgeCall(peer_session.PeerCall, eq=False):
    """A request to the bridge and who waits for its end."""

    to: str = BRIDGE


class Conversation(PeerSession):
    """One client's talk, over as many connections as it takes.

    Args:
        hello: Who this is.
        join: Returns what to join with, by the secret of the session so far, or "".
        on_joined: Told of each join; what it raises refuses the bridge.
        patience: Seconds without a connection after which requests fail.

    Attributes:
        session: Secret of the present session; "": none yet.
    """

    other: ClassVar[str] = "bridge"

    def __init__(
        self,
        hello: Hello,
        join: Callable[[str], JoinBridge],
        on_joined: Callable[[BridgeJoined], None],
        patience: float,
    ) -> None:
        super().__init__(hello, patience=patience, decode=partial(decode, writable=True))
        self._join = join
        self._on_joined = on_joined
        self._join_id = 0
        #: Whether the bridge of this session has stopped.
        self._stopped = False
        self.session = ""

    def submit(self, call: peer_session.PeerCall, now: float) -> None:
        """Begin a request; it will be settled once. It may be settled here."""
        if self._stopped and self.refused is None and not isinstance(call.payload, StartEpisode):
            call.request_id = next(self._numbers)
            call.settle(_stopped(call))
        else:
            super().submit(call, now)

    def send_again(self, now: float) -> None:
        """Answers may have been lost on this side: ask for those that are missing once more."""
        if self.ready:
            self._send_calls(list(self.calls.values()), now)

    def state(self) -> str:
        """Return why the bridge has not answered, as far as is known here, for people."""
        if self.ready:
            return "it does not look at its sockets: does its owner poll?"
        if self._full:
            return f"it has no room for this client: {self._full}"
        return "is it running, and sampled, served or polled, and is the address right?"

    # --- join -----------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """The broker knows us, the bridge does not yet."""
        del now
        self._say_join()

    def _say_join(self) -> None:
        self._join_id = next(self._numbers)
        join = self._join(self.session)
        self.outgoing.append(message(Kind.REQUEST, join, self._join_id, ttl=60.0, to=BRIDGE))

    def _on_reply(self, request_id: int, frames: Frames, now: float) -> None:
        if request_id != self._join_id:
            return
        joined = decode(BridgeJoined, frames[1:])
        try:
            self._on_joined(joined)
        except EnvbusError as error:
            self._refuse(error)
            return
        self.session = joined.session
        self._stopped = False
        for call in self.calls.values():
            call.sent = False
        super()._begin(now)

    def _on_failure(self, request_id: int, failed: Failed) -> None:
        if failed.code is FailureCode.OVERLOADED and request_id in (self._join_id, HELLO_ID):
            self._full = failed.message  # and hello is said again
        elif request_id == self._join_id:
            refusal = refusal_of(failed)
            if isinstance(refusal, SessionLostError) and self.session:
                self._lose_session(failed.message)
            else:
                self._refuse(refusal or failure_to_error(failed, request_id))
        else:
            super()._on_failure(request_id, failed)

    def _lose_session(self, text: str) -> None:
        """The bridge was started again, or we were away for too long: begin anew."""
        self.session = ""
        for call in [c for c in self.calls.values() if c.sent]:
            if not isinstance(call.payload, StartEpisode):  # that is for a new session as well
                self._lose(call, text)
        self._say_join()

    def _lose_sent(self, refused: peer_session.PeerCall | None) -> None:
        """Nothing is lost with what the broker knew of us: the bridge knows the session."""

    # --- a bridge that stops --------------------------------------------------------------------

    def _on_failed_call(self, call: peer_session.PeerCall, failed: Failed, now: float) -> None:
        call.settle(failed)
        if failed.code is FailureCode.PEER_LOST and failed.peer == BRIDGE:
            self._on_stop(now)

    def _on_notice(self, header: Header, now: float) -> None:
        if header.payload_type == Shutdown.__name__:
            self._on_stop(now)

    def _on_stop(self, now: float) -> None:
        """The bridge has said that it stops; it may have said so in an answer already."""
        if self._stopped:
            return
        self._stopped = True
        self.ready = False
        self._next_hello = now + self._interval
        for call in list(self.calls.values()):
            self._end(call, _stopped(call))


def _stopped(call: peer_session.PeerCall) -> PeerLostError:
    return PeerLostError("the bridge was stopped", request_id=call.request_id, peer=BRIDGE)
