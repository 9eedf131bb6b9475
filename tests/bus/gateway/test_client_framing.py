from __future__ import annotations

import base64
import tracemalloc
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from envbus.bus.errors import DecodeError
from envbus.bus.gateway.access import TurnedAwayError
from envbus.bus.gateway.client_framing import StreamFraming, WebSocketFraming
from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.wire.codec import decode, decode_header, encode_header
from envbus.bus.wire.framing import pack, pack_for_stream, unpack
from envbus.bus.wire.messages import Failed, Header, Kind

FRAMES = [b"header", b"payload", b"buffer"]


def config(**settings: Any) -> GatewayConfig:
    return GatewayConfig(websocket=("127.0.0.1:0",), **settings)


class Browser:
    """The other side of a WebSocket, without a socket."""

    def __init__(self, framing: WebSocketFraming, path: str = "/", **headers: str) -> None:
        self.framing = framing
        self.protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1{path}"), max_size=None)
        request = self.protocol.connect()
        for name, value in headers.items():
            request.headers[name] = value
        self.protocol.send_request(request)

    def talk(self) -> list[list[bytes]]:
        """Let both say what they have to; return the messages that came through."""
        data = b"".join(self.protocol.data_to_send())
        messages = [[bytes(frame) for frame in frames] for frames in self.framing.receive(data)]
        self.hear(self.framing.take_unsent())
        return messages

    def hear(self, data: bytes) -> None:
        self.protocol.receive_data(data)

    def came(self) -> list[Any]:
        return list(self.protocol.events_received())

    def response(self) -> Response:
        (response,) = [event for event in self.came() if isinstance(event, Response)]
        return response


def open_browser(**settings: Any) -> Browser:
    browser = Browser(WebSocketFraming(config(**settings)))
    browser.talk()
    assert browser.response().status_code == 101
    return browser


def refused(browser: Browser) -> tuple[int, str]:
    with pytest.raises(TurnedAwayError) as caught:
        browser.talk()
    browser.hear(browser.framing.farewell(caught.value))
    response = browser.response()
    assert response.body is not None
    assert response.body.decode().strip() == str(caught.value)
    assert browser.framing.over
    return response.status_code, str(caught.value)


def test_messages_cross_a_stream_both_ways() -> None:
    framing = StreamFraming(config())
    (message,) = framing.receive(pack_for_stream(FRAMES))
    assert message == FRAMES
    assert framing.wrap(FRAMES) == pack_for_stream(FRAMES)


def test_messages_cross_a_websocket_both_ways() -> None:
    browser = open_browser()
    browser.protocol.send_binary(pack(FRAMES))
    assert browser.talk() == [FRAMES]
    browser.hear(browser.framing.wrap(FRAMES))
    (frame,) = browser.came()
    assert (frame.opcode, unpack(frame.data)) == (Opcode.BINARY, FRAMES)


def test_fragments_are_put_together_with_pings_between_them() -> None:
    browser = open_browser()
    packed = pack(FRAMES)
    browser.protocol.send_binary(packed[:3], fin=False)
    browser.protocol.send_ping(b"now")
    browser.protocol.send_continuation(packed[3:5], fin=False)
    assert browser.talk() == []
    (pong,) = browser.came()
    assert (pong.opcode, pong.data) == (Opcode.PONG, b"now")
    browser.protocol.send_continuation(packed[5:], fin=True)
    assert browser.talk() == [FRAMES]


def test_fragments_together_are_held_to_the_limit() -> None:
    browser = open_browser(max_message_bytes=10)
    browser.protocol.send_binary(bytes(8), fin=False)
    browser.protocol.send_continuation(bytes(8), fin=True)
    assert browser.talk() == []
    assert browser.framing.over
    assert browser.protocol.close_rcvd is not None
    assert browser.protocol.close_rcvd.code == 1009


@pytest.mark.parametrize("fragmented", [False, True])
def test_a_request_over_the_limit_is_failed_by_its_id_before_the_close(fragmented: bool) -> None:
    browser = open_browser(max_message_bytes=100)
    packed = pack([encode_header(Header(1, Kind.REQUEST, 7, "Big")), bytes(100)])
    if fragmented:
        browser.protocol.send_binary(packed[:50], fin=False)
        browser.talk()
        browser.protocol.send_continuation(packed[50:], fin=True)
    else:
        browser.protocol.send_binary(packed)
    assert browser.talk() == []
    told, close = browser.came()
    header, payload = unpack(told.data)
    assert decode_header(header).request_id == 7
    failed = decode(Failed, [payload])
    assert f"a message of {len(packed)} bytes is over the limit of 100" in failed.message
    assert (close.opcode, browser.framing.over) == (Opcode.CLOSE, True)


