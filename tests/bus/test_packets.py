"""Frames in one piece, and out of a stream that is cut anywhere."""

from __future__ import annotations

import ast
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.errors import DecodeError
from envbus.bus.lane_listener import INTRODUCTION
from envbus.bus.limits import MAX_FRAMES
from envbus.bus.packets import Assembler, lengths_of, pack, table_of
from tests.sources import ROOT

PAGE = ROOT / "docs" / "wire-protocol.md"
MESSAGES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=12), max_size=6)


def plain(messages: list[list[Any]]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in frames] for frames in messages]


def test_a_packet_is_a_table_and_the_frames() -> None:
    assert pack([b"ab", b"", b"c"]) == struct.pack("<4I", 3, 2, 0, 1) + b"abc"
    assert lengths_of([b"ab", memoryview(bytes(6)).cast("H"), bytearray(3)]) == [2, 6, 3]


@given(MESSAGES, st.data())
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    stream = b"".join(map(pack, messages))
    assembler, came = Assembler(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        came += assembler.take(stream[:size])
        stream = stream[size:]
    assert plain(came) == messages
    assert assembler.missing == 0


def test_it_says_how_much_is_missing() -> None:
    packet = pack([bytes(100)])
    assembler = Assembler()
    assert assembler.take(packet[:2]) == []
    assert assembler.missing == 2
    assert assembler.take(packet[2:20]) == []
    assert assembler.missing == len(packet) - 20
    assert plain(assembler.take(packet[20:] + packet)) == [[bytes(100)]] * 2


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 2, 2**32 - 1])
def test_a_message_of_no_or_too_many_frames_is_none(count: int) -> None:
    with pytest.raises(DecodeError, match=str(count)):
        Assembler().take(struct.pack("<I", count))
    with pytest.raises(DecodeError):
        table_of(count)


def test_a_large_packet_is_refused_by_its_table() -> None:
    assembler = Assembler(max_packet_bytes=100)
    assert plain(assembler.take(pack([bytes(92)]))) == [[bytes(92)]]
    with pytest.raises(DecodeError, match="larger than 100"):
        assembler.take(struct.pack("<2I", 1, 93))


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8))
def test_nonsense_is_refused_or_waited_for_and_nothing_else(chunks: list[bytes]) -> None:
    assembler = Assembler(max_packet_bytes=1000)
    try:
        for chunk in chunks:
            assembler.take(chunk)
            assert 0 <= assembler.missing <= 5000
    except DecodeError:
        pass


def test_the_examples_of_the_wire_protocol_are_what_goes_over_the_stream() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## 12. A stream on one host\n")[1]
    lines = section.split("```lane\n")[1].split("\n```")[0].splitlines()
    assert len(lines) == 2
    for line in lines:
        frames, packet = line.split(" -> ")
        assert pack(ast.literal_eval(frames)) == bytes.fromhex(packet)
    assert ast.literal_eval(lines[0].split(" -> ")[0]) == [INTRODUCTION, b"sim"]
