from __future__ import annotations

import msgspec
import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    Accepted,
    BrokerConfig,
    Cancel,
    Complete,
    Event,
    Expect,
    FailLocal,
    Log,
    Notify,
    PeerGone,
    PeerLeft,
    Received,
    Refused,
    Send,
    Tick,
    Unsendable,
)
from envbus.bus.broker.peers import PeerState
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Kind,
)
from tests.bus.scenes import FRAMES, ask, core_with, failure_in, failures, only, sends, sent
from tests.bus.testing import (
    drive,
    failed_by,
    goodbye_from,
    heartbeat_of,
    hello_from,
    notice_from,
    reply_from,
    request_from,
)

# --- local requests --------------------------------------------------------------------------


def test_a_request_is_sent_and_its_reply_completes_it() -> None:
    core = core_with("a")
    assert drive(core, [ask()], now=2.0) == [Accepted(1), sent(b"a", 1)]
    reply = reply_from(b"a", 1, frames=[b"result"])
    assert drive(core, [reply], now=2.5) == [Complete(1, reply.header, [b"result"])]
    assert core.wake_at() is None


def test_a_peer_is_asked_by_name_as_well() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"\x01id", name="actor-3")])
    assert drive(core, [ask("actor-3")]) == [Accepted(1), sent(b"\x01id", 1)]


def test_a_late_reply_is_not_handed_to_the_next_request() -> None:
    core = core_with("a")
    drive(core, [ask()])
    assert failures(drive(core, [Tick()], now=1.0)) == {1: FailureCode.TIMEOUT}
    drive(core, [ask()], now=1.1)
    assert drive(core, [reply_from(b"a", 1)], now=1.2) == []
    assert isinstance(drive(core, [reply_from(b"a", 2)], now=1.3)[0], Complete)
    statistics = core.statistics()
    assert (statistics.late_replies, statistics.timeouts, statistics.replies) == (1, 1, 1)


def test_a_time_out_names_request_peer_and_seconds() -> None:
    core = core_with("a")
    drive(core, [ask(timeout=30.0)])
    failed = only(drive(core, [Tick()], now=30.0), FailLocal).failed
    assert failed.peer == "a"
    assert "Step timed out after 30 s" in failed.message


def test_an_owner_that_was_away_sees_the_answer_before_anybody_is_judged() -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [ask(timeout=1.0)])
    effects = drive(core, [reply_from(b"a", 1), Tick()], now=60.0)
    assert [type(effect) for effect in effects] == [Complete]
    assert core.peer_state(b"a") is PeerState.READY


def test_answers_to_settled_foreign_and_unknown_requests_are_dropped_and_counted() -> None:
    core = core_with("a", "b")
    drive(core, [ask(), reply_from(b"a", 1), ask()])
    strays = [
        reply_from(b"a", 1),
        failed_by(b"a", 1),
        reply_from(b"b", 2),
        failed_by(b"b", 2),
        reply_from(b"a", 99),
        reply_from(b"a", 0),
        reply_from(b"a", -1),
    ]
    assert drive(core, strays) == []
    statistics = core.statistics()
    assert statistics.duplicate_replies == 2
    assert statistics.foreign_replies == 2
    assert statistics.unknown_replies == 3
    assert statistics.in_flight_now == 1


def test_a_reply_of_a_former_incarnation_is_dropped() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"a", incarnation=2), ask()])
    assert drive(core, [reply_from(b"a", 1, incarnation=1)]) == []
    assert core.statistics().stale_frames == 1
    assert isinstance(drive(core, [reply_from(b"a", 1, incarnation=2)])[0], Complete)


def test_a_failure_of_the_holder_fails_the_request_with_its_words() -> None:
    core = core_with("a")
    drive(core, [ask()])
    failed = only(drive(core, [failed_by(b"a", 1, message="boom")]), FailLocal).failed
    assert failed == Failed(code=FailureCode.REMOTE, message="boom", peer="a")
    assert core.statistics().in_flight_now == 0


