from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.gateway.config import GatewayConfig, split_address

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("localhost:7000", "localhost", 7000),
        ("[::1]:7000", "::1", 7000),
        ("*:65535", "", 65535),
    ],
)
def test_an_address_is_host_and_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "7000", ":7000", "host:", "host:-1", "host:65536", "host:*", "::1:7000", "h:²"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        GatewayConfig(tcp=(address,))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_loopback_needs_no_guard(address: str) -> None:
    GatewayConfig(tcp=(address,), websocket=(address,))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "*:0", "10.0.0.5:0", "[::]:0", "game.example:0"])
@pytest.mark.parametrize("kind", ["tcp", "websocket"])
@pytest.mark.parametrize(
    ("guards", "missing"),
    [
        ({}, "pass token= of 16 characters or more and certificate="),
        ({"token": TOKEN}, "pass certificate= and private_key=,"),
        ({"certificate": "c", "private_key": "k"}, "pass token= of 16 characters or more,"),
        ({"token": "short", "certificate": "c", "private_key": "k"}, "pass token= of 16"),
        (
            {"token": {"a": TOKEN, "b": "short"}, "certificate": "c", "private_key": "k"},
            "pass token= of 16",
        ),
    ],
)
def test_a_wide_address_needs_a_token_and_tls(
    address: str, kind: str, guards: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"would let other hosts join unguarded; {missing}"):
        GatewayConfig(**{kind: (address,)}, **guards)


def test_a_wide_address_is_allowed_with_both_or_on_request() -> None:
    GatewayConfig(tcp=("*:0",), token=TOKEN, certificate="c", private_key="k")
    GatewayConfig(tcp=("*:0",), insecure=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "needs an address"),
        ({"tcp": "127.0.0.1:0"}, "tcp is a tuple"),
        ({"token": "with space"}, "a token has"),
        ({"token": ""}, "a token has"),
        ({"token": {}}, "names nobody"),
        ({"token": {"a": ""}}, "a token has"),
        ({"token": {"": TOKEN}}, "the name of a token has"),
        ({"token": {"a b": TOKEN}}, "the name of a token has"),
        ({"token": {"a" * 33: TOKEN}}, "the name of a token has"),
        ({"token": {"a": TOKEN, "b": TOKEN}}, "two names have one token"),
        ({"token": TOKEN.encode()}, "token is a string, or a dict"),
        ({"token": {"a": None}}, "token is a string, or a dict"),
        ({"token": {1: TOKEN}}, "token is a string, or a dict"),
        ({"certificate": Path("c"), "private_key": "k"}, "certificate is the name of a file"),
        ({"certificate": "c", "private_key": "k\0"}, "private_key is the name of a file"),
        ({"certificate": "c"}, "both files"),
        ({"max_connections": 0}, "max_connections must be a positive int"),
        ({"max_message_bytes": 2**32}, "below 4 GiB"),
        ({"handshake_timeout": 0.0}, "handshake_timeout must be"),
        ({"keepalive": float("inf")}, "keepalive must be"),
        ({"hang_timeout": 0.0}, "hang_timeout must be"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], why: str) -> None:
    settings = settings if "tcp" in settings or not settings else {**settings, "tcp": ("[::1]:0",)}
    with pytest.raises(ConfigError, match=why):
        GatewayConfig(**settings)


def test_files_that_are_no_certificate_are_told_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "certificate.pem"
    file.write_text("nothing of the kind")
    for name in (str(file), str(tmp_path / "missing.pem")):
        config = GatewayConfig(tcp=("127.0.0.1:0",), certificate=name, private_key=name)
        with pytest.raises(ConfigError, match="TLS cannot use"):
            config.read_tls()


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_certificate_or_key_is_refused_and_not_waited_for(
    tmp_path: Path,
) -> None:
    file, pipe = tmp_path / "file.pem", tmp_path / "pipe.pem"
    file.write_text("nothing of the kind")
    os.mkfifo(pipe)
    for certificate, key in ((pipe, file), (file, pipe)):
        config = GatewayConfig(
            tcp=("127.0.0.1:0",), certificate=str(certificate), private_key=str(key)
        )
        with pytest.raises(ConfigError, match=f"{pipe} is no file"):
            config.read_tls()


def test_a_file_for_tls_that_has_no_end_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "sparse.pem"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    config = GatewayConfig(tcp=("127.0.0.1:0",), certificate=str(file), private_key=str(file))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        config.read_tls()


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(GatewayConfig(tcp=("127.0.0.1:0",), token=TOKEN))
