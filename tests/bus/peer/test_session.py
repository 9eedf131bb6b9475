"""A peer's side of the talk with its broker, without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    EncodeError,
    PeerLostError,
    ProtocolError,
    RequestTimeoutError,
)
from envbus.bus.peer.session import GRACE, HELLO_ID, PeerCall, PeerSession
from envbus.bus.wire.codec import decode_header, message
from envbus.bus.wire.messages import (
    Failed,
    FailureCode,
    Goodbye,
    Hello,
    Kind,
    Notice,
    Payload,
    Reply,
    Request,
    Welcome,
)

WELCOME = Welcome(lease=8.0, max_message_bytes=1000)
STRANGER = Failed(code=FailureCode.NOT_JOINED, message="say hello first")


class Sum(Reply, frozen=True, kw_only=True):
    total: int = 0


class AddUp(Request[Sum], frozen=True, kw_only=True):
    """What is done twice is done twice."""


class LookUp(Request[Sum], frozen=True, kw_only=True):
    idempotent = True


class Hush(Notice, frozen=True, kw_only=True):
    """No reply at all."""


class Peer:
    """A session, what it has sent, and how its calls have ended."""

    def __init__(self, **settings: Any) -> None:
        self.complaints: list[str] = []
        self.core = PeerSession(
            Hello(name="me", heartbeat=2.0),
            complain=lambda _kind, text: self.complaints.append(text),
            **settings,
        )
        self.now = 0.0
        self.ends: dict[int, Any] = {}

    def sent(self) -> list[str]:
        """What was sent since the last call: type, and id if it is a call's."""
        headers = [decode_header(frames[0]) for frames in self.core.outgoing]
        self.core.outgoing.clear()
        return [
            f"{h.payload_type} {h.request_id}" if 0 < h.request_id < HELLO_ID else h.payload_type
            for h in headers
        ]

    def hear(self, number: int, payload: Payload, kind: Kind | None = None) -> None:
        kind = kind or (Kind.FAILURE if isinstance(payload, Failed) else Kind.REPLY)
        self.core.received(message(kind, payload, number), self.now)

    def tick(self, seconds: float = 0.0, lost_for: float = 0.0) -> list[str]:
        self.now += seconds
        self.core.tick(self.now, lost_for, "")
        return self.sent()

    def join(self) -> None:
        assert self.tick() == ["Hello"]
        self.hear(HELLO_ID, WELCOME)

    def ask(self, request: Payload | None = None, timeout: float = 5.0, to: str = "w") -> PeerCall:
        request = request or AddUp()
        frames = message(Kind.REQUEST, request)[1:]

        def settle(outcome: Any) -> None:
            assert call.request_id not in self.ends, "it ended twice"
            self.ends[call.request_id] = outcome

        call = PeerCall(request, frames, None, self.now, self.now + timeout, settle, to)
        self.core.submit(call, self.now)
        return call


@pytest.fixture
def peer() -> Peer:
    made = Peer(identity=b"me")
    made.join()
    return made


def test_what_is_asked_before_the_welcome_is_sent_after_it() -> None:
    peer = Peer()
    assert peer.core.wake_at() == 0.0
    call = peer.ask()
    peer.join()
    assert peer.sent() == ["AddUp 1"]
    peer.hear(call.request_id, Sum(total=3))
    assert peer.ends == {1: Sum(total=3)}
    peer.hear(call.request_id, Sum(total=3))
    peer.hear(call.request_id, Failed(code=FailureCode.REMOTE, message="late"))
    assert peer.core.late == 2


def test_an_owner_may_choose_the_ids(peer: Peer) -> None:
    call = PeerCall(AddUp(), [b""], None, 0.0, 5.0, lambda _: None, "w", 77)
    peer.core.submit(call, 0.0)
    assert peer.sent() == ["AddUp 77"]


def test_signs_of_life_are_given_each_interval_by_who_has_an_identity(peer: Peer) -> None:
    assert peer.core.wake_at() == 2.0
    assert peer.tick(1.9) == []
    assert peer.tick(0.1) == ["Heartbeat"]
    assert peer.core.wake_at() == 4.0
    silent = Peer()
    silent.join()
    assert silent.core.wake_at() == float("inf")
    assert silent.tick(100.0) == []