def test_an_unreadable_failure_still_fails_the_request() -> None:
    core = core_with("a")
    drive(core, [ask()])
    header = Header(PROTOCOL_VERSION, Kind.FAILURE, 1, "Failed")
    failed = only(drive(core, [Received(b"a", header, [b"\xc1"])]), FailLocal).failed
    assert failed.code is FailureCode.PROTOCOL
    assert "unreadable" in failed.message


def test_a_cancelled_request_ends_silently_and_its_reply_counts_as_late() -> None:
    core = core_with("a")
    assert drive(core, [ask(), Cancel(1)])[2:] == []
    assert drive(core, [Cancel(1), Cancel(77), reply_from(b"a", 1), Tick()], now=9.0) == []
    statistics = core.statistics()
    assert (statistics.cancelled, statistics.late_replies, statistics.timeouts) == (1, 1, 0)


def test_an_owner_cannot_cancel_a_request_of_a_peer() -> None:
    core = core_with("a", "b")
    drive(core, [request_from(b"b", 7, to="a"), Cancel(1)])
    assert core.statistics().in_flight_now == 1


@pytest.mark.parametrize("to", [b"nobody", "nobody", ""])
def test_a_request_to_nobody_is_refused_at_once(to: bytes | str) -> None:
    refused = only(drive(BrokerCore(), [ask(to)]), Refused)
    assert refused.code is FailureCode.NO_PEER
    assert repr(to) in refused.message


def test_a_peer_holds_no_more_than_its_limit() -> None:
    core = core_with("a", config=BrokerConfig(max_in_flight_per_peer=2))
    assert sends(drive(core, [ask(), ask()])) == [(b"a", 1), (b"a", 2)]
    refused = only(drive(core, [ask()]), Refused)
    assert refused.code is FailureCode.OVERLOADED
    assert "max_in_flight_per_peer" in refused.message
    drive(core, [reply_from(b"a", 1)])
    assert sends(drive(core, [ask()])) == [(b"a", 3)]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_request_without_a_deadline_is_a_bug_of_the_caller(timeout: float) -> None:
    with pytest.raises(AssertionError, match="finite"):
        core_with("a").handle(ask(timeout=timeout), 0.0)


def test_what_cannot_be_sent_fails_at_once() -> None:
    core = core_with("a")
    drive(core, [ask()])
    effects = drive(core, [Unsendable(b"a", 1, FailureCode.OVERLOADED, "its queue is full")])
    assert only(effects, FailLocal).failed == Failed(
        code=FailureCode.OVERLOADED, message="Step was not sent to a: its queue is full", peer="a"
    )
    drive(core, [Unsendable(b"a", 0, FailureCode.PEER_LOST, "x")])
    drive(core, [Unsendable(b"gone", 1, FailureCode.PEER_LOST, "x")])
    assert core.statistics().unsendable == 2


def test_a_peer_that_cannot_be_reached_gets_no_service_work_until_it_is_heard() -> None:
    core = core_with("a", capacity=1)
    drive(core, [ask("env"), ask("env")])
    assert sends(drive(core, [Unsendable(b"a", 1, FailureCode.OVERLOADED, "full")])) == []
    assert core.peer_state(b"a") is PeerState.SUSPECT
    assert sends(drive(core, [heartbeat_of(b"a")])) == [(b"a", 2)]


# --- services --------------------------------------------------------------------------------


def test_service_work_goes_to_the_least_loaded_ready_peer() -> None:
    core = core_with("b", "a", capacity=2)
    assert sends(drive(core, [ask("env")] * 4)) == [(b"a", 1), (b"b", 2), (b"a", 3), (b"b", 4)]


def test_work_beyond_the_capacity_waits_and_is_sent_with_the_time_left() -> None:
    core = core_with("a")
    assert drive(core, [ask("env"), ask("env", 5.0)])[2:] == [Accepted(2)]
    assert core.statistics().backlog_now == 1
    effects = drive(core, [reply_from(b"a", 1)], now=2.0)
    assert [type(effect) for effect in effects] == [Complete, Send]
    assert effects[1] == sent(b"a", 2, ttl=3.0)


