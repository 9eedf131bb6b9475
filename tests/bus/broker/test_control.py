from __future__ import annotations

import contextlib
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given

from envbus.bus.broker.control import failure, read
from envbus.bus.errors import DecodeError
from envbus.bus.wire.messages import (
    Failed,
    FailureCode,
    Heartbeat,
    Hello,
    Kind,
    Payload,
)
from tests.bus.testing import (
    frames_of,
)


def test_what_the_core_writes_it_can_read() -> None:
    hello = Hello(name="a", services=["env"], capacity=3, pid=7, heartbeat=0.5)
    assert read(Hello, frames_of(hello)) == hello
    heartbeat = Heartbeat(identity=b"a")
    assert read(Heartbeat, frames_of(heartbeat)) == heartbeat
    send = failure(b"a", 7, FailureCode.NO_PEER, "nobody")
    assert (send.peer, send.header.request_id, send.header.kind) == (b"a", 7, Kind.FAILURE)
    assert read(Failed, send.frames) == Failed(code=FailureCode.NO_PEER, message="nobody")


@pytest.mark.parametrize("buffer", [bytearray, memoryview])
def test_any_buffer_is_read(buffer: type) -> None:
    assert read(Hello, [buffer(frames_of(Hello(name="a"))[0])]).name == "a"


@pytest.mark.parametrize("kind", [Hello, Heartbeat, Failed])
@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x90"], [b"\x80", b"\x80"]])
def test_junk_is_a_decode_error(kind: type[Payload], frames: list[bytes]) -> None:
    with pytest.raises(DecodeError, match="unreadable"):
        read(kind, frames)


def test_a_heartbeat_that_names_nobody_is_its_senders() -> None:
    assert read(Heartbeat, [b"\x80"]).identity == b""


def test_a_code_that_only_newer_peers_know_is_a_failure_of_the_other_side() -> None:
    (frame,) = frames_of(Failed(code=FailureCode.TIMEOUT, message="too late to tell"))
    known, unknown = b"\xa7timeout", b"\xa7sunspot"
    assert known in frame
    failed = read(Failed, [frame.replace(known, unknown)])
    assert (failed.code, failed.message) == (FailureCode.REMOTE, "too late to tell")


@pytest.mark.parametrize("kind", [Hello, Heartbeat, Failed])
@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1a"])
def test_nesting_without_end_is_a_decode_error(kind: type[Payload], opens: bytes) -> None:
    with pytest.raises(DecodeError):
        read(kind, [b"\x82\xa4name\xa1x\xa5extra" + opens * 100_000 + b"\xc0"])


@pytest.mark.parametrize("kind", [Hello, Failed])
def test_what_must_be_there_is_missed(kind: type[Payload]) -> None:
    with pytest.raises(DecodeError, match="unreadable"):
        read(kind, [b"\x80"])


@pytest.mark.parametrize("kind", [Hello, Heartbeat])
def test_one_of_megabytes_is_refused_and_nothing_is_made_of_it(kind: type[Payload]) -> None:
    (frame,) = frames_of(Hello(name="a", services=["ab"] * 1_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=f"{len(frame)} bytes"):
            read(kind, [frame])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_hello_of_all_the_names_that_are_taken_is_read() -> None:
    hello = Hello(name="\U0001f600" * 256, services=["\U0001f600" * 256] * 64)
    assert read(Hello, frames_of(hello)) == hello


@given(junk=st.binary(max_size=40))
def test_random_bytes_are_read_or_refused(junk: bytes) -> None:
    for kind in (Hello, Heartbeat, Failed):
        with contextlib.suppress(DecodeError):
            read(kind, [junk])
