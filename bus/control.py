"""The control messages that the broker itself reads and writes.

Hello, Heartbeat and Failed come in; Welcome and Failed go out. They hold no arrays, so that
msgspec alone can read them and the pure core needs no codec. Any other payload stays opaque.
"""

from __future__ import annotations

import msgspec

from envbus.bus.broker_vocabulary import Send
from envbus.bus.errors import DecodeError
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
)
from envbus.bus.transport import Buffer, Frames

__all__ = ["NOBODY", "answer", "failure", "read_failed", "read_heartbeat", "read_hello"]

#: No peer or service has this name. A request to it asks whether the broker has come this far.
NOBODY = "\0"

_ENCODER = msgspec.msgpack.Encoder()
_HELLO = msgspec.msgpack.Decoder(Hello)
_HEARTBEAT = msgspec.msgpack.Decoder(Heartbeat)
_FAILED = msgspec.msgpack.Decoder(Failed)


def read_hello(frames: Frames) -> Hello:
    """Return the hello.

    Raises:
        DecodeError: The frames hold none.
    """
    try:
        hello: Hello = _HELLO.decode(_only(frames))
    except Exception as error:  # whatever msgspec makes of somebody else's bytes
        raise DecodeError(f"the hello is unreadable: {error}") from error
    return hello


def read_heartbeat(frames: Frames) -> Heartbeat:
    """Return the heartbeat.

    Raises:
        DecodeError: The frames hold none.
    """
    try:
        heartbeat: Heartbeat = _HEARTBEAT.decode(_only(frames))
    except Exception as error:  # whatever msgspec makes of somebody else's bytes
        raise DecodeError(f"the heartbeat is unreadable: {error}") from error
    return heartbeat


def read_failed(frames: Frames) -> Failed:
    """Return the failure.

    Raises:
        DecodeError: The frames hold none.
    """
    try:
        failed: Failed = _FAILED.decode(_only(frames))
    except Exception as error:  # whatever msgspec makes of somebody else's bytes
        raise DecodeError(f"the failure is unreadable: {error}") from error
    return failed


def answer(peer: bytes, kind: Kind, request_id: int, payload: Payload) -> Send:
    """Return the effect that sends a control message to a peer."""
    header = Header(PROTOCOL_VERSION, kind, request_id, type(payload).__name__)
    return Send(peer, header, [_ENCODER.encode(payload)])


def failure(peer: bytes, request_id: int, code: FailureCode, message: str) -> Send:
    """Return the effect that fails a peer's request; 0: no request in particular."""
    return answer(peer, Kind.FAILURE, request_id, Failed(code=code, message=message))


def _only(frames: Frames) -> Buffer:
    if len(frames) != 1:
        raise ValueError(f"a control message has 1 frame behind its header, not {len(frames)}")
    return frames[0]
