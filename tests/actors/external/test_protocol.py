"""The page about the wire protocol, section 10, against the messages that it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from envbus.actors.external import errors, protocol
from envbus.actors.external.errors import RefusedError, refusal_of
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Failed, FailureCode, Payload, Request

PAGE = (Path(__file__).parents[3] / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## 10.")[1].split("\n## ")[0]
EXAMPLES = [
    line.split(" -> ")
    for line in re.findall(r"```bridge\n(.*?)```", SECTION, re.DOTALL)[0].splitlines()
]
NAMES = {name: getattr(protocol, name) for name in protocol.__all__} | {"np": np}


def table(first_column: str) -> list[list[str]]:
    rows = SECTION.split(f"\n| {first_column} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def check_fields(name: str, text: str) -> None:
    payload: Any = Payload.registry[name]
    documented = re.findall(r"`(\w+)` [a-z ]+?(?: = ([^,]+))?(?=,|$)", text)
    fields = {field.name: field.default for field in msgspec.structs.fields(payload)}
    assert [field for field, _ in documented] == list(fields)
    for field, default in documented:
        expected = eval(default) if default else msgspec.NODEFAULT  # noqa: S307  our own page
        assert fields[field] == expected, f"{name}.{field}"


@pytest.mark.parametrize("row", table("request"), ids=lambda row: row[0])
def test_the_fields_of_requests_and_replies_are_all_there(row: list[str]) -> None:
    request, fields, reply, reply_fields = row
    check_fields(request, fields)
    check_fields(reply, reply_fields)
    payload: Any = Payload.registry[request]
    assert payload.reply_type.__name__ == reply


def test_each_request_is_on_the_page() -> None:
    requests = {
        name for name, kind in NAMES.items() if isinstance(kind, type) and issubclass(kind, Request)
    }
    assert requests == {row[0] for row in table("request")}


@pytest.mark.parametrize(("text", "octets"), EXAMPLES, ids=[text for text, _ in EXAMPLES])
def test_the_examples_are_what_the_encoder_writes(text: str, octets: str) -> None:
    payload = eval(text, dict(NAMES))  # noqa: S307  our own page
    (frame,) = encode(payload)
    assert bytes(frame).hex(" ") == octets
    again = decode(type(payload), [frame])
    np.testing.assert_equal(msgspec.structs.asdict(again), msgspec.structs.asdict(payload))


def test_the_refusals_are_all_there_and_come_back_as_what_they_were() -> None:
    kinds: dict[str, type[RefusedError]] = {
        kind.wire_name: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, RefusedError) and kind is not RefusedError
    }
    assert {row[0].strip("`") for row in table("remote_type")} == set(kinds)
    for kind in kinds.values():
        came = refusal_of(kind("why").failed())
        assert type(came) is kind
        assert str(came) == "why"
    assert refusal_of(Failed(code=FailureCode.REMOTE, message="", remote_type="builtins.X")) is None
    assert refusal_of(Failed(code=FailureCode.TIMEOUT, message="")) is None
