from __future__ import annotations

import pytest

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    BrokerConfig,
    Expect,
    Log,
    PeerLeft,
    PeerReady,
    Received,
    Send,
    Tick,
)
from envbus.bus.broker.peers import PeerState
from envbus.bus.wire.messages import (
    FailureCode,
)
from tests.bus.scenes import ask, core_with, failure_in, only, sends
from tests.bus.testing import (
    drive,
    hello_from,
)


@pytest.mark.parametrize(
    "hello",
    [
        hello_from(b"a", services=["env", "more"]),
        hello_from(b"a", name="other"),
        hello_from(b"a", services=["env"], incarnation=5),
        hello_from(b"b", name="a"),
        hello_from(b"\0abcd", name="b"),
        hello_from(b"b", name=""),
        hello_from(b"b", name="x" * 257),
        hello_from(b"b", name="x\nERROR the disk is full"),
        hello_from(b"b", name="\x1b[2J"),
        hello_from(b"b", name="\u202etxt.exe"),
        hello_from(b"b", services=["y\x00"]),
        hello_from(b"b", services=["y"] * 65),
        hello_from(b"b", services=[""]),
        hello_from(b"b", capacity=0),
        hello_from(b"b", heartbeat=-1.0),
        hello_from(b"b", heartbeat=float("nan")),
        hello_from(b"b", name="env"),
        hello_from(b"b", services=["a"]),
        Received(b"b", hello_from(b"b").header, [b"\xc1"]),
        Received(b"b", hello_from(b"b").header, []),
        Received(b"b", hello_from(b"b").header, [b"", b""]),
        Received(b"b", hello_from(b"b").header, [b"\x81\xa4name\x01"]),
    ],
)
def test_a_hello_that_cannot_be_is_refused_and_changes_nothing(hello: Received) -> None:
    core = core_with("a")
    effects = drive(core, [hello])
    assert [type(effect) for effect in effects] == [Log, Send]
    assert failure_in(only(effects, Send)).code is FailureCode.PROTOCOL
    assert core.statistics().ready_peers_now == 1
    assert core.peer_state(b"a") is PeerState.READY
    assert core.statistics().malformed == 1


def test_a_higher_incarnation_of_the_same_user_takes_the_name_over() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"a", user="key")])
    effects = drive(core, [hello_from(b"a2", name="a", incarnation=1, user="key")])
    assert [type(effect) for effect in effects] == [PeerLeft, Send, PeerReady]
    assert core.peer_state(b"a") is PeerState.GONE
    assert sends(drive(core, [ask("a")])) == [(b"a2", 1)]


def test_what_a_lost_connection_has_left_takes_no_name() -> None:
    """A ROUTER gives it an id of its own when the next connection comes; a client that has
    connected again while nobody looked was refused for ever."""
    core = core_with()
    left, there = hello_from(b"\0\x01\x02\x03\x04", name="a"), hello_from(b"a")
    effects = drive(core, [left, there])
    refused = next(effect for effect in effects if isinstance(effect, Send))
    assert failure_in(refused).code is FailureCode.PROTOCOL
    assert core.peer_state(b"a") is PeerState.READY


def test_without_keys_nobody_takes_the_name_of_one_that_is_there() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"a", heartbeat=1.0)])
    evil = hello_from(b"evil", name="a", incarnation=99, heartbeat=1.0)
    assert "taken by a peer that is there" in refusal(core, evil)
    drive(core, [Tick()], now=2.5)
    assert core.peer_state(b"a") is PeerState.SUSPECT
    drive(core, [evil], now=2.5)
    assert core.peer_state(b"evil") is PeerState.READY


def test_names_and_heartbeats_that_nobody_means_are_refused() -> None:
    assert "at least 0.01 s" in refusal(BrokerCore(), hello_from(b"a", heartbeat=1e-9))
    for name in ("a\nb", "\x1b[2J"):
        assert "control characters" in refusal(BrokerCore(), hello_from(b"a", name=name))
        assert "control characters" in refusal(BrokerCore(), hello_from(b"a", services=[name]))


def test_a_peer_may_be_called_like_its_service() -> None:
    core = BrokerCore()
    drive(core, [hello_from(b"1", name="policy", services=["policy"])])
    drive(core, [hello_from(b"2", name="policy-2", services=["policy"])])
    assert sends(drive(core, [ask("policy"), ask("policy")])) == [(b"1", 1), (b"2", 2)]


def test_the_name_of_an_expected_child_is_taken_over_by_nobody() -> None:
    core = BrokerCore()
    drive(core, [Expect(b"a", "actor-0", 0)])
    stranger = hello_from(b"evil", name="actor-0", incarnation=99)
    assert "taken" in failure_in(only(drive(core, [stranger]), Send)).message
    drive(core, [hello_from(b"a", name="actor-0"), stranger])
    assert core.peer_state(b"a") is PeerState.READY
    assert core.peer_state(b"evil") is PeerState.GONE


def test_a_child_with_another_incarnation_than_expected_is_refused() -> None:
    core = BrokerCore()
    drive(core, [Expect(b"a", "actor-0", 1)])
    effects = drive(core, [hello_from(b"a", name="actor-0", incarnation=0)])
    assert "incarnation 1" in failure_in(only(effects, Send)).message


def refusal(core: BrokerCore, hello: Received) -> str:
    """Return the message of the only failure that a hello gets."""
    failed = failure_in(only(drive(core, [hello]), Send))
    assert failed.code is FailureCode.PROTOCOL
    return failed.message


def test_a_name_and_an_identity_belong_to_one_user() -> None:
    core = BrokerCore()
    (_, ready) = drive(core, [hello_from(b"a", user="key")])
    assert isinstance(ready, PeerReady)
    assert ready.user == "key"
    assert "another user" in refusal(core, hello_from(b"b", name="a", incarnation=1, user="other"))
    assert "another user" in refusal(core, hello_from(b"a", user=""))
    left, _, ready = drive(core, [hello_from(b"b", name="a", incarnation=1, user="key")])
    assert isinstance(left, PeerLeft)
    assert isinstance(ready, PeerReady)


@pytest.mark.parametrize("heartbeat", [0.0, 5.1, 1e300])
def test_where_nobody_watches_a_peer_it_has_to_give_signs_of_life(heartbeat: float) -> None:
    core = BrokerCore(BrokerConfig(max_heartbeat=5.0))
    assert "of at most 5 s" in refusal(core, hello_from(b"a", heartbeat=heartbeat))
    drive(core, [Expect(b"a", "a", 0), hello_from(b"a", heartbeat=heartbeat)])
    drive(core, [hello_from(b"b", heartbeat=5.0)])
    assert core.statistics().ready_peers_now == 2


@pytest.mark.parametrize("hello", [hello_from(b"b", name="me"), hello_from(b"b", services=["me"])])
def test_nobody_takes_the_name_of_the_brokers_owner(hello: Received) -> None:
    core = core_with("a", config=BrokerConfig(owner="me"))
    effects = drive(core, [hello])
    assert "owner" in failure_in(only(effects, Send)).message
    assert core.statistics().ready_peers_now == 1