@pytest.mark.slow
def test_endless_empty_fragments_take_no_memory() -> None:
    browser = open_browser()
    browser.framing.admit()
    browser.protocol.send_binary(b"", fin=False)
    for _ in range(10):
        for _ in range(2000):
            browser.protocol.send_continuation(b"", fin=False)
        assert browser.talk() == []
    tracemalloc.start()
    try:
        for _ in range(10):
            for _ in range(2000):
                browser.protocol.send_continuation(b"", fin=False)
            browser.talk()
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    browser.protocol.send_continuation(pack(FRAMES), fin=True)
    assert browser.talk() == [FRAMES]


def test_strangers_have_few_frames_besides_messages() -> None:
    browser = open_browser()
    for _ in range(64):
        browser.protocol.send_ping(b"")
    assert browser.talk() == []
    browser.protocol.send_ping(b"")
    with pytest.raises(TurnedAwayError, match="64 frames came and no hello"):
        browser.talk()


def test_text_and_malformed_messages_are_refused() -> None:
    browser = open_browser()
    browser.protocol.send_text(b"hello")
    with pytest.raises(TurnedAwayError, match="binary"):
        browser.talk()
    browser = open_browser()
    browser.protocol.send_binary(b"\xc0")
    with pytest.raises(DecodeError):
        browser.talk()


def test_a_living_client_answers_a_probe() -> None:
    browser = open_browser()
    browser.hear(browser.framing.probe())
    (ping,) = browser.came()
    assert ping.opcode is Opcode.PING
    assert browser.protocol.data_to_send() != []


def test_the_reason_to_close_is_told_twice() -> None:
    browser = open_browser()
    browser.hear(browser.framing.farewell(TurnedAwayError("é" * 100)))
    message, close = browser.came()
    assert b"FailureCode" not in message.data
    assert "é".encode() * 100 in message.data
    assert close.opcode is Opcode.CLOSE
    assert browser.protocol.close_rcvd is not None
    assert browser.protocol.close_rcvd.reason == "é" * 61


def test_a_client_that_closes_is_answered_and_over() -> None:
    browser = open_browser()
    browser.protocol.send_close(1000)
    assert browser.talk() == []
    assert browser.framing.over
    assert browser.framing.wrap(FRAMES) == browser.framing.probe() == b""


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/?token=secret", {}), ("/", {"Authorization": "Bearer secret"})],
)
def test_a_token_in_the_request_lets_in(path: str, headers: dict[str, str]) -> None:
    framing = WebSocketFraming(config(token="secret"))
    browser = Browser(framing, path, **headers)
    browser.talk()
    assert framing.has_token
    assert browser.response().status_code == 101


def test_a_wrong_token_is_unauthorized() -> None:
    browser = Browser(WebSocketFraming(config(token="secret")), "/?token=guess")
    assert refused(browser) == (401, "the token is wrong")


def test_without_a_token_the_connection_waits_for_the_message() -> None:
    assert not open_browser(token="secret").framing.has_token


def test_a_page_from_elsewhere_is_forbidden() -> None:
    browser = Browser(WebSocketFraming(config()), Origin="https://evil.example")
    status, why = refused(browser)
    assert (status, "'https://evil.example' may not connect" in why) == (403, True)


def test_what_is_no_websocket_gets_an_http_answer() -> None:
    framing = WebSocketFraming(config())
    assert list(framing.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")) == []
    assert framing.take_unsent().startswith(b"HTTP/1.1 426 Upgrade Required")
    assert framing.over


def test_a_client_over_the_limit_is_told_by_http() -> None:
    framing = WebSocketFraming(config())
    assert framing.farewell(TurnedAwayError("full")).startswith(b"HTTP/1.1 503")
    assert framing.over


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x00" * 40 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000,
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nOrigin: a\r\nOrigin: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
    ],
)
def test_a_hostile_handshake_ends_in_a_refusal(hostile: bytes) -> None:
    framing = WebSocketFraming(config())
    try:
        assert list(framing.receive(hostile)) == []
    except TurnedAwayError as error:
        framing.farewell(error)
    framing.take_unsent()
    assert framing.over


def test_a_message_right_before_the_close_passes() -> None:
    browser = open_browser()
    browser.protocol.send_binary(pack(FRAMES))
    browser.protocol.send_close(1000)
    assert browser.talk() == [FRAMES]
    assert browser.framing.over


def test_a_request_with_garbage_right_behind_it_is_not_answered() -> None:
    framing = WebSocketFraming(config())
    assert list(framing.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\xff" * 9)) == []
    framing.take_unsent()
    assert framing.over


def test_an_unmasked_frame_breaks_the_framing_only() -> None:
    framing = open_browser().framing
    frame = Frame(Opcode.BINARY, base64.b64decode("AAAA")).serialize(mask=False)
    assert list(framing.receive(frame)) == []
    framing.take_unsent()
    assert framing.over
