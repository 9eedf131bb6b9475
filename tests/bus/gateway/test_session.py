from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from envbus.bus.gateway.access import TurnedAwayError
from envbus.bus.gateway.client_framing import StreamFraming, WebSocketFraming
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.session import STRANGERS_BYTES, Budget, GatewaySession
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import StreamReader, pack, pack_for_stream
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Token,
    Welcome,
)

CONFIG = GatewayConfig(tcp=("127.0.0.1:0",), max_message_bytes=1000)


def session(token: str | None = None) -> GatewaySession:
    return GatewaySession(StreamFraming(CONFIG), dataclasses.replace(CONFIG, token=token))


def message(payload: Payload, kind: Kind = Kind.REQUEST, **header: Any) -> list[bytes]:
    fields = {"version": PROTOCOL_VERSION, "request_id": 1, **header}
    head = Header(kind=kind, payload_type=type(payload).__name__, **fields)
    return [encode_header(head), *(bytes(frame) for frame in encode(payload))]


HELLO = message(Hello(name="sim"), incarnation=3)


def passed(of: GatewaySession, *messages: Sequence[bytes]) -> list[list[bytes]]:
    stream = b"".join(pack_for_stream(frames) for frames in messages)
    return [[bytes(frame) for frame in frames] for frames in of.receive(stream)]


def last_words(of: GatewaySession, request_id: int = 0) -> Failed:
    (frames,) = StreamReader(1000).feed(of.take_unsent())
    header = decode_header(frames[0])
    assert (header.kind, header.request_id) == (Kind.FAILURE, request_id)
    return decode(Failed, frames[1:])


def read(stream: bytes) -> list[list[memoryview]]:
    return list(StreamReader(1000).feed(stream))


def test_messages_pass_untouched_and_in_order() -> None:
    other = [b"not even a header", b"\xc1", b""]
    assert passed(session(), HELLO, other, other[:1]) == [HELLO, other, other[:1]]


def test_without_a_token_nothing_passes() -> None:
    guarded = session("secret")
    assert passed(guarded, HELLO) == []
    assert "a token is wanted" in last_words(guarded, 1).message
    assert not guarded.joined
    assert guarded.ended


def test_a_token_opens_and_does_not_reach_the_broker() -> None:
    guarded = session("secret")
    assert passed(guarded, message(Token(token="secret"), Kind.NOTICE), HELLO) == [HELLO]
    assert guarded.joined


def test_a_wrong_token_ends_the_session_at_once() -> None:
    guarded = session("secret")
    guess, right = (message(Token(token=t), Kind.NOTICE) for t in ("guess", "secret"))
    assert passed(guarded, guess, right, HELLO) == []
    assert last_words(guarded) == Failed(code=FailureCode.PROTOCOL, message="the token is wrong")
    assert passed(guarded, right, HELLO) == []


def test_a_token_that_nobody_wants_is_taken() -> None:
    assert passed(session(), message(Token(token="any"), Kind.NOTICE), HELLO) == [HELLO]


@pytest.mark.parametrize(
    ("first", "code", "request_id"),
    [
        ([b"\xc1"], FailureCode.PROTOCOL, 0),
        ([b""], FailureCode.PROTOCOL, 0),
        (message(Hello(name="sim"), version=2), FailureCode.VERSION, 1),
        ([message(Token(token="x"), Kind.NOTICE)[0], b"\xc1"], FailureCode.PROTOCOL, 0),
        ([bytes(999)], FailureCode.PROTOCOL, 0),
        (message(Heartbeat(), Kind.NOTICE), FailureCode.NOT_JOINED, 0),
        (message(Hello(name="sim"), Kind.NOTICE), FailureCode.NOT_JOINED, 0),
    ],
)
def test_a_bad_first_message_ends_the_session(
    first: list[bytes], code: FailureCode, request_id: int
) -> None:
    opened = session()
    assert passed(opened, first, HELLO) == []
    assert last_words(opened, request_id).code is code


def test_a_request_before_hello_is_refused_and_the_connection_stays() -> None:
    opened = session()
    early = message(Hello(name="sim"), to="another", request_id=5)
    assert passed(opened, early, HELLO) == [HELLO]
    assert last_words(opened, 5).code is FailureCode.NOT_JOINED