def test_a_full_backlog_refuses_at_once() -> None:
    core = core_with("a", config=BrokerConfig(max_backlog=1))
    drive(core, [ask("env"), ask("env")])
    refused = only(drive(core, [ask("env")]), Refused)
    assert refused.code is FailureCode.OVERLOADED
    assert "max_backlog" in refused.message
    assert core.statistics().accepted == 2


def test_queued_requests_time_out_too() -> None:
    core = core_with("a")
    drive(core, [ask("env", 9.0), ask("env", 1.0)])
    failed = only(drive(core, [Tick()], now=1.0), FailLocal).failed
    assert failed.code is FailureCode.TIMEOUT
    assert "waited for a free peer of 'env'" in failed.message
    assert sends(drive(core, [reply_from(b"a", 1)], now=1.1)) == []


def test_several_queued_requests_may_time_out_with_the_one_in_flight() -> None:
    core = core_with("a")
    drive(core, [ask("env")] * 4)
    assert failures(drive(core, [Tick()], now=1.0)) == dict.fromkeys(
        range(1, 5), FailureCode.TIMEOUT
    )


def test_a_request_that_expired_in_the_backlog_is_not_sent_any_more() -> None:
    core = core_with("a")
    drive(core, [ask("env", 9.0), ask("env", 1.0), ask("env", 9.0)])
    effects = drive(core, [reply_from(b"a", 1)], now=2.0)
    assert failures(effects) == {2: FailureCode.TIMEOUT}
    assert sends(effects) == [(b"a", 3)]


def test_a_service_whose_peers_are_all_silent_is_refused_at_once() -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [Tick()], now=2.0)
    refused = only(drive(core, [ask("env")], now=2.0), Refused)
    assert refused.code is FailureCode.NO_PEER
    assert "silent or unreachable: a" in refused.message


def test_a_new_peer_takes_over_what_waits() -> None:
    core = core_with("a")
    drive(core, [ask("env")] * 3)
    assert sends(drive(core, [hello_from(b"b", services=["env"], capacity=5)])) == [
        (b"b", 2),
        (b"b", 3),
    ]


def test_a_peer_that_let_a_request_time_out_is_picked_last() -> None:
    core = core_with("a", "b", capacity=2)
    drive(core, [ask("env")])
    drive(core, [Tick()], now=1.0)
    assert sends(drive(core, [ask("env")], now=1.0)) == [(b"b", 2)]
    drive(core, [reply_from(b"b", 2), reply_from(b"a", 1)], now=1.0)
    assert sends(drive(core, [ask("env")], now=1.0)) == [(b"a", 3)]


def test_a_cancelled_request_makes_room() -> None:
    core = core_with("a")
    drive(core, [ask("env")] * 3)
    assert sends(drive(core, [Cancel(2)])) == []
    assert sends(drive(core, [Cancel(1)])) == [(b"a", 3)]


# --- loss of peers ---------------------------------------------------------------------------


def test_a_peer_that_dies_fails_all_it_held_in_the_same_handle() -> None:
    core = core_with("a", "b")
    drive(core, [ask(), ask(), ask(b"b")])
    effects = drive(core, [PeerGone(b"a", "exit code 9")])
    assert effects[0] == PeerLeft(b"a", "a", "exit code 9")
    assert failures(effects) == {1: FailureCode.PEER_LOST, 2: FailureCode.PEER_LOST}
    failed = effects[1]
    assert isinstance(failed, FailLocal)
    assert failed.failed.peer == "a"
    assert "exit code 9" in failed.failed.message
    assert core.statistics().lost == 2
    assert core.statistics().in_flight_now == 1
    assert drive(core, [PeerGone(b"a", "again")]) == []


