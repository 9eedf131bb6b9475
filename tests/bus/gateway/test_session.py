from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from envbus.bus.codec import decode, encode
from envbus.bus.gateway.carriage import StreamCarriage, WebSocketCarriage
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.door import TurnedAwayError
from envbus.bus.gateway.framing import StreamReader, pack, pack_for_stream
from envbus.bus.gateway.session import Session
from envbus.bus.headers import decode_header, encode_header
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Payload,
    Token,
)

CONFIG = GatewayConfig(tcp=("127.0.0.1:0",), max_message_bytes=1000)


def session(token: str | None = None) -> Session:
    return Session(StreamCarriage(CONFIG), token)


def message(payload: Payload, kind: Kind = Kind.REQUEST, **header: Any) -> list[bytes]:
    fields = {"version": PROTOCOL_VERSION, "request_id": 1, **header}
    head = Header(kind=kind, payload_type=type(payload).__name__, **fields)
    return [encode_header(head), *(bytes(frame) for frame in encode(payload))]


HELLO = message(Hello(name="sim"), incarnation=3)


def passed(of: Session, *messages: Sequence[bytes]) -> list[list[bytes]]:
    stream = b"".join(pack_for_stream(frames) for frames in messages)
    return [[bytes(frame) for frame in frames] for frames in of.receive(stream)]


def last_words(of: Session) -> Failed:
    (frames,) = StreamReader(1000).feed(of.take_unsent())
    header = decode_header(frames[0])
    assert (header.kind, header.request_id) == (Kind.FAILURE, 0)
    return decode(Failed, frames[1:])


def test_messages_pass_untouched_and_in_order() -> None:
    other = [b"not even a header", b"\xc1", b""]
    assert passed(session(), HELLO, other, other[:1]) == [HELLO, other, other[:1]]


def test_without_a_token_nothing_passes() -> None:
    guarded = session("secret")
    assert passed(guarded, HELLO) == []
    assert "a token is wanted" in last_words(guarded).message
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
    ("first", "code"),
    [
        ([b"\xc1"], FailureCode.PROTOCOL),
        ([b""], FailureCode.PROTOCOL),
        (message(Hello(name="sim"), version=2), FailureCode.VERSION),
        ([message(Token(token="x"), Kind.NOTICE)[0], b"\xc1"], FailureCode.PROTOCOL),
        ([bytes(999)], FailureCode.PROTOCOL),
    ],
)
def test_a_bad_first_message_ends_the_session(first: list[bytes], code: FailureCode) -> None:
    opened = session()
    assert passed(opened, first, HELLO) == []
    assert last_words(opened).code is code


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
    assert (header.kind, header.payload_type, header.incarnation) == (Kind.NOTICE, "Goodbye", 3)


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
            assert last_words(opened).message == opened.ended
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
    opened = Session(WebSocketCarriage(CONFIG), None)
    for at in range(0, len(stream), step):
        messages = opened.receive(bytes(stream[at : at + step]))
        assert opened.joined or not messages
        opened.take_unsent()
        if opened.ended is not None:
            assert opened.receive(bytes(stream)) == []
            assert opened.wrap(HELLO) == b""
            return
        opened.wrap(HELLO)
