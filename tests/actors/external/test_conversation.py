"""A client's side of the talk with a bridge, without a socket."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from envbus.actors.external.conversation import GRACE, BridgeCall, Conversation
from envbus.actors.external.errors import SessionLostError, SpaceMismatchError
from envbus.actors.external.protocol import (
    BRIDGE,
    BridgeJoined,
    EpisodeStarted,
    JoinBridge,
    Logged,
    LogReturns,
    StartEpisode,
)
from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    EncodeError,
    EnvbusError,
    PeerLostError,
    ProtocolError,
    RequestTimeoutError,
    VersionMismatchError,
)
from envbus.bus.peer.session import HELLO_ID
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Payload,
    Shutdown,
    Welcome,
)

WELCOME = Welcome(lease=8.0, max_message_bytes=1 << 20)


class Talk:
    """A conversation, what it has sent, and how its calls have ended."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.joined: list[BridgeJoined] = []
        self.refuses = refuses
        self.core = Conversation(
            Hello(name="sim", heartbeat=2.0),
            lambda session: JoinBridge(client="sim", resume=session),
            self.on_joined,
            patience=10.0,
        )
        self.now = 0.0
        self.ends: dict[int, Any] = {}

    def on_joined(self, joined: BridgeJoined) -> None:
        if self.refuses:
            raise SpaceMismatchError("other spaces")
        self.joined.append(joined)

    def sent(self) -> list[tuple[str, int]]:
        """Type and id of what was sent since the last call."""
        headers = [decode_header(frames[0]) for frames in self.core.outgoing]
        self.core.outgoing.clear()
        return [(header.payload_type, header.request_id) for header in headers]

    def hear(self, number: int, payload: Payload, kind: Kind | None = None) -> None:
        if kind is None:
            kind = Kind.FAILURE if isinstance(payload, Failed) else Kind.REPLY
        header = Header(PROTOCOL_VERSION, kind, number, type(payload).__name__)
        self.core.received([encode_header(header), *encode(payload)], self.now)

    def tick(self, seconds: float = 0.0, lost_for: float = 0.0) -> list[tuple[str, int]]:
        self.now += seconds
        self.core.tick(self.now, lost_for, "")
        return self.sent()

    def join(self, session: str = "s", episodes: tuple[str, ...] = ()) -> int:
        """Say hello and join; return the join's id."""
        assert ("Hello", HELLO_ID) in self.tick(1.0)
        self.hear(HELLO_ID, WELCOME)
        ((kind, number),) = self.sent()
        assert kind == "JoinBridge"
        self.hear(number, joined(session, episodes))
        return number

    def call(self, payload: Payload | None = None, timeout: float = 5.0) -> BridgeCall:
        asked = payload or LogReturns(episode_id="e", reward=1.0)
        reply = EpisodeStarted if isinstance(asked, StartEpisode) else Logged

        def settle(outcome: Any) -> None:
            assert call.request_id not in self.ends, "it ended twice"
            self.ends[call.request_id] = outcome

        call = BridgeCall(asked, encode(asked), reply, self.now, self.now + timeout, settle)
        self.core.submit(call, self.now)
        return call


def joined(session: str = "s", episodes: tuple[str, ...] = ()) -> BridgeJoined:
    return BridgeJoined(
        observation_space={},
        action_space={},
        multi_agent=False,
        policy_ids=[],
        lease=1.0,
        session=session,
        inference=[],
        episodes=list(episodes),
    )


@pytest.fixture
def talk() -> Talk:
    made = Talk()
    made.join()
    return made


def test_it_says_hello_joins_and_then_sends_what_has_waited() -> None:
    talk = Talk()
    call = talk.call()
    assert talk.core.wake_at() == 0.0
    assert talk.sent() == []
    join = talk.join()
    assert talk.sent() == [("LogReturns", call.request_id)]
    assert talk.core.ready
    assert talk.core.session == "s"
    assert join != call.request_id
    talk.hear(call.request_id, Logged())
    assert talk.ends == {call.request_id: Logged()}
    assert talk.core.calls == {}


def test_hello_is_said_again_with_growing_pauses() -> None:
    talk = Talk()
    said = [talk.now for _ in range(400) if talk.tick(0.1)]
    pauses = [later - sooner for sooner, later in pairwise(said)]
    assert pauses[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.11)
    assert max(pauses) <= 8.1


def test_what_was_under_way_is_sent_again_under_its_id_when_the_connection_is_back(
    talk: Talk,
) -> None:
    call = talk.call()
    assert talk.sent() == [("LogReturns", call.request_id)]
    assert talk.tick(0.1, lost_for=0.1) == []
    later = talk.call()
    assert talk.sent() == []
    join = talk.join("s", ("e",))
    assert join > call.request_id
    assert talk.sent() == [("LogReturns", call.request_id), ("LogReturns", later.request_id)]


def test_the_session_is_named_when_it_comes_back(talk: Talk) -> None:
    talk.core.forgotten()
    talk.core.tick(talk.now, 0.0, "")
    talk.core.outgoing.clear()
    talk.hear(HELLO_ID, WELCOME)
    (frames,) = talk.core.outgoing
    assert decode(JoinBridge, frames[1:]).resume == "s"


