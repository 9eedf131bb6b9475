"""The tables and byte examples of docs/wire-protocol.md are what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from envbus.bus.wire import limits
from envbus.bus.wire.codec import (
    Ext,
    Placeholder,
    decode,
    encode,
    encode_header,
)
from envbus.bus.wire.dynamic_values import Value
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Shutdown,
    Tree,
    Welcome,
)
from tests.bus.codec_samples import Sample, identical

PAGE = (Path(__file__).parents[2] / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
EXAMPLES = [
    line.split(" -> ")
    for block in re.findall(r"```wire\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
NAMES = {
    "Array": lambda array: Sample(array=array),
    "Failed": Failed,
    "FailureCode": FailureCode,
    "Header": Header,
    "Heartbeat": Heartbeat,
    "Kind": Kind,
    "Placeholder": Placeholder,
    "np": np,
}


def table(first_column: str) -> list[list[str]]:
    """Return the cells, without their backquotes, of the table whose header begins so."""
    rows = PAGE.split(f"\n| {first_column} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.split("|")[1:-1]] for row in rows]


def wire(value: Value) -> bytes:
    if isinstance(value, Header):
        return encode_header(value)
    if isinstance(value, Sample):  # an array: the data of its ext type
        fields: dict[str, Any] = msgpack.unpackb(encode(value)[0])
        return bytes(fields["array"].data)
    if isinstance(value, Payload):
        return bytes(encode(value)[0])
    return bytes(msgpack.unpackb(encode(Sample(tree=Tree(value)))[0])["tree"].data)


@pytest.mark.parametrize(("text", "octets"), EXAMPLES, ids=[text for text, _ in EXAMPLES])
def test_the_examples_are_what_the_encoder_writes(text: str, octets: str) -> None:
    value = eval(text, dict(NAMES))  # noqa: S307  our own page
    assert wire(value).hex(" ") == octets


def test_the_examples_of_trees_decode_to_what_they_say() -> None:
    trees = [(text, octets) for text, octets in EXAMPLES if not text.startswith(("Head", "Heart"))]
    for text, octets in trees:
        value = eval(text, dict(NAMES))  # noqa: S307  our own page
        if isinstance(value, Payload):
            continue
        fields = {"tree": msgpack.ExtType(Ext.TREE, bytes.fromhex(octets))}
        tree = decode(Sample, [msgpack.packb(fields)]).tree
        assert tree is not None
        assert identical(tree.value, value)


def test_the_page_is_of_this_version() -> None:
    assert PAGE.startswith(f"# The wire protocol, version {PROTOCOL_VERSION}\n")


def test_the_kinds_are_all_there() -> None:
    assert [(name, int(number)) for name, number, _ in table("kind")] == [
        (kind.name, kind.value) for kind in Kind
    ]


def test_the_header_fields_are_all_there_in_their_order() -> None:
    rows = table("index | field")
    defaults = {field.name: field.default for field in msgspec.structs.fields(Header)}
    assert [row[1] for row in rows] == list(defaults)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    for _, name, _, default, _ in rows:
        documented = eval(default) if default else msgspec.NODEFAULT  # noqa: S307  our own page
        assert documented == defaults[name]


@pytest.mark.parametrize(
    "payload_type", [Hello, Welcome, Heartbeat, Goodbye, Shutdown, Failed], ids=lambda t: t.__name__
)
def test_the_fields_of_control_messages_are_all_there(payload_type: type[Payload]) -> None:
    (fields,) = [row[3] for row in table("type | kind") if row[0] == payload_type.__name__]
    names = re.findall(r"(\w+)` \w+", f"`{fields}")
    assert names == [field.name for field in msgspec.structs.fields(payload_type)]
    for name, default in re.findall(r"(\w+)` \w+ = ([^,]+)", fields):
        documented = eval(default)  # noqa: S307  our own page
        assert documented == {f.name: f.default for f in msgspec.structs.fields(payload_type)}[name]


def test_the_failure_codes_are_all_there() -> None:
    assert [row[0] for row in table("code")] == [code.value for code in FailureCode]


def test_the_ext_types_are_all_there() -> None:
    documented = {name: int(code) for name, code, _ in table("ext")}
    assert documented == {name: code for name, code in vars(Ext).items() if name.isupper()}


def test_the_limits_are_all_there() -> None:
    documented = {name: int(default) for name, default, _ in table("limit")}
    names = ["max_frames", "max_frame_bytes", "max_message_bytes", "max_depth"]
    expected = {name: getattr(limits, name.upper()) for name in names}
    assert documented == {"header": limits.MAX_HEADER_BYTES, **expected}
