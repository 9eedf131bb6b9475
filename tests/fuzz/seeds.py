"""Messages to begin with: every kind of valid one, and every kind of attack we know."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from envbus.actors.protocol import CallResult, Step, StepResult
from envbus.bus.wire.codec import encode, encode_header
from envbus.bus.wire.ext import Ext
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
    Tree,
)
from tests.fuzz.targets import join_frames, join_messages

__all__ = ["Canary", "bombs", "messages", "seeds"]


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def message(kind: Kind, payload: Payload, request_id: int = 1, **header: Any) -> list[bytes]:
    """Return a whole message, without the routing id."""
    version = header.pop("version", PROTOCOL_VERSION)
    head = Header(version, kind, request_id, type(payload).__name__, **header)
    return [encode_header(head), *map(bytes, encode(payload))]


def bombs(canary: Path | str) -> list[bytes]:
    """Return payloads that claim too much, nest too deep, or bring a pickle.

    Args:
        canary: What is made should the pickle be read.
    """
    passed = pickle.dumps(Canary(canary), protocol=4)
    pickled = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": passed}
    array = msgpack.packb(["|O", [1], "C", passed])
    trees = [
        msgpack.packb(pickled),
        msgpack.packb({**pickled, b"nd": False}),
        msgpack.packb({**pickled, b"kind": b"", b"type": [["f", "|O"]]}),
        msgpack.packb(msgpack.ExtType(Ext.NUMPY, msgpack.packb(pickled))),
        msgpack.packb(msgpack.ExtType(Ext.OBJECT, passed)),
        msgpack.packb(msgpack.ExtType(Ext.ARRAY, array)),
        b"\x91" * 500 + b"\xc0",
        b"\x81\x00" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff" * 20,
        b"\xdf\x7f\xff\xff\xff\xc0",
        b"\xc6\xff\xff\xff\xff\x00",
        b"\xc9\xff\xff\xff\xff\x03",
        msgpack.packb(msgpack.ExtType(Ext.ARRAY, msgpack.packb(["<f8", [1 << 40], "C", b""]))),
        msgpack.packb(msgpack.ExtType(Ext.ARRAY, msgpack.packb(["|V0", [1 << 62] * 3, "C", b""]))),
    ]
    deep = b"\xc0"
    for code in (Ext.TREE, Ext.ARRAY, Ext.NUMPY) * 20:
        deep = struct.pack(">BIb", 0xC9, len(deep), code) + deep
    payloads = [*trees, deep]
    for tree in (*trees, deep):
        extension = msgpack.ExtType(Ext.TREE, tree)
        payloads.append(msgpack.packb({"values": extension, "infos": extension}))
    payloads.append(msgpack.packb({"rewards": msgpack.ExtType(Ext.ARRAY, array)}))
    return payloads


def messages(canary: Path | str = "unpickled") -> list[list[bytes]]:
    """Return whole messages: a session's, broken ones, and bombs under each kind."""
    values = {"a": [1, 2.5, None, "x", b"y", (1, 2)], 3: np.float32(1), "b": {"c": 2**70}}
    valid = [
        message(Kind.REQUEST, Hello(name="n", services=["env"], heartbeat=1.0), ttl=1.0),
        message(Kind.REQUEST, Hello(name="m", services=["n"], capacity=3), ttl=1.0, incarnation=2),
        message(Kind.REQUEST, Hello(name="old"), version=99),
        message(Kind.NOTICE, Heartbeat(identity=b"a"), 0),
        message(Kind.NOTICE, Goodbye(), 0),
        message(Kind.REQUEST, Step(), 7, ttl=0.5, to="env"),
        message(Kind.REQUEST, Step(), 7, ttl=float("inf"), to="nobody"),
        message(Kind.REPLY, CallResult(values=Tree(values)), 1),
        message(Kind.REPLY, StepResult(rewards=np.ones(3), terminations=np.zeros(3, bool)), 1),
        message(Kind.FAILURE, Failed(code=FailureCode.REMOTE, message="boom"), 1),
    ]
    broken = [[frames[0][: len(frames[0]) // 2], *frames[1:]] for frames in valid]
    extra = [[*frames, b"", b"more"] for frames in valid[:3]]
    heads = [
        encode_header(Header(PROTOCOL_VERSION, kind, 1, name, 1.0, 0, to))
        for kind, name, to in (
            (Kind.REQUEST, "Hello", ""),
            (Kind.REQUEST, "Step", "n"),
            (Kind.REPLY, "CallResult", ""),
            (Kind.NOTICE, "Heartbeat", ""),
            (Kind.FAILURE, "Failed", ""),
        )
    ]
    loaded = [[head, bomb] for head in heads for bomb in bombs(canary)]
    return [[], [b""], *valid, *broken, *extra, *loaded]


def seeds(target: str) -> list[bytes]:
    """Return the inputs of a target that are worth to begin with."""
    known = messages()
    if target == "decode":
        return [join_frames(frames) for frames in known]
    hello, worker, step, reply = known[2], known[3], known[7], known[9]
    session = [(0, hello), (1, worker), (1, step), (0, reply)]
    return [
        join_messages(session) + b"\xff\xff\xfe",
        *(join_messages([*session, (2, frames), (0, frames)]) for frames in known[:40]),
    ]
