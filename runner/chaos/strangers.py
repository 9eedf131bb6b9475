"""Uninvited callers at the bus' ROUTER socket: noise, broken messages, lies, floods."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import zmq

from envbus.actors.process.remote import REMOTE_SERVICE
from envbus.bus.wire.codec import encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Hello, Kind

__all__ = ["Strangers"]

#: Seconds for one connection or write.
_TIMEOUT = 0.5
#: Milliseconds that what was sent has to leave before the socket is closed.
_LINGER_MS = 200
#: Messages of a flood.
_FLOOD = 2000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


class Strangers:
    """Calls at an endpoint, each time in another bad manner.

    Args:
        endpoint: `"tcp://127.0.0.1:PORT"`.
        seed: Decides what is sent.
    """

    def __init__(self, endpoint: str, seed: int) -> None:
        self._endpoint = endpoint
        self._draw = random.Random(seed)  # noqa: S311 - not for secrets
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._manners: list[Callable[[], None]] = [
            self._noise,
            self._noise_after_greeting,
            self._random_frames,
            self._truncated_hello,
            self._wrong_version,
            self._stolen_replies,
            self._huge_header,
            self._false_actor,
            self._namesake,
            self._flood,
        ]

    def call(self, number: int) -> None:
        """Call once, in manner `number`; a connection that is refused is their loss."""
        try:
            self._manners[number % len(self._manners)]()
        except (OSError, zmq.ZMQError):
            return

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=_LINGER_MS)

    def _noise(self) -> None:
        self._raw(self._draw.randbytes(self._draw.randint(1, 20_000)))

    def _noise_after_greeting(self) -> None:
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        size = struct.pack(">Q", self._draw.getrandbits(62))
        self._raw(_GREETING + ready + b"\x02" + size + self._draw.randbytes(5000))

    def _random_frames(self) -> None:
        count = self._draw.randint(1, 6)
        self._send([[self._draw.randbytes(self._draw.randint(0, 3000)) for _ in range(count)]])

    def _truncated_hello(self) -> None:
        header, payload = self._hello()
        self._send(
            [
                [header[: self._draw.randrange(len(header))], payload],
                [header, payload[: self._draw.randrange(len(payload))]],
                [header],
                [],
            ]
        )

    def _wrong_version(self) -> None:
        _, payload = self._hello()
        header = Header(PROTOCOL_VERSION + self._draw.randint(1, 50), Kind.REQUEST, 1, "Hello")
        self._send([[encode_header(header), payload]])

    def _stolen_replies(self) -> None:
        """Answers to requests that others have in flight, from after a proper hello and before."""
        ids = range(1, 200)
        replies = [
            [encode_header(Header(PROTOCOL_VERSION, kind, request_id, "StepResult")), b"\x80"]
            for request_id in ids
            for kind in (Kind.REPLY, Kind.FAILURE)
        ]
        self._send([*replies, list(self._hello()), *replies])

    def _huge_header(self) -> None:
        self._send([[bytes(1 << 20), b""], [b"\x81" * 60_000, b"\xc1"]])

    def _false_actor(self) -> None:
        """Joins as an actor of another host would, and is never heard of again."""
        self._send([list(self._hello(services=[REMOTE_SERVICE], heartbeat=1.0))])

    def _namesake(self) -> None:
        """Says that it is an actor of the pool."""
        self._send([list(self._hello(name="actor-0"))], identity=b"actor-0")

    def _flood(self) -> None:
        message = list(self._hello())
        self._send([message] * _FLOOD)

    def _hello(
        self, name: str = "", services: list[str] | None = None, heartbeat: float = 0.0
    ) -> tuple[bytes, bytes]:
        hello = Hello(
            name=name or f"stranger-{self._draw.getrandbits(32):x}",
            services=services or [],
            heartbeat=heartbeat,
        )
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "Hello", 5.0)
        return encode_header(header), msgspec.msgpack.encode(hello)

    def _send(self, messages: list[list[bytes]], identity: bytes = b"") -> None:
        with self._context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, _LINGER_MS)
            peer.setsockopt(zmq.SNDHWM, len(messages) + 1)
            peer.setsockopt(zmq.ROUTING_ID, identity or b"s" + os.urandom(15))
            peer.connect(self._endpoint)
            for frames in messages:
                peer.send_multipart(frames or [b""], flags=zmq.NOBLOCK)

    def _raw(self, data: bytes) -> None:
        url = urlsplit(self._endpoint)
        address = (url.hostname or "", url.port or 0)
        with socket.create_connection(address, timeout=_TIMEOUT) as connection:
            connection.sendall(data)