def test_a_lost_session_fails_what_belonged_to_it_and_begins_anew(talk: Talk) -> None:
    sent, start = talk.call(), talk.call(StartEpisode())
    talk.tick(0.1, lost_for=0.1)
    waiting = talk.call()
    assert ("Hello", HELLO_ID) in talk.tick(1.0)
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()
    talk.hear(join, SessionLostError("gone").failed())
    assert type(talk.ends[sent.request_id]) is PeerLostError
    assert set(talk.ends) == {sent.request_id}
    ((kind, again),) = talk.sent()
    assert kind == "JoinBridge"
    talk.hear(again, joined("new"))
    assert talk.core.session == "new"
    assert [number for _, number in talk.sent()] == [start.request_id, waiting.request_id]


def test_a_lost_session_is_a_refusal_for_who_names_none() -> None:
    talk = Talk()
    talk.tick(1.0)
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()
    talk.hear(join, SessionLostError("gone").failed())
    assert talk.sent() == [], "it would go on for as long as the bridge says so"
    assert isinstance(talk.core.refused, SessionLostError)


def test_each_hello_has_one_welcome() -> None:
    talk = Talk()
    assert ("Hello", HELLO_ID) in talk.tick(1.0)
    for _ in range(3):
        talk.hear(HELLO_ID, WELCOME)
    ((kind, join),) = talk.sent()
    assert kind == "JoinBridge"
    talk.hear(join, joined())
    assert talk.core.ready


def test_one_that_the_broker_forgot_says_hello_and_asks_again(talk: Talk) -> None:
    call = talk.call()
    talk.sent()
    stranger = Failed(code=FailureCode.NOT_JOINED, message="say hello first")
    for _ in range(3):  # a laptop may sleep more than once while one request is under way
        talk.hear(call.request_id, stranger)
        talk.hear(0, stranger)
        assert not talk.core.ready
        assert talk.tick() == [("Hello", HELLO_ID)]
        talk.join()
        assert talk.sent() == [("LogReturns", call.request_id)]
    assert not talk.ends


def test_a_complaint_about_nothing_in_particular_is_the_same(talk: Talk) -> None:
    talk.hear(0, Failed(code=FailureCode.NOT_JOINED, message="say hello first"))
    assert not talk.core.ready
    assert talk.tick() == [("Hello", HELLO_ID)]


def test_what_breaks_the_protocol_is_not_sent_again(talk: Talk) -> None:
    call = talk.call()
    failed = Failed(code=FailureCode.PROTOCOL, message="malformed")
    talk.hear(call.request_id, failed)
    assert talk.ends == {call.request_id: failed}
    assert talk.core.ready


def test_a_lost_connection_is_looked_at_again_soon_but_not_at_once(talk: Talk) -> None:
    talk.call(timeout=100.0)
    for lost_for in (0.1, 1.0, 9.0):
        talk.tick(0.1, lost_for=lost_for)
        assert talk.now < talk.core.wake_at() <= talk.now + 0.1
    assert talk.tick(0.001) == [("Hello", HELLO_ID)], "it is back"


def test_one_that_was_refused_has_nothing_to_wake_up_for() -> None:
    talk = Talk()
    talk.tick()
    talk.hear(HELLO_ID, Failed(code=FailureCode.VERSION, message="2"))
    assert talk.core.wake_at() == float("inf")


def test_what_a_lost_connection_did_not_take_is_not_sent_ahead_of_the_hello(talk: Talk) -> None:
    call = talk.call()
    talk.core.beat(b"me")
    assert len(talk.core.outgoing) == 2, "there was no room"
    talk.tick(0.1, lost_for=0.1)
    assert talk.tick(0.1) == [("Hello", HELLO_ID)]
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()
    talk.hear(join, joined())
    assert talk.sent() == [("LogReturns", call.request_id)]


@pytest.mark.parametrize("says", ["Shutdown", "an answer", "both"])
def test_a_bridge_that_stops_fails_all_that_is_under_way(talk: Talk, says: str) -> None:
    calls = [talk.call(), talk.call(StartEpisode()), talk.call()]
    talk.sent()
    if says != "Shutdown":
        why = Failed(code=FailureCode.PEER_LOST, message="stopped", peer=BRIDGE)
        talk.hear(calls[0].request_id, why)
        assert talk.ends.pop(calls[0].request_id) is not None
        calls = calls[1:]
    start = talk.call(StartEpisode()) if says == "both" else None
    if says != "an answer":
        talk.hear(0, Shutdown(), Kind.NOTICE)
    for call in calls:
        assert type(talk.ends.pop(call.request_id)) is PeerLostError
    late = talk.call()
    assert "stopped" in str(talk.ends.pop(late.request_id)), "its episode is gone"
    assert talk.ends == {}
    assert talk.tick() == [], "it would not be heard"
    assert (start is not None) == (start in talk.core.calls.values()), "told once"


