"""The control messages that the broker itself reads and writes.

Hello, Heartbeat and Failed come in; Welcome and Failed go out. They hold no arrays, so that
msgspec alone can read them and the pure core needs no codec. Any other payload stays opaque.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from envbus.bus.broker.events import Send
from envbus.bus.errors import DecodeError
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
)

__all__ = ["NOBODY", "answer", "encoded", "failure", "read"]

#: No peer or service has this name. A request to it asks whether the broker has come this far.
NOBODY = "\0"

#: Bytes of a hello or heartbeat: all the names that a broker takes are half of it. Strangers send
#: them, and a list of names takes 25 times its length in memory, and a second for 10 MB.
_MAX_BYTES = 1 << 17

_ENCODER = msgspec.msgpack.Encoder()
#: What is read here, what it is called in messages for people, and bytes that it has at most. The
#: text of a failure may be long, and is one string.
_READ: dict[type[Payload], tuple[msgspec.msgpack.Decoder[Any], str, float]] = {
    Hello: (msgspec.msgpack.Decoder(Hello), "hello", _MAX_BYTES),
    Heartbeat: (msgspec.msgpack.Decoder(Heartbeat), "heartbeat", _MAX_BYTES),
    Failed: (msgspec.msgpack.Decoder(Failed), "failure", math.inf),
}
P = TypeVar("P", bound=Payload)


def read(payload_type: type[P], frames: Frames) -> P:
    """Return the hello, heartbeat or failure that the frames hold.

    Raises:
        DecodeError: They hold none.
    """
    decoder, what, most = _READ[payload_type]
    try:
        if len(frames) != 1:
            raise ValueError(f"a control message has 1 frame behind its header, not {len(frames)}")
        if (size := memoryview(frames[0]).nbytes) > most:
            raise ValueError(f"it has {size} bytes, and at most {most} are allowed")
        payload: P = decoder.decode(frames[0])
    except Exception as error:  # whatever msgspec makes of somebody else's bytes
        raise DecodeError(f"the {what} is unreadable: {error}") from error
    return payload


def answer(peer: bytes, kind: Kind, request_id: int, payload: Payload) -> Send:
    """Return the effect that sends a control message to a peer."""
    header = Header(PROTOCOL_VERSION, kind, request_id, type(payload).__name__)
    return Send(peer, header, encoded(payload))


def encoded(payload: Payload) -> Frames:
    """Return the frames that hold a control message."""
    return [_ENCODER.encode(payload)]


def failure(peer: bytes, request_id: int, code: FailureCode, message: str) -> Send:
    """Return the effect that fails a peer's request; 0: no request in particular."""
    return answer(peer, Kind.FAILURE, request_id, Failed(code=code, message=message))
