from __future__ import annotations

import pickle

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from envbus.bus.errors import DecodeError, EncodeError, VersionMismatchError
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind

headers = st.builds(
    Header,
    st.just(PROTOCOL_VERSION),
    st.sampled_from(Kind),
    st.integers(0, 2**63),
    st.text(st.characters(codec="utf-8"), max_size=40),
    ttl=st.floats(allow_nan=False, allow_infinity=False),
    incarnation=st.integers(0, 2**32),
    to=st.text(st.characters(codec="utf-8"), max_size=40),
)


@given(headers)
def test_a_header_comes_back(header: Header) -> None:
    assert decode_header(encode_header(header)) == header
    assert decode_header(memoryview(encode_header(header))) == header


@given(st.binary(max_size=40))
def test_random_bytes_are_a_decode_error(data: bytes) -> None:
    with pytest.raises((DecodeError, VersionMismatchError)):
        decode_header(data)


def test_fields_that_a_newer_peer_adds_are_ignored() -> None:
    data = msgpack.packb([PROTOCOL_VERSION, 0, 7, "Step", 1.0, 0, "", "new", [1]])
    assert decode_header(data) == Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "Step", 1.0)


def test_an_id_of_another_version_that_no_answer_can_carry_is_not_carried() -> None:
    with pytest.raises(VersionMismatchError) as caught:
        decode_header(msgpack.packb([9, 0, -7]))
    assert caught.value.request_id == 0


def test_fields_with_defaults_may_be_missing() -> None:
    data = msgpack.packb([PROTOCOL_VERSION, 1, 7, "StepResult"])
    assert decode_header(data) == Header(PROTOCOL_VERSION, Kind.REPLY, 7, "StepResult")


@pytest.mark.parametrize("rest", [[], ["Step"], [b"?", {}, 3], ["Step", "soon"]])
def test_another_version_is_named_however_its_header_goes_on(rest: list[object]) -> None:
    with pytest.raises(
        VersionMismatchError, match=f"version 9, this side version {PROTOCOL_VERSION}"
    ) as caught:
        decode_header(msgpack.packb([9, 0, 7, *rest]))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.version, copy.request_id, str(copy)) == (9, 7, str(caught.value))


@pytest.mark.parametrize(
    "fields",
    [
        [PROTOCOL_VERSION, 9, 7, "Step"],
        [PROTOCOL_VERSION, 0, -7, "Step"],
        [PROTOCOL_VERSION, 0, 7, "Step", float("nan")],
        [PROTOCOL_VERSION, 0, 7, "Step", float("inf")],
        [PROTOCOL_VERSION, 0, 7, "Step", 1.0, -1],
        [PROTOCOL_VERSION, 0, 7],
        [],
        7,
        None,
        [PROTOCOL_VERSION, 0, 7, "x" * 5000],
    ],
)
def test_a_header_that_makes_no_sense_is_refused(fields: object) -> None:
    with pytest.raises(DecodeError):
        decode_header(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("fields", "request_id"),
    [
        ([PROTOCOL_VERSION, Kind.REQUEST, 7, "Step", float("nan")], 7),
        ([PROTOCOL_VERSION, 7, 7, "Step"], 7),
        ([PROTOCOL_VERSION, Kind.REQUEST, 7], 7),
        ([PROTOCOL_VERSION, Kind.REQUEST, -7, "Step"], 0),
        ([PROTOCOL_VERSION, Kind.NOTICE, 7, "Step", float("nan")], 0),
        ([PROTOCOL_VERSION, Kind.FAILURE, 7], 0),
        ([PROTOCOL_VERSION, Kind.REQUEST, "7", "Step"], 0),
    ],
)
def test_a_refused_request_is_told_by_its_id_if_that_can_be_read(
    fields: list[object], request_id: int
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_header(msgpack.packb(fields))
    assert caught.value.request_id == request_id
    assert pickle.loads(pickle.dumps(caught.value)).request_id == request_id


@pytest.mark.parametrize("name", ["x" * 5000, "\ud800"])
def test_a_name_that_does_not_fit_is_refused_before_it_is_sent(name: str) -> None:
    with pytest.raises(EncodeError):
        encode_header(Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "Step", to=name))


def test_a_number_beyond_64_bit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(EncodeError):
        encode_header(Header(PROTOCOL_VERSION, Kind.REQUEST, 2**70, "Step"))
