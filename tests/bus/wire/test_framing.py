from __future__ import annotations

import ast
import itertools

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.transport.local_listener import INTRODUCTION
from envbus.bus.wire.codec import encode_header
from envbus.bus.wire.framing import (
    MAX_FRAMES_WITH_HEADER,
    StreamReader,
    TooLarge,
    begun_request,
    lengths_of,
    pack,
    pack_for_stream,
    unpack,
)
from envbus.bus.wire.messages import Header, Kind
from tests.sources import ROOT

PAGE = ROOT / "docs" / "wire-protocol.md"
messages = st.lists(st.binary(max_size=300), min_size=1, max_size=20)


def read(reader: StreamReader, data: bytes) -> list[list[bytes]]:
    return [[bytes(frame) for frame in message] for message in reader.feed(data)]


@given(messages)
@example([bytes(255), bytes(256), bytes(65535), bytes(65536)])
@example([b""] * 15)
@example([b""] * 16)
@example([b"x"] * MAX_FRAMES_WITH_HEADER)
def test_a_message_is_one_messagepack_array_of_bin(frames: list[bytes]) -> None:
    assert pack(frames) == msgpack.packb(frames, use_bin_type=True)
    assert unpack(pack(frames)) == frames


@pytest.mark.slow
@given(st.lists(messages, max_size=5), st.data())
def test_a_stream_may_be_cut_anywhere(sent: list[list[bytes]], data: st.DataObject) -> None:
    stream = b"".join(pack_for_stream(frames) for frames in sent)
    reader, came, at = StreamReader(10_000), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        came += read(reader, stream[at : at + step])
        at += step
    assert came == sent


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        frames = unpack(data)
    except DecodeError:
        return
    assert [bytes(frame) for frame in frames] == msgpack.unpackb(data, use_list=True)


@given(messages, st.data())
def test_a_message_that_was_cut_short_is_refused(frames: list[bytes], data: st.DataObject) -> None:
    packed = pack(frames)
    with pytest.raises(DecodeError):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (b"", "truncated"),
        (b"\x90", "1 to 1025 frames, not 0"),
        (b"\xdc\x00\x00", "1 to 1025 frames, not 0"),
        (b"\xdc\x04\x02", "1 to 1025 frames, not 1026"),
        (b"\xdd\xff\xff\xff\xff", "1 to 1025 frames, not 4294967295"),
        (b"\x91\xc6\xff\xff\xff\xff", "truncated"),
        (b"\x91\xa1a", "array of bin: Expected `bytes`, got `str`"),
        (b"\x81\xc4\x00\xc0", "a message is a MessagePack array"),
        (b"\x91\xc4\x00\x00", "trailing characters"),
    ],
)
def test_nothing_is_built_from_what_is_only_claimed(hostile: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        unpack(hostile)


def test_a_message_over_the_limit_is_refused_before_it_has_come() -> None:
    reader = StreamReader(100)
    assert list(reader.feed(b"\x00\x00")) == []
    with pytest.raises(DecodeError, match="101 bytes is announced; at most 100"):
        list(reader.feed(b"\x00\x65"))


@given(messages, messages, st.integers(1, 5000), st.data())
def test_what_is_over_the_limit_is_passed_over_wherever_the_stream_is_cut(
    before: list[bytes], behind: list[bytes], size: int, data: st.DataObject
) -> None:
    head = encode_header(Header(1, Kind.REQUEST, 7, "Big"))
    large = [head, bytes(6100 + size)]
    stream = b"".join(pack_for_stream(frames) for frames in (before, large, large, behind))
    told: list[TooLarge] = []
    reader, came = StreamReader(6100, told.append), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    for begin, end in itertools.pairwise([0, *cuts, len(stream)]):
        came += read(reader, stream[begin:end])
    assert came == [before, behind]
    assert told == [TooLarge(len(pack(large)), 7)] * 2


@pytest.mark.parametrize(
    "begun",
    [b"", b"\x92", b"\xdd\x00", b"\xa0", b"\x92\xc4\x02\xc1\xc1", b"\x92\xc6\x00\x01\x00\x00"],
)
def test_no_request_is_made_out_in_what_begins_none(begun: bytes) -> None:
    assert begun_request(begun) == 0


def test_messages_before_a_bad_one_are_returned() -> None:
    stream = StreamReader(100).feed(pack_for_stream([b"good"]) + b"\xff\xff\xff\xff")
    assert [bytes(frame) for frame in next(stream)] == [b"good"]
    with pytest.raises(DecodeError):
        next(stream)


@pytest.mark.parametrize("frames", [[], [b""] * (MAX_FRAMES_WITH_HEADER + 1)])
def test_what_no_reader_would_take_is_not_packed(frames: list[bytes]) -> None:
    with pytest.raises(EncodeError, match="1 to 1025 frames"):
        pack(frames)


def test_it_says_how_much_is_missing() -> None:
    packed = pack_for_stream([bytes(100)])
    reader = StreamReader(1000)
    assert [*reader.feed(packed[:2])] == []
    assert reader.missing == 2
    assert [*reader.feed(packed[2:20])] == []
    assert reader.missing == len(packed) - 20
    assert [*reader.feed(packed[20:] + packed)] == [[bytes(100)]] * 2
    assert reader.missing == 0


def test_the_bytes_of_each_frame_are_counted() -> None:
    assert lengths_of([b"ab", memoryview(bytes(6)).cast("H"), bytearray(3)]) == [2, 6, 3]


def test_the_examples_of_the_wire_protocol_are_what_goes_over_the_stream() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## 12. A stream on one host\n")[1]
    lines = section.split("```link\n")[1].split("\n```")[0].splitlines()
    assert len(lines) == 2
    for line in lines:
        frames, packet = line.split(" -> ")
        assert pack_for_stream(ast.literal_eval(frames)) == bytes.fromhex(packet)
    assert ast.literal_eval(lines[0].split(" -> ")[0]) == [INTRODUCTION, b"sim"]
