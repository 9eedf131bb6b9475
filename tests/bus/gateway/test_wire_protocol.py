"""The section on framing in docs/wire-protocol.md is what the gateway does."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable

import msgspec
import pytest

from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.wire.codec import decode, decode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.framing import StreamReader, pack, pack_for_stream
from envbus.bus.wire.messages import Header, Hello, Kind, Token
from tests.sources import ROOT

SECTION = (ROOT / "docs/wire-protocol.md").read_text("utf-8").split("\n## 11. Framing ")[1]
FRAMINGS: dict[str, Callable[[Frames], bytes]] = {"websocket": pack, "tcp": pack_for_stream}


def block(name: str) -> list[str]:
    (text,) = re.findall(rf"```{name}\n(.*?)```", SECTION, re.DOTALL)
    return str(text).splitlines()


@pytest.mark.parametrize("framing", FRAMINGS)
def test_the_byte_examples_are_what_the_gateway_writes(framing: str) -> None:
    for line in block(framing):
        frames, octets = line.split(" -> ")
        assert FRAMINGS[framing](ast.literal_eval(frames)).hex(" ") == octets


def test_the_hello_on_the_page_is_one() -> None:
    (octets,) = block("session")
    ((header, payload),) = StreamReader(1000).feed(bytes.fromhex(octets))
    assert decode_header(header) == Header(1, Kind.REQUEST, 1, "Hello", 5.0)
    assert decode(Hello, [payload]) == Hello(name="sim", heartbeat=30.0)


def test_the_fields_of_the_token_message_are_all_there() -> None:
    assert [field.name for field in msgspec.structs.fields(Token)] == ["token"]
    assert "| Token | NOTICE | to the gateway | `token` str |" in SECTION


def test_the_limits_are_those_of_the_configuration() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(GatewayConfig)}
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+) \|", SECTION, re.MULTILINE)
    assert len(rows) == 7
    assert all(defaults[name] == ast.literal_eval(value) for name, value in rows)