def test_what_a_stranger_announces_ends_its_session_at_once_if_it_is_too_large() -> None:
    opened = session()
    assert opened.receive(b"\x16\x03\x01\x02\x00") == []  # TLS, where there is none
    assert "is announced; at most 1000" in last_words(opened).message


def test_a_stranger_gets_no_more_than_its_small_buffer() -> None:
    config = dataclasses.replace(CONFIG, max_message_bytes=1 << 20)
    stranger = GatewaySession(StreamFraming(config), config)
    assert stranger.receive(b"\x00\x0f\xff\xff" + bytes(STRANGERS_BYTES - 4)) == []
    assert stranger.ended is None
    assert stranger.receive(b"\x00") == []
    assert "no hello among them" in last_words(stranger).message


def test_welcome_tells_the_limit_and_the_lease_that_hold_here() -> None:
    opened = session()
    passed(opened, HELLO)
    welcome = message(Welcome(lease=4.0, max_message_bytes=1 << 30), Kind.REPLY)
    ((header, payload),) = read(opened.wrap(welcome))
    assert decode(Welcome, [payload]) == Welcome(lease=4.0, max_message_bytes=1000)
    assert (header, opened.lease) == (welcome[0], 4.0)
    small = message(Welcome(lease=4.0, max_message_bytes=10), Kind.REPLY, request_id=7)
    passed(opened, message(Hello(name="again"), request_id=7))
    assert read(opened.wrap(small)) == [small]


def test_another_answer_that_is_called_welcome_passes_untouched() -> None:
    opened = session()
    passed(opened, HELLO)
    forged = message(Welcome(lease=0.1, max_message_bytes=1), Kind.REPLY, request_id=2)
    assert read(opened.wrap(forged)) == [forged]
    assert opened.lease == 0.0


def test_a_hello_that_is_refused_ends_the_session_by_its_id() -> None:
    opened = session()
    passed(opened, HELLO)
    refusal = Failed(code=FailureCode.OVERLOADED, message="full")
    assert opened.wrap(message(refusal, Kind.FAILURE)) == b""
    assert last_words(opened, 1) == refusal
    assert opened.ended == "full"


def test_a_request_over_the_limit_is_failed_by_its_id_and_others_pass() -> None:
    opened = session()
    large = message(Hello(name="x" * 2000), request_id=7)
    assert passed(opened, HELLO, large, HELLO) == [HELLO, HELLO]
    failed = last_words(opened, 7)
    assert failed.code is FailureCode.PROTOCOL
    size = len(pack(large))
    assert f"a message of {size} bytes is over the limit of 1000" in failed.message
    assert opened.ended is None


def test_what_is_over_the_limit_and_no_request_ends_the_session() -> None:
    opened = session()
    large = [*message(Heartbeat(), Kind.NOTICE), bytes(2000)]
    assert passed(opened, HELLO, large, HELLO) == [HELLO]
    assert "is over the limit of 1000" in last_words(opened).message


def test_the_first_reason_is_the_one_that_is_told() -> None:
    opened = session()
    opened.end(TurnedAwayError("first", FailureCode.OVERLOADED))
    opened.end(TurnedAwayError("second"))
    assert last_words(opened) == Failed(code=FailureCode.OVERLOADED, message="first")
    assert opened.wrap(HELLO) == opened.probe() == b""


def test_the_broker_is_told_of_the_end_of_a_peer_that_it_knows() -> None:
    opened = session()
    assert opened.goodbye() is None
    passed(opened, HELLO)
    farewell = opened.goodbye()
    assert farewell is not None
    header = decode_header(farewell[0])
    assert (header.kind, header.payload_type) == (Kind.NOTICE, "Goodbye")
    assert header.incarnation >= 3, "it is of no former life, whatever its client has said"


stream_of_messages = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.lists(st.binary(max_size=40), min_size=1, max_size=4).map(pack_for_stream),
        st.just(pack_for_stream(HELLO)),
        st.just(pack_for_stream(message(Token(token="secret"), Kind.NOTICE))),
    ),
    max_size=8,
).map(b"".join)


