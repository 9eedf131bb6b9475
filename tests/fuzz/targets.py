"""What is fuzzed: each target takes any bytes and raises only for a bug of ours.

Used by `make fuzz` (coverage-guided), by the tests that replay the corpus, and by `seeds.py`.
Leaves out sockets: `tests/integration/bus/test_hostile_input.py` sends the same to live processes.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from envbus.actors.protocol import Build, CallResult, Step, StepResult
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import (
    BrokerConfig,
    Malformed,
    Received,
    Send,
    Tick,
    Unsendable,
)
from envbus.bus.errors import DecodeError, ProtocolError, VersionMismatchError
from envbus.bus.wire.codec import decode, decode_header, encode_header
from envbus.bus.wire.messages import Failed, FailureCode, Hello, Welcome

__all__ = ["TARGETS", "join_frames", "join_messages", "watch_for_unpickling"]

_LENGTH = struct.Struct("<H")
_PAYLOADS = (Hello, Welcome, Failed, Build, Step, StepResult, CallResult)
_PEERS = (b"a", b"b", b"c", b"d")
#: First bytes of an entry of the broker's target that are no message of a peer.
_TICK, _FULL = 0xFF, 0xFE

_unpickled: list[str] = []


def watch_for_unpickling() -> None:
    """Let targets raise if anything was unpickled; cannot be undone in this process."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
            _unpickled.append(f"{event} {arguments}")

    sys.addaudithook(hook)


def join_frames(frames: Sequence[Any]) -> bytes:
    """Return the input of the target `decode` that stands for these frames."""
    return b"".join(_LENGTH.pack(len(bytes(frame))) + bytes(frame) for frame in frames)


def join_messages(messages: Sequence[tuple[int, Sequence[Any]]]) -> bytes:
    """Return the input of the target `broker`: each message with the number of its sender."""
    parts = []
    for sender, frames in messages:
        body = join_frames(frames)
        parts.append(bytes([sender]) + _LENGTH.pack(len(body)) + body)
    return b"".join(parts)


def fuzz_decode(data: bytes) -> None:
    """One message to the codec: header and payload, read as each of several types."""
    _unpickled.clear()
    frames = _split(data)
    if frames:
        with contextlib.suppress(ProtocolError):
            header = decode_header(frames[0])
            assert decode_header(encode_header(header)) == header or header != header
    for payload_type in _PAYLOADS:
        with contextlib.suppress(DecodeError):
            decode(payload_type, frames[1:])
    assert not _unpickled, _unpickled


def fuzz_broker(data: bytes) -> None:
    """Messages of four peers, and the clock, to the broker's core; invariants after each."""
    core = BrokerCore(
        BrokerConfig(max_in_flight_per_peer=3, max_backlog=2, max_peers=3, embedded=False)
    )
    now = 0.0
    last: Send | None = None
    while data:
        sender, data = data[0], data[1:]
        if sender == _TICK:
            now += 0.5
            events: list[Any] = [Tick()]
        elif sender == _FULL:
            events = [] if last is None else [_unsendable(last)]
        else:
            size = _LENGTH.unpack_from(data)[0] if len(data) >= 2 else 0
            body, data = data[2 : 2 + size], data[2 + size :]
            events = [_event(_PEERS[sender % len(_PEERS)], _split(body))]
        for event in events:
            for effect in core.handle(event, now):
                if isinstance(effect, Send):
                    decode_header(encode_header(effect.header))  # it can be sent
                    last = effect if effect.wire_id else last
            core.check_invariants()
    core.handle(Tick(), sys.float_info.max)
    assert core.statistics().in_flight_now == core.statistics().backlog_now == 0


def _unsendable(send: Send) -> Unsendable:
    return Unsendable(send.peer, send.wire_id, FailureCode.OVERLOADED, "the queue is full")


def _event(peer: bytes, frames: list[bytes]) -> Received | Malformed:
    """What the broker's shell makes of a message."""
    try:
        header = decode_header(frames[0])
    except IndexError:
        return Malformed(peer, "a message without a header frame")
    except VersionMismatchError as exc:
        return Malformed(peer, str(exc), FailureCode.VERSION, exc.request_id)
    except ProtocolError as exc:
        return Malformed(peer, str(exc))
    return Received(peer, header, frames[1:])


def _split(data: bytes) -> list[bytes]:
    """Return frames; a length that is too large takes what there is."""
    frames = []
    while len(data) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        frames.append(data[_LENGTH.size : end])
        data = data[end:]
    return frames


TARGETS: dict[str, Callable[[bytes], None]] = {"decode": fuzz_decode, "broker": fuzz_broker}

# The structs' decoders are made on first use; a fuzzer must not take that for new paths.
for _payload in _PAYLOADS:
    with contextlib.suppress(DecodeError, msgspec.MsgspecError):
        decode(_payload, [b"\xc0"])
