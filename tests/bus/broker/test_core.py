from __future__ import annotations

import gc

import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Ask,
    BrokerConfig,
    Expect,
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
)
from envbus.bus.broker.peers import PeerState
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    FailureCode,
    Header,
    Hello,
    Kind,
    Welcome,
)
from tests.bus.scenes import ask, core_with, failure_in, only, sends
from tests.bus.testing import (
    drive,
    failed_by,
    goodbye_from,
    heartbeat_of,
    hello_from,
    notice_from,
    payload_of,
    reply_from,
    request_from,
)

# --- hello ---


def test_a_hello_makes_a_peer_ready() -> None:
    core = BrokerCore(BrokerConfig(liveness=3.0, max_message_bytes=1000))
    hello = hello_from(b"a", services=["env"], heartbeat=2.0, incarnation=4, request_id=9)
    welcome, ready = drive(core, [hello])
    assert isinstance(welcome, Send)
    assert welcome.header == Header(PROTOCOL_VERSION, Kind.REPLY, 9, "Welcome")
    assert payload_of(welcome.frames, Welcome) == Welcome(lease=6.0, max_message_bytes=1000)
    assert isinstance(ready, PeerReady)
    assert (ready.peer, ready.incarnation, ready.hello.name) == (b"a", 4, "a")
    assert core.peer_state(b"a") is PeerState.READY
    assert core.peer_name(b"a") == "a"


def test_a_repeated_hello_is_welcomed_again_and_changes_nothing() -> None:
    core = core_with("a")
    drive(core, [ask()])
    effects = drive(core, [hello_from(b"a", services=["env"])])
    assert only(effects, Send).header.payload_type == "Welcome"
    assert len(effects) == 1
    assert core.statistics().in_flight_now == 1


def test_a_hello_of_another_version_is_refused_naming_both() -> None:
    effects = drive(BrokerCore(), [hello_from(b"a", version=99)])
    failed = failure_in(only(effects, Send))
    assert failed.code is FailureCode.VERSION
    assert "99" in failed.message
    assert str(PROTOCOL_VERSION) in failed.message


def test_a_hello_with_fields_of_the_future_is_welcome() -> None:
    core = BrokerCore()
    hello = hello_from(b"a")
    payload = b"\x82\xa4name\xa1a\xa6future\x01"
    assert only(drive(core, [Received(b"a", hello.header, [payload])]), PeerReady).hello == Hello(
        name="a"
    )


def test_an_expected_child_is_asked_only_after_its_hello() -> None:
    core = BrokerCore()
    drive(core, [Expect(b"a", "actor-0", 3)])
    assert "did not say hello yet" in only(drive(core, [ask("actor-0")]), Refused).message
    drive(core, [hello_from(b"a", name="actor-0", incarnation=3)])
    assert sends(drive(core, [ask("actor-0")])) == [(b"a", 1)]


def test_the_owner_can_take_a_name_from_a_stranger() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"evil", name="actor-0", incarnation=99)])
    effects = drive(core, [Expect(b"a", "actor-0", 0)])
    assert only(effects, PeerLeft).peer == b"evil"


def test_an_expected_child_that_dies_before_its_hello_has_left() -> None:
    core = BrokerCore()
    drive(core, [Expect(b"a", "actor-0", 0)])
    assert drive(core, [PeerGone(b"a", "exit code 1")]) == [
        PeerLeft(b"a", "actor-0", "exit code 1")
    ]


def test_the_number_of_peers_is_bounded() -> None:
    core = core_with("a", config=BrokerConfig(max_peers=1))
    send = only(drive(core, [hello_from(b"b")]), Send)
    assert failure_in(send).code is FailureCode.OVERLOADED
    drive(core, [goodbye_from(b"a"), hello_from(b"b")])
    assert core.peer_state(b"b") is PeerState.READY