def test_who_was_away_for_long_says_hello_and_what_is_under_way_goes_on(peer: Peer) -> None:
    call = peer.ask(timeout=1000.0)
    assert peer.sent() == ["AddUp 1"]
    assert peer.tick(100.0) == ["Heartbeat", "Hello"]
    assert not peer.core.ready
    peer.hear(HELLO_ID, WELCOME)
    assert peer.sent() == []
    peer.hear(call.request_id, Sum())
    assert peer.ends == {1: Sum()}
    assert peer.core.rejoined == 0


def test_a_connection_that_is_back_begins_with_hello(peer: Peer) -> None:
    call = peer.ask()
    assert peer.tick(0.1, lost_for=0.1) == []
    later = peer.ask()
    assert peer.tick(0.1) == ["Heartbeat", "Hello"]
    peer.hear(HELLO_ID, WELCOME)
    assert peer.sent() == [f"AddUp {later.request_id}"], "the other one the broker has"
    assert call.sent


def test_hellos_that_nobody_answers_come_less_often_until_one_is_answered() -> None:
    peer = Peer(identity=b"me")
    said = [0.0]
    for _ in range(3):
        peer.tick(said[-1])
        said.append(peer.core.wake_at() - peer.now)
    assert said == [0.0, 0.5, 1.0, 2.0]
    peer.hear(HELLO_ID, WELCOME)
    peer.tick(10.0)  # it has slept: the broker is asked anew
    assert peer.core.wake_at() - peer.now == 0.5


def test_a_broker_that_forgot_us_has_lost_what_it_had(peer: Peer) -> None:
    lost = peer.ask()
    peer.tick(0.1, lost_for=0.1)
    later = peer.ask()
    peer.tick(0.1)
    peer.hear(0, STRANGER)
    assert "started again" in str(peer.ends.pop(lost.request_id))
    peer.hear(HELLO_ID, WELCOME)
    assert peer.sent() == [f"AddUp {later.request_id}"]
    assert peer.ends == {}
    assert peer.core.rejoined == 1
    assert peer.complaints == ["me was told: say hello first"]


def test_what_a_broker_did_not_take_is_sent_again(peer: Peer) -> None:
    refused, lost = peer.ask(), peer.ask()
    peer.sent()
    peer.hear(refused.request_id, STRANGER)
    assert type(peer.ends.pop(lost.request_id)) is PeerLostError
    peer.hear(lost.request_id, STRANGER)
    peer.join()
    assert peer.sent() == [f"AddUp {refused.request_id}"]
    assert peer.ends == {}


def test_a_broker_that_forgets_us_with_each_request_is_greeted_with_a_pause(peer: Peer) -> None:
    call, hellos = peer.ask(timeout=60.0), 0
    for _ in range(100):
        peer.hear(call.request_id, STRANGER)
        hellos += peer.tick(0.01).count("Hello")
        peer.hear(HELLO_ID, WELCOME)
    assert 2 <= hellos <= 3
    assert call.request_id not in peer.ends


def test_an_idempotent_request_is_asked_once_more(peer: Peer) -> None:
    gone = Failed(code=FailureCode.PEER_LOST, message="w is gone", peer="w")
    once, twice, late = peer.ask(), peer.ask(LookUp()), peer.ask(LookUp(), timeout=1.0)
    peer.sent()
    peer.now = 2.0
    for call in (once, twice, late):
        peer.hear(call.request_id, gone)
    assert peer.sent() == [f"LookUp {twice.request_id}"]
    assert peer.ends == {once.request_id: gone, late.request_id: gone}
    peer.hear(twice.request_id, gone)
    assert peer.ends[twice.request_id] is not None
    assert peer.core.resent == 1


