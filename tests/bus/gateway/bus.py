"""A broker with a gateway, and clients of both framings, for tests."""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.loop import Broker, Outcome
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.transport.zmq_sockets import ZmqRouter
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.framing import StreamReader, pack, pack_for_stream, unpack
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    Header,
    Hello,
    Kind,
    Payload,
    Welcome,
)

#: Seconds; never expected to pass.
PATIENCE = 30.0


class Bus:
    """An embedded broker, as a driver polls it, and a gateway to it."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        local = ("127.0.0.1:0",)
        # Who has connected may wait for its turn in a test, which a busy machine makes long.
        least = {"tcp": local, "websocket": local, "handshake_timeout": PATIENCE}
        settings = {**least, **settings}
        endpoint = f"ipc://{tmp_path}/bus"
        self.broker = Broker(ZmqRouter([endpoint]), BrokerCore())
        self.gateway = Gateway(endpoint, GatewayConfig(**settings))
        self.broker.watch(self.gateway.fileno())
        self.outcomes: list[Outcome] = []

    def poll(self, timeout: float = 0.05) -> None:
        self.outcomes += self.broker.poll(timeout)
        self.gateway.check()

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
            self.poll()

    def of(self, kind: type[Any]) -> list[Any]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, kind)]

    def take(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Wait for so many outcomes of a kind, and forget all until now."""
        self.until(lambda: len(self.of(kind)) >= count, kind.__name__)
        found = self.of(kind)
        self.outcomes.clear()
        return found

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.gateway.close()
        self.broker.close()


class TcpClient:
    """Plain TCP."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket: socket.socket = socket.create_connection((host, int(port)), PATIENCE)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._reader = StreamReader(1 << 30)
        self._came: list[list[memoryview]] = []

    def send(self, *messages: Sequence[Any]) -> None:
        self.socket.sendall(b"".join(pack_for_stream(frames) for frames in messages))

    def receive(self) -> list[memoryview]:
        """Return the next message; EOFError after the last one."""
        while not self._came:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._came += self._reader.feed(data)
        return self._came.pop(0)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> TcpClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class WebSocketClient:
    """WebSocket."""

    def __init__(self, address: str, path: str = "/", **options: Any) -> None:
        scheme = "wss" if "ssl" in options else "ws"
        self._context = connect(
            f"{scheme}://{address}{path}",
            max_size=None,
            compression=None,
            proxy=None,
            open_timeout=PATIENCE,
            **options,
        )
        self.socket: ClientConnection = self._context.__enter__()

    def send(self, *messages: Sequence[Any]) -> None:
        for frames in messages:
            self.socket.send(pack(frames))

    def receive(self) -> list[memoryview]:
        data = self.socket.recv(PATIENCE)
        assert isinstance(data, bytes)
        return unpack(data)

    def close(self) -> None:
        self._context.__exit__(None, None, None)

    def __enter__(self) -> WebSocketClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_ids = itertools.count(1)


def message(payload: Payload, kind: Kind = Kind.REQUEST, **header: Any) -> list[Any]:
    fields = {"version": PROTOCOL_VERSION, "request_id": next(_ids), "ttl": PATIENCE, **header}
    head = Header(kind=kind, payload_type=type(payload).__name__, **fields)
    return [encode_header(head), *encode(payload)]


def hello(name: str, **fields: Any) -> list[Any]:
    return message(Hello(name=name, heartbeat=30.0, **fields))


def welcome(frames: Sequence[Any]) -> Welcome:
    assert decode_header(frames[0]).payload_type == "Welcome"
    return decode(Welcome, frames[1:])


def failure(frames: Sequence[Any]) -> Failed:
    assert decode_header(frames[0]).kind is Kind.FAILURE
    return decode(Failed, frames[1:])