def test_a_new_episode_waits_for_the_next_bridge(talk: Talk) -> None:
    talk.hear(0, Shutdown(), Kind.NOTICE)
    start = talk.call(StartEpisode())
    assert talk.sent() == []
    talk.tick(0.1, lost_for=0.1)
    assert ("Hello", HELLO_ID) in talk.tick(1.0)
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()
    talk.hear(join, SessionLostError("another bridge").failed())
    ((_, join),) = talk.sent()
    talk.hear(join, joined("new"))
    call = talk.call()
    assert [number for _, number in talk.sent()] == [start.request_id, call.request_id]
    assert not talk.ends


def test_without_a_connection_requests_fail_after_the_patience(talk: Talk) -> None:
    call = talk.call(timeout=100.0)
    talk.tick(9.0, lost_for=9.0)
    assert not talk.ends
    talk.tick(2.0, lost_for=11.0)
    assert type(talk.ends[call.request_id]) is PeerLostError
    young = talk.call(timeout=100.0)
    talk.tick(1.0, lost_for=12.0)
    assert young.request_id not in talk.ends


def test_a_request_ends_by_its_time_if_nobody_says_anything(talk: Talk) -> None:
    call = talk.call(timeout=5.0)
    assert talk.core.wake_at() == talk.now + 5.0 + GRACE
    talk.tick(5.0 + GRACE / 2)
    assert not talk.ends
    talk.tick(GRACE)
    assert type(talk.ends[call.request_id]) is RequestTimeoutError
    assert "does its owner poll?" in str(talk.ends[call.request_id])
    talk.hear(call.request_id, Logged())  # late: dropped


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (Failed(code=FailureCode.VERSION, message="2"), VersionMismatchError),
        (Failed(code=FailureCode.PROTOCOL, message="name"), ProtocolError),
    ],
)
def test_a_refused_hello_is_the_end(failed: Failed, kind: type[EnvbusError]) -> None:
    talk = Talk()
    call = talk.call()
    talk.tick()
    talk.hear(HELLO_ID, failed)
    assert type(talk.core.refused) is kind
    assert talk.ends[call.request_id] is talk.core.refused
    later = talk.call()
    assert talk.ends[later.request_id] is talk.core.refused
    assert talk.tick(100.0) == []


def test_a_refused_join_is_the_end_on_either_side() -> None:
    talk = Talk()
    talk.tick()
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()
    talk.hear(join, SpaceMismatchError("the bridge has others").failed())
    assert type(talk.core.refused) is SpaceMismatchError
    other = Talk(refuses=True)
    other.join()
    assert type(other.core.refused) is SpaceMismatchError


def test_a_crowded_broker_is_asked_again() -> None:
    talk = Talk()
    talk.tick()
    talk.hear(HELLO_ID, Failed(code=FailureCode.OVERLOADED, message="full"))
    assert talk.core.refused is None
    assert talk.core.state() == "it has no room for this client: full"
    talk.tick(10.0)
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()[-1:]
    talk.hear(join, Failed(code=FailureCode.OVERLOADED, message="no session"))
    assert talk.core.state() == "it has no room for this client: no session"
    talk.tick(10.0)
    talk.hear(HELLO_ID, WELCOME)
    ((_, join),) = talk.sent()[-1:]
    talk.hear(join, joined())
    assert talk.core.ready


def test_a_message_that_is_too_large_is_never_sent() -> None:
    talk = Talk()
    talk.tick()
    talk.hear(HELLO_ID, Welcome(lease=8.0, max_message_bytes=1))
    ((_, join),) = talk.sent()
    talk.hear(join, joined())
    call = talk.call()
    assert talk.sent() == []
    assert type(talk.ends[call.request_id]) is EncodeError


def test_answers_that_do_not_fit_fail_their_request_only(talk: Talk) -> None:
    call, other = talk.call(), talk.call()
    talk.hear(call.request_id, EpisodeStarted(episode_id="e"))
    assert type(talk.ends[call.request_id]) is ProtocolError
    with pytest.raises(DecodeError):
        talk.core.received([b"\xc1"], talk.now)
    talk.hear(other.request_id, Logged())
    assert talk.ends[other.request_id] == Logged()


def test_the_end_fails_all_and_an_abandoned_call_hears_nothing(talk: Talk) -> None:
    call, abandoned = talk.call(), talk.call()
    talk.core.abandon(abandoned)
    talk.core.end(ClosedError("closed"))
    assert set(talk.ends) == {call.request_id}
    assert type(talk.ends[call.request_id]) is ClosedError


def test_who_has_joined_says_goodbye_once_and_others_nothing(talk: Talk) -> None:
    talk.core.outgoing.clear()
    talk.core.end(ClosedError("closed"))
    talk.core.end(ClosedError("closed"))
    (frames,) = talk.core.outgoing
    header = decode_header(frames[0])
    assert (header.kind, header.payload_type) == (Kind.NOTICE, "Goodbye")
    stranger = Talk()
    stranger.core.end(ClosedError("closed"))
    assert stranger.core.outgoing == []