@given(stream_of_messages, st.sampled_from([None, "secret"]), st.integers(1, 50))
def test_any_stream_is_passed_or_ends_its_own_session(
    stream: bytes, token: str | None, step: int
) -> None:
    opened = session(token)
    for at in range(0, len(stream), step):
        messages = opened.receive(stream[at : at + step])
        assert opened.joined or not messages
        if opened.ended is not None:
            assert opened.receive(pack_for_stream(HELLO)) == []
            return


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
websocket_frames = st.one_of(
    st.builds(
        Frame,
        st.sampled_from([Opcode.BINARY, Opcode.CONT, Opcode.TEXT]),
        st.one_of(st.binary(max_size=60), st.just(pack(HELLO))),
        st.booleans(),
    ),
    st.builds(Frame, st.sampled_from([Opcode.PING, Opcode.CLOSE]), st.binary(max_size=60)),
).map(lambda frame: bytes(frame.serialize(mask=True)))
websocket_streams = st.lists(
    st.one_of(websocket_frames, st.just(HANDSHAKE), st.binary(max_size=60)), max_size=8
)


@given(websocket_streams, st.booleans(), st.integers(1, 80), st.data())
def test_any_bytes_at_a_websocket_are_passed_or_end_their_own_session(
    chunks: list[bytes], handshake: bool, step: int, data: st.DataObject
) -> None:
    stream = bytearray(b"".join([HANDSHAKE, *chunks] if handshake else chunks))
    if stream and data.draw(st.booleans(), "damage"):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    opened = GatewaySession(WebSocketFraming(CONFIG), CONFIG)
    for at in range(0, len(stream), step):
        messages = opened.receive(bytes(stream[at : at + step]))
        assert opened.joined or not messages
        opened.take_unsent()
        if opened.ended is not None:
            assert opened.receive(bytes(stream)) == []
            assert opened.wrap(HELLO) == b""
            return
        opened.wrap(HELLO)


# --- what the broker may not have taken yet --------------------------------------------------


def answer(mark: Frames) -> Frames:
    header = Header(1, Kind.FAILURE, decode_header(mark[0]).request_id, Failed.__name__)
    return [encode_header(header), *encode(Failed(code=FailureCode.NO_PEER, message=""))]


def test_what_came_before_an_answered_mark_was_taken() -> None:
    budget = Budget(400, 2**62)
    assert budget.is_empty
    budget.add([b"header", bytes(43)])  # and what libzmq takes for two frames
    assert not budget.wants_mark(0.0)
    budget.add([b"header"])
    assert budget.wants_mark(0.0)
    budget.mark(0.0)
    budget.unmark()  # there was no room
    assert budget.wants_mark(0.0)
    mark = budget.mark(0.0)
    assert not budget.wants_mark(0.0)
    budget.add([bytes(200)])
    assert budget.is_full
    assert not budget.takes([encode_header(Header(1, Kind.FAILURE, 1, "Failed")), b""])
    assert not budget.takes([b"nonsense"])
    assert budget.takes(answer(mark))
    assert not budget.is_full
    assert budget.wants_mark(0.0)  # for those behind it
    assert not budget.takes(answer(mark))


def test_the_last_mark_is_passed_on_at_once_and_stands_behind_all() -> None:
    budget = Budget(1000, 2**62)
    assert not budget.wants_mark(0.0, is_last=True)
    budget.add([b""])  # a frame of no bytes is one, too
    assert budget.wants_mark(0.0, is_last=True)
    former = budget.mark(0.0)
    budget.add([b"header"])
    assert budget.wants_mark(0.0, is_last=True)
    last = budget.mark(0.0)
    assert not budget.wants_mark(0.0, is_last=True)
    assert budget.takes(answer(former))
    assert not budget.is_empty
    assert budget.takes(answer(last))
    assert budget.is_empty


def test_a_mark_that_is_lost_is_followed_by_another_one() -> None:
    budget = Budget(100, 2**62)
    budget.add([bytes(100)])
    lost = budget.mark(0.0)
    assert not budget.wants_mark(5.0)
    assert budget.wants_mark(5.1)
    found = budget.mark(5.1)
    assert not budget.wants_mark(15.1)  # less often, while the broker is away
    assert budget.wants_mark(15.2)
    assert budget.takes(answer(lost))  # late: it is no news
    assert budget.is_full
    assert budget.takes(answer(found))
    assert not budget.is_full


def test_what_was_lost_once_makes_no_later_mark_wait_longer() -> None:
    budget = Budget(100, 2**62)
    budget.add([bytes(100)])
    budget.mark(0.0)
    assert budget.takes(answer(budget.mark(5.1)))
    budget.add([bytes(100)])
    budget.mark(10.0)
    assert not budget.wants_mark(15.0)
    assert budget.wants_mark(15.1)
