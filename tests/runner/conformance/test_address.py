from __future__ import annotations

import pytest

from envbus.bus.errors import ConfigError
from envbus.runner.conformance.address import Address


@pytest.mark.parametrize(
    ("text", "transport", "tls", "url"),
    [
        ("tcp://10.0.0.1:5555", "zmq", False, "tcp://10.0.0.1:5555"),
        ("stream://localhost:7000", "stream", False, "tcp://localhost:7000"),
        ("streams://localhost:7000", "stream", True, "tcp://localhost:7000"),
        ("ws://[::1]:7000", "websocket", False, "ws://[::1]:7000/"),
        ("wss://game.example:443/play", "websocket", True, "wss://game.example:443/play"),
        ("127.0.0.1:5555", None, False, "tcp://127.0.0.1:5555"),
    ],
)
def test_an_address_says_where_and_how(
    text: str, transport: str | None, tls: bool, url: str
) -> None:
    address = Address.parse(text)
    assert (address.transport, address.tls, address.url()) == (transport, tls, url)
    assert Address.parse(str(address)) == address or address.path == ""


def test_an_ipc_path_is_an_address() -> None:
    assert Address.parse("ipc:///run/bus").url() == "ipc:///run/bus"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "needs host and port"),
        ("http://localhost:80", "there is no http://; there are tcp://"),
        ("127.0.0.1:99999", "cannot be used"),
        (":80", "needs host and port"),
    ],
)
def test_what_is_no_address_is_refused_with_what_it_lacks(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Address.parse(text)