def test_one_key_takes_half_of_the_places_for_peers_and_no_more() -> None:
    core = BrokerCore(BrokerConfig(max_peers=5))
    drive(core, [hello_from(peer, user="evil") for peer in (b"a", b"b", b"c")])
    refused = only(drive(core, [hello_from(b"d", user="evil")]), Send)
    assert failure_in(refused).code is FailureCode.OVERLOADED
    assert "public key" in failure_in(refused).message
    drive(core, [hello_from(b"e", user="other"), hello_from(b"f")])
    drive(core, [goodbye_from(b"a"), hello_from(b"d", user="evil")])
    states = [core.peer_state(peer) for peer in (b"a", b"b", b"c", b"d", b"e", b"f")]
    assert states == [PeerState.GONE, *[PeerState.READY] * 5]
    core.check_invariants()


# --- leases ---


def test_silence_makes_suspect_then_gone_and_any_frame_heals() -> None:
    core = core_with("a", heartbeat=1.0)
    assert core.wake_at() == 2.0
    effects = drive(core, [Tick()], now=2.0)
    assert [type(effect) for effect in effects] == [Log]
    assert core.peer_state(b"a") is PeerState.SUSPECT
    drive(core, [notice_from(b"a", "Progress")], now=3.0)
    assert core.peer_state(b"a") is PeerState.READY
    drive(core, [Tick()], now=5.0)
    assert core.peer_state(b"a") is PeerState.SUSPECT
    assert only(drive(core, [Tick()], now=7.0), PeerLeft).peer == b"a"
    assert core.wake_at() is None


def test_a_suspect_gets_waiting_work_when_it_is_heard_again() -> None:
    core = core_with("a", "b", heartbeat=1.0)
    drive(core, [heartbeat_of(b"b"), Tick()], now=2.0)
    drive(core, [ask("env", 9.0), ask("env", 9.0)], now=2.0)
    assert core.statistics().backlog_now == 1
    assert sends(drive(core, [heartbeat_of(b"a")], now=2.1)) == [(b"a", 2)]


def test_a_suspect_that_says_goodbye_gets_no_work() -> None:
    core = core_with("a", "b", heartbeat=1.0)
    drive(core, [heartbeat_of(b"b"), Tick()], now=2.0)
    drive(core, [ask("env", 9.0), ask("env", 9.0)], now=2.0)
    effects = drive(core, [goodbye_from(b"a")], now=2.1)
    assert effects == [PeerLeft(b"a", "a", "it said goodbye")]


def test_a_suspect_is_still_asked_by_those_who_name_it() -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [Tick()], now=2.0)
    assert sends(drive(core, [ask(b"a")], now=2.0)) == [(b"a", 1)]


def test_a_busy_peer_lives_by_its_heartbeats() -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [ask(timeout=1e6)])
    for second in range(1, 100):
        assert drive(core, [heartbeat_of(b"a"), Tick()], now=float(second)) == []
    assert core.peer_state(b"a") is PeerState.READY


def test_a_heartbeat_without_an_identity_is_its_senders() -> None:
    core = core_with("a", heartbeat=1.0)
    for second in range(1, 20):
        beat = heartbeat_of(b"", sender=b"a")
        assert drive(core, [beat, Tick()], now=float(second)) == []


def test_a_peer_without_heartbeats_never_expires() -> None:
    core = core_with("a")
    assert core.wake_at() is None
    assert drive(core, [Tick()], now=1e9) == []


def test_leases_are_judged_on_ticks_only() -> None:
    core = core_with("a", "b", heartbeat=1.0)
    drive(core, [ask(b"b", 1.0)], now=60.0)
    assert core.peer_state(b"a") is PeerState.READY
    drive(core, [Tick()], now=60.0)
    assert core.peer_state(b"a") is PeerState.GONE


def test_a_heartbeat_of_a_forgotten_peer_is_answered() -> None:
    core = BrokerCore()
    send = only(drive(core, [heartbeat_of(b"a", sender=b"beat")]), Send)
    assert send.peer == b"beat"
    assert "say hello" in failure_in(send).message