@pytest.mark.parametrize(
    ("event", "now", "reason"),
    [
        (goodbye_from(b"a"), 0.0, "goodbye"),
        (Tick(), 4.0, "lease of 4 s"),
        (PeerGone(b"a", "signal SIGKILL"), 0.0, "SIGKILL"),
        (Expect(b"a2", "a", 1), 0.0, "incarnation 1"),
    ],
)
def test_each_way_to_leave_fails_what_was_held(event: Event, now: float, reason: str) -> None:
    core = core_with("a", heartbeat=1.0)
    drive(core, [ask(timeout=99.0)])
    effects = drive(core, [event], now=now)
    assert reason in only(effects, PeerLeft).reason
    assert failures(effects) == {1: FailureCode.PEER_LOST}
    assert core.peer_state(b"a") is PeerState.GONE


def test_a_request_is_never_sent_again() -> None:
    core = core_with("a", "b")
    drive(core, [ask("env")])
    effects = drive(core, [PeerGone(b"a", "x")])
    assert sends(effects) == []
    assert failures(effects) == {1: FailureCode.PEER_LOST}


def test_what_waits_for_a_service_fails_when_its_last_peer_leaves() -> None:
    core = core_with("a")
    drive(core, [ask("env"), ask("env")])
    effects = drive(core, [goodbye_from(b"a")])
    assert failures(effects) == {1: FailureCode.PEER_LOST, 2: FailureCode.NO_PEER}


def test_requests_of_a_peer_that_left_are_dropped_and_their_replies_are_late() -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c"), hello_from(b"d")])
    drive(core, [request_from(b"c", n, to="env") for n in (1, 2)])
    drive(core, [request_from(b"d", 1, to="env")])
    effects = drive(core, [PeerGone(b"c", "x")])
    assert effects[0] == PeerLeft(b"c", "c", "x")
    assert sends(effects) == [(b"a", 3)]  # the place is free for d
    assert drive(core, [reply_from(b"a", 1)]) == []
    assert core.statistics().late_replies == 1
    assert core.statistics().cancelled == 2


def test_a_peer_that_asked_itself_leaves_cleanly() -> None:
    core = core_with("a")
    drive(core, [request_from(b"a", n, to="env") for n in (1, 2)])
    assert drive(core, [goodbye_from(b"a")]) == [PeerLeft(b"a", "a", "it said goodbye")]
    assert core.statistics().in_flight_now == 0


# --- requests of peers -----------------------------------------------------------------------


def test_a_request_of_a_peer_is_forwarded_and_answered_under_its_own_id() -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c")])
    request = request_from(b"c", 70, to="env", payload_type="Act", ttl=2.0, frames=FRAMES)
    assert drive(core, [request]) == [sent(b"a", 1, ttl=2.0, payload_type="Act")]
    reply = reply_from(b"a", 1, payload_type="Acted", frames=FRAMES)
    header = Header(PROTOCOL_VERSION, Kind.REPLY, 70, "Acted")
    assert drive(core, [reply]) == [Send(b"c", header, FRAMES, 0)]


def test_a_failure_is_forwarded_untouched() -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c"), request_from(b"c", 70, to="a")])
    failed = failed_by(b"a", 1)
    header = Header(PROTOCOL_VERSION, Kind.FAILURE, 70, "Failed")
    assert drive(core, [failed]) == [Send(b"c", header, failed.frames, 0)]


@pytest.mark.parametrize("more", [(), (b"a frame that does not belong there",)])
def test_that_it_has_not_joined_a_peer_is_told_by_the_broker_only(more: Frames) -> None:
    """Who hears it says hello again, and gives up what it has asked of others."""
    core = core_with("a")
    drive(core, [hello_from(b"c"), request_from(b"c", 70, to="a")])
    failed = failed_by(b"a", 1, code=FailureCode.NOT_JOINED)
    failed = msgspec.structs.replace(failed, frames=[*failed.frames, *more])
    found = failure_in(only(drive(core, [failed]), Send))
    assert found.code is FailureCode.PROTOCOL
    assert ("unreadable" if more else "boom") in found.message