def test_requests_end_by_their_time_each_by_its_own(peer: Peer) -> None:
    short, long = peer.ask(timeout=1.0), peer.ask(timeout=3.0)
    peer.hear(short.request_id, Sum())
    shortest = peer.ask(timeout=0.5)
    assert peer.core.wake_at() == 0.5 + GRACE
    peer.tick(1.5)
    assert type(peer.ends[shortest.request_id]) is RequestTimeoutError
    assert peer.core.wake_at() == 2.0, "the next sign of life"
    peer.tick(1.4)
    assert long.request_id not in peer.ends
    peer.tick(1.2)
    assert type(peer.ends[long.request_id]) is RequestTimeoutError


def test_what_has_ended_before_it_could_be_sent_is_not_sent(peer: Peer) -> None:
    short, long, left = peer.ask(timeout=1.0), peer.ask(timeout=9.0), peer.ask(timeout=9.0)
    peer.core.abandon(left)
    assert peer.tick(1.0 + GRACE) == ["AddUp 2", "Heartbeat"]
    assert type(peer.ends[short.request_id]) is RequestTimeoutError
    assert long.request_id not in peer.ends


def test_a_crowded_broker_is_a_refusal_at_first_and_asked_again_later(peer: Peer) -> None:
    full = Failed(code=FailureCode.OVERLOADED, message="full")
    peer.core.forgotten()
    assert peer.tick() == ["Hello"]
    peer.hear(HELLO_ID, full)
    assert peer.core.refused is None
    assert "full" in peer.core.state()
    assert "Hello" in peer.tick(10.0)
    other = Peer()
    other.tick()
    other.hear(HELLO_ID, full)
    assert str(other.core.refused) == "the broker refuses me: full"


def test_what_cannot_be_read_fails_only_what_it_answers(peer: Peer) -> None:
    odd, unknown, other = peer.ask(), peer.ask(), peer.ask()
    head = message(Kind.FAILURE, STRANGER, odd.request_id)[0]
    peer.core.received([head, b"junk"], 0.0)
    assert "cannot be read" in peer.ends[odd.request_id].message
    peer.hear(unknown.request_id, Hush(), Kind.REPLY)
    assert "no reply that is known here" in str(peer.ends[unknown.request_id])
    for junk in ([b"\xc1"], [message(Kind.FAILURE, STRANGER, 99)[0], b"junk"]):
        with pytest.raises(DecodeError):
            peer.core.received(junk, 0.0)
    assert other.request_id not in peer.ends


def test_requests_and_notices_of_others_end_nothing(peer: Peer) -> None:
    peer.core.received(message(Kind.REQUEST, AddUp(), 5), 0.0)
    (frames,) = peer.core.outgoing
    assert decode_header(frames[0]).kind is Kind.FAILURE
    assert peer.sent() == ["Failed 5"]
    peer.hear(0, Hush(), Kind.NOTICE)
    peer.hear(0, Failed(code=FailureCode.PROTOCOL, message="odd"))
    assert peer.complaints == ["me was told: odd"]
    assert peer.core.ready


def test_what_cannot_be_sent_fails(peer: Peer) -> None:
    nameless = peer.ask(to="x" * 10_000)
    assert type(peer.ends[nameless.request_id]) is EncodeError
    large = PeerCall(AddUp(), [bytes(1001)], None, 0.0, 5.0, lambda end: ends.append(end), "w")
    ends: list[Any] = []
    peer.core.submit(large, 0.0)
    assert str(ends[0]) == "the message has 1001 bytes, the broker takes 1000"
    assert peer.sent() == []


def test_the_end_is_told_to_who_knows_us_and_to_all_that_wait(peer: Peer) -> None:
    call = peer.ask()
    peer.sent()
    peer.core.end(ClosedError("closed"))
    assert peer.sent() == [Goodbye.__name__]
    assert type(peer.ends[call.request_id]) is ClosedError
    late = peer.ask()
    assert type(peer.ends[late.request_id]) is ClosedError
    assert peer.tick(100.0) == []
    assert peer.core.wake_at() == float("inf")
    refused = Peer()
    refused.tick()
    refused.hear(HELLO_ID, Failed(code=FailureCode.PROTOCOL, message="no"))
    assert type(refused.core.refused) is ProtocolError