def test_an_unreadable_heartbeat_is_malformed() -> None:
    core = core_with("a")
    event = notice_from(b"x", "Heartbeat", frames=[b"\xc1"])
    assert failure_in(only(drive(core, [event]), Send)).code is FailureCode.PROTOCOL
    assert core.statistics().malformed == 1


# --- bad input ---


def test_who_did_not_say_hello_is_told_to() -> None:
    core = BrokerCore()
    events = [request_from(b"x", 7, to="env"), reply_from(b"x", 3), notice_from(b"x", "Progress")]
    effects = drive(core, events)
    assert [type(effect) for effect in effects] == [Log, Send, Send, Send]
    sent_back = [effect for effect in effects if isinstance(effect, Send)]
    assert [send.header.request_id for send in sent_back] == [7, 0, 0]
    for send in sent_back:
        failed = failure_in(send)
        assert failed.code is FailureCode.NOT_JOINED
        assert "say hello first" in failed.message
    assert core.statistics().stranger_frames == 3


def test_a_stranger_of_another_version_is_told_so() -> None:
    header = Header(99, Kind.REQUEST, 7, "Act", 1.0, 0, "env")
    send = only(drive(BrokerCore(), [Received(b"x", header, [])]), Send)
    assert send.header.request_id == 7
    assert failure_in(send).code is FailureCode.VERSION


def test_complaints_of_strangers_are_not_answered() -> None:
    core = BrokerCore()
    assert drive(core, [failed_by(b"x", 0), goodbye_from(b"x")]) == []
    assert core.statistics().stranger_frames == 2


def test_malformed_frames_are_counted_logged_once_and_answered() -> None:
    core = core_with("a")
    effects = drive(core, [Malformed(b"a", "not MessagePack"), Malformed(b"a", "again")])
    assert [type(effect) for effect in effects] == [Log, Send, Send]
    assert "not MessagePack" in failure_in(only(effects[:2], Send)).message
    assert core.statistics().malformed == 2
    assert core.peer_state(b"a") is PeerState.READY


def test_malformed_frames_of_another_version_are_answered_with_version() -> None:
    event = Malformed(b"x", "version 2, this is 1", FailureCode.VERSION, 7)
    send = only(drive(BrokerCore(), [event]), Send)
    assert send.header.request_id == 7
    assert failure_in(send).code is FailureCode.VERSION


def test_even_malformed_frames_are_a_sign_of_life() -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [Tick()], now=2.0)
    drive(core, [Malformed(b"a", "x")], now=2.1)
    assert core.peer_state(b"a") is PeerState.READY


def test_strangers_cannot_make_us_remember_them() -> None:
    core = BrokerCore()
    for number in range(3000):
        core.handle(Malformed(b"x%d" % number, "junk"), 0.0)
    core.check_invariants()


# --- the whole ---


def test_memory_stays_flat_over_many_requests() -> None:
    core = core_with("a", capacity=4)
    drive(core, [hello_from(b"c")])

    def rounds(first: int, last: int) -> None:
        for number in range(first, last):
            core.handle(ask(timeout=1e6), 0.0)
            core.handle(request_from(b"c", number, to="env", ttl=1e6), 0.0)
            core.handle(reply_from(b"a", 2 * number + 1), 0.0)
            core.handle(reply_from(b"a", 2 * number + 2), 0.0)

    rounds(0, 1000)
    gc.collect()
    before = len(gc.get_objects())
    rounds(1000, 6000)
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    statistics = core.statistics()
    assert statistics.replies == 12_000
    assert statistics.in_flight_now == 0


def test_it_tells_what_it_holds() -> None:
    core = core_with("a", "b")
    drive(core, [ask("env")] * 3)
    assert repr(core) == "<BrokerCore peers=2 pending=3 queued=1>"
    statistics = core.statistics()
    assert (statistics.in_flight_now, statistics.backlog_now) == (2, 1)