def test_two_peers_may_use_the_same_request_id() -> None:
    core = core_with("a", capacity=2)
    drive(core, [hello_from(b"c"), hello_from(b"d")])
    drive(core, [request_from(b"c", 7, to="env"), request_from(b"d", 7, to="env")])
    effects = drive(core, [reply_from(b"a", 2), reply_from(b"a", 1)])
    assert [(e.peer, e.header.request_id) for e in effects if isinstance(e, Send)] == [
        (b"d", 7),
        (b"c", 7),
    ]


def test_a_request_id_that_is_in_flight_is_not_taken_twice() -> None:
    core = core_with("a", capacity=2)
    drive(core, [hello_from(b"c"), request_from(b"c", 7, to="env")])
    effects = drive(core, [request_from(b"c", 7, to="env")] * 2)
    assert [type(effect) for effect in effects] == [Log]
    assert core.statistics().duplicate_requests == 2
    drive(core, [reply_from(b"a", 1)])
    assert sends(drive(core, [request_from(b"c", 7, to="env")])) == [(b"a", 2)]


@pytest.mark.parametrize(
    ("event", "now", "code"),
    [
        (Tick(), 1.0, FailureCode.TIMEOUT),
        (PeerGone(b"a", "x"), 0.0, FailureCode.PEER_LOST),
        (Unsendable(b"a", 1, FailureCode.OVERLOADED, "full"), 0.0, FailureCode.OVERLOADED),
    ],
)
def test_a_peer_is_told_when_its_request_fails(event: Event, now: float, code: FailureCode) -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c"), request_from(b"c", 7, to="env", ttl=1.0)])
    send = only(drive(core, [event], now=now), Send)
    assert (send.peer, send.header.request_id, send.wire_id) == (b"c", 7, 0)
    assert failure_in(send).code is code
    assert failure_in(send).peer == "a"


@pytest.mark.parametrize(
    ("request_event", "code"),
    [
        (request_from(b"a", 7, to="nobody"), FailureCode.NO_PEER),
        (request_from(b"a", 7, to="a", ttl=0.0), FailureCode.PROTOCOL),
        (request_from(b"a", 7, to="a", ttl=float("nan")), FailureCode.PROTOCOL),
        (request_from(b"a", 7, to="a", ttl=float("inf")), FailureCode.PROTOCOL),
    ],
)
def test_a_peer_is_told_when_its_request_is_refused(
    request_event: Received, code: FailureCode
) -> None:
    send = only(drive(core_with("a"), [request_event]), Send)
    assert (send.peer, send.header.request_id) == (b"a", 7)
    assert failure_in(send).code is code


def test_what_is_for_the_broker_itself_goes_to_its_owner() -> None:
    core = core_with("a", config=BrokerConfig())
    request = request_from(b"a", 7, frames=FRAMES)
    notice = notice_from(b"a", "Progress", frames=FRAMES)
    assert drive(core, [request, notice]) == [
        Notify(b"a", request.header, FRAMES),
        Notify(b"a", notice.header, FRAMES),
    ]


def test_a_broker_without_an_owner_answers_that_nobody_is_there() -> None:
    core = core_with("a", config=BrokerConfig(embedded=False))
    send = only(drive(core, [request_from(b"a", 7)]), Send)
    assert send.header.request_id == 7
    assert failure_in(send).code is FailureCode.NO_PEER


def test_a_notice_is_passed_on_or_dropped_and_counted() -> None:
    core = core_with("a")
    drive(core, [hello_from(b"c")])
    header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "Progress")
    for to in ("a", "env"):
        notice = notice_from(b"c", "Progress", to=to, frames=FRAMES)
        assert drive(core, [notice]) == [Send(b"a", header, FRAMES, 0)]
    assert drive(core, [notice_from(b"c", "Progress", to="nobody")]) == []
    assert core.statistics().dropped_notices == 1