def test_what_is_blocked_is_passed_to_nobody_and_its_owner_may_still_ask() -> None:
    core = BrokerCore(BrokerConfig(blocked=frozenset({"Call"}), embedded=False))
    drive(core, [hello_from(b"a"), hello_from(b"w", services=["env"])])
    refused = drive(core, [request_from(b"a", 1, to="env", payload_type="Call")])
    failed = failure_in(only(refused, Send))
    assert (failed.code, failed.message) == (FailureCode.PROTOCOL, "Call is blocked on this bus")
    assert drive(core, [notice_from(b"a", "Call", to="env")]) == []
    assert core.statistics().blocked == 2
    assert core.statistics().in_flight_now == 0
    assert sends(drive(core, [request_from(b"a", 2, to="env", payload_type="Step")]))
    assert sends(drive(core, [Ask("a", "Call", 1.0, ())]))


def test_an_embedded_broker_passes_nothing_on_from_peer_to_peer() -> None:
    core = core_with("a", config=BrokerConfig(owner="me"))
    drive(core, [hello_from(b"c")])
    for number, to in enumerate(("a", "env", "c", "nobody"), start=1):
        refused = only(drive(core, [request_from(b"c", number, to=to)]), Send)
        assert refused.peer == b"c"
        assert failure_in(refused).code is FailureCode.NO_PEER
        for payload_type in ("News", "Shutdown"):
            assert drive(core, [notice_from(b"c", payload_type, to=to)]) == []
    assert core.statistics().blocked == 12
    assert core.statistics().in_flight_now == core.statistics().backlog_now == 0
    assert sends(drive(core, [Ask("env", "Step", 1.0, ())]))  # the owner may


@pytest.mark.parametrize(
    "payload_type", ["Goodbye", "Heartbeat", "Hello", "Shutdown", "Token", "Welcome"]
)
def test_what_controls_a_peer_is_never_passed_on(payload_type: str) -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c")])
    assert drive(core, [notice_from(b"c", payload_type, to="a")]) == []
    refused = only(drive(core, [request_from(b"c", 7, to="a", payload_type=payload_type)]), Send)
    assert refused.peer == b"c"
    assert core.statistics().blocked == 2
    assert core.peer_state(b"a") is PeerState.READY


def test_what_one_peer_asks_fills_no_more_than_its_share() -> None:
    core = BrokerCore(BrokerConfig(max_in_flight_per_peer=2, max_backlog=3, embedded=False))
    services = [f"own-{number}" for number in range(64)]
    drive(core, [hello_from(b"evil", services=services), hello_from(b"w", services=["env"])])
    asked = [
        request_from(b"evil", number, to=services[number % 64]) for number in range(1, 65 * 64)
    ]
    drive(core, asked, check=False)
    assert core.statistics().backlog_now <= 5
    drive(core, [hello_from(b"honest")])
    assert sends(drive(core, [request_from(b"honest", 1, to="env")])) != []


def test_peers_that_fall_silent_together_are_told_of_in_one_line() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"%d" % number, heartbeat=1.0) for number in range(1000)], check=False)
    line = only(core.handle(Tick(), 2.5), Log).message
    assert line.startswith("silent for 2.5 s: 0, 1, ")
    assert line.endswith(" and 995 more")


def test_strangers_do_not_fill_the_log() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"known")])
    junk = [Malformed(b"%d" % number * 100, "junk") for number in range(5000)]
    logged = [effect for effect in drive(core, junk, check=False) if isinstance(effect, Log)]
    assert 50 < len(logged) < 200
    assert max(len(effect.message) for effect in logged) < 200
    assert only(drive(core, [Malformed(b"known", "junk")]), Log).message.startswith("known: junk")
    assert core.statistics().malformed == 5001


@pytest.mark.parametrize("to", ["", "me"])
def test_the_owner_is_asked_by_its_name_or_by_none(to: str) -> None:
    core = core_with("a", config=BrokerConfig(owner="me"))
    asked = request_from(b"a", 3, to=to)
    assert drive(core, [asked]) == [Notify(b"a", asked.header, asked.frames)]
    told = notice_from(b"a", "News", to=to)
    assert drive(core, [told]) == [Notify(b"a", told.header, told.frames)]
