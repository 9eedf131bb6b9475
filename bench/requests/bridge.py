"""Clients of policy servers: simulators that ask for actions, one at a time and many."""

from __future__ import annotations

import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from http.client import HTTPConnection
from typing import Any, Protocol

import msgspec
import zmq

from envbus.actors.external.protocol import BRIDGE, GetAction, JoinBridge, StartEpisode
from envbus.bench.requests.bridge_servers import observation_of
from envbus.bench.requests.cases import RequestCase
from envbus.bus.transport.local_listener import INTRODUCTION, address_of
from envbus.bus.wire.codec import decode_header, encode, encode_header
from envbus.bus.wire.framing import StreamReader, pack_for_stream
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Hello, Kind

__all__ = ["ASKS", "TURNS"]

#: Seconds that one answer may take.
TIMEOUT = 30.0
#: Seconds for which clients in threads go on before they are counted.
_TURN = 0.25
#: Asks for one action, and waits for it.
Ask = Callable[[], object]
#: Has requests of many answered, and returns how many.
Turn = Callable[[], int]
_DECODE = msgspec.msgpack.Decoder().decode


def ask_pyzmq(case: RequestCase, address: str) -> Ask:
    """A DEALER that sends ready-made bytes."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    frames = _get_action(case, "e" * 32, 1)

    def ask() -> object:
        socket.send_multipart(frames)
        return socket.recv_multipart()

    return ask


def ask_envbus(case: RequestCase, address: str, *, local_links: bool = True) -> Ask:
    """The client that simulators use."""
    from envbus.actors import ExternalEnvClient

    client = ExternalEnvClient(address, local_links=local_links)
    episode_id = client.start_episode()
    observation = observation_of(case)
    return lambda: client.get_action(episode_id, observation)


def ask_gateway(case: RequestCase, address: str) -> Ask:
    """A plain socket, or a WebSocket: messages made and read, and nothing else done."""
    from envbus.runner.conformance.address import Address
    from envbus.runner.conformance.talk import Talk, open_link

    talk = Talk(open_link(Address.parse(address)), TIMEOUT)
    talk.say_hello(f"bench-{secrets.token_hex(4)}", heartbeat=60.0)
    talk.ask(JoinBridge(client="bench"))
    episode_id = talk.ask(StartEpisode()).episode_id
    observation = observation_of(case)
    return lambda: talk.ask(GetAction(episode_id=episode_id, observation=observation)).action


def ask_http(case: RequestCase, address: str) -> Ask:
    """A POST of a pickle, as RLlib's PolicyClient sent it, over a connection that is kept."""
    connection = _UnixConnection(address)
    request = pickle.dumps({"command": "GET_ACTION", "observation": observation_of(case)})

    def ask() -> object:
        connection.request("POST", "/", request)
        answer = connection.getresponse().read()
        return pickle.loads(answer)  # noqa: S301 - the stand-in does as the original did

    return ask


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


def ask_grpc(case: RequestCase, address: str) -> Ask:
    """A unary call; gRPC keeps its connection."""
    import grpc

    act = grpc.insecure_channel(f"unix:{address}").unary_unary("/policy/Act")
    request = observation_of(case).tobytes()
    return lambda: act(request, timeout=TIMEOUT)


class BridgeAsker(Protocol):
    """One of many: sends messages that are ready-made, and tells what was answered."""

    def fileno(self) -> Any:
        """What a poller of its kind takes."""
        ...

    def send(self, frames: Sequence[bytes]) -> object:
        """Send a message."""
        ...

    def receive(self) -> Sequence[Any] | None:
        """Return the frames of the next message; None: there is none now."""
        ...


class DealerClient:
    """Over ZeroMQ, as clients that are no Python, or on other hosts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"bench.{secrets.token_hex(8)}".encode())
        self._socket.connect(address)

    def fileno(self) -> zmq.Socket[bytes]:
        return self._socket

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


class LocalLinkClient:
    """As envbus's Python clients of the same host: over the stream beside the address."""

    def __init__(self, address: str) -> None:
        where = address_of(address)
        if where is None:
            raise RuntimeError(f"there is no local link beside {address}")
        self._socket = socket.socket(socket.AF_UNIX)
        # The kernel's own: with Python's, reads would wait, too.
        limit = struct.pack("@ll", int(TIMEOUT), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket.connect(where)
        self._inbox: list[list[Any]] = []
        self._reader = StreamReader(1 << 30)
        self.send([INTRODUCTION, secrets.token_bytes(16).replace(b"\0", b"1")])

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.sendall(pack_for_stream(frames))

    def receive(self) -> list[Any] | None:
        if not self._inbox:
            try:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionError("the server is gone")
            self._inbox = list(self._reader.feed(data))[::-1]
        return self._inbox.pop() if self._inbox else None


def rate_zmq(case: RequestCase, address: str) -> Turn:
    """Many clients over ZeroMQ; bare pyzmq's are the same."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    clients = [DealerClient(context, address) for _ in range(case.num_clients)]
    for client in clients:
        poller.register(client.fileno(), zmq.POLLIN)
    by_socket: dict[Any, BridgeAsker] = {client.fileno(): client for client in clients}
    wait = partial(poller.poll, int(1e3 * TIMEOUT))
    return _many(case, by_socket, wait)


def rate_local_links(case: RequestCase, address: str) -> Turn:
    """Many clients on the same host, without ZeroMQ."""
    poller = select.epoll()
    clients = [LocalLinkClient(address) for _ in range(case.num_clients)]
    for client in clients:
        poller.register(client.fileno(), select.EPOLLIN)
    by_fd: dict[Any, BridgeAsker] = {client.fileno(): client for client in clients}
    return _many(case, by_fd, partial(poller.poll, TIMEOUT))


def _many(
    case: RequestCase,
    clients: Mapping[Any, BridgeAsker],
    wait: Callable[[], Iterable[tuple[Any, int]]],
) -> Turn:
    """Return what has as many requests answered as it can in its turn.

    Requests are ready-made, and of an answer only the header is read, so that the server is what
    is measured.
    """
    num_episodes = case.num_episodes
    requests: dict[int, list[bytes]] = {}
    for place, client in enumerate(clients.values()):
        hello = Hello(name=f"bench-{place}-{secrets.token_hex(4)}", services=[], heartbeat=60.0)
        _exchange(client, hello, 1, "")
        _exchange(client, JoinBridge(client="bench"), 2, BRIDGE)
        for number in range(place, num_episodes, len(clients)):
            name = f"episode-{secrets.token_hex(12)}"
            _exchange(client, StartEpisode(episode_id=name), 3 + number, BRIDGE)
            requests[number] = _get_action(case, name, 0)
    for place, client in enumerate(clients.values()):
        for number in range(place, num_episodes, len(clients)):
            _send(client, requests[number], num_episodes + 3 + number)

    def turn() -> int:
        answered = 0
        for found, _ in wait():
            client = clients[found]
            # All first: one whose answers come as fast as it asks must not keep the others waiting.
            for frames in list(iter(client.receive, None)):
                # A request's id is never used again: it would be answered from memory.
                request_id = _DECODE(frames[0])[2]
                number = (request_id - 3) % num_episodes
                _send(client, requests[number], request_id + num_episodes)
                answered += 1
        return answered

    return turn


def rate_threads(
    ask: Callable[[RequestCase, str], Ask],
) -> Callable[[RequestCase, str], Turn]:
    """Return the same for clients that block: a thread each, at rest between two turns."""

    def start(case: RequestCase, address: str) -> Turn:
        asks = [ask(case, address) for _ in range(case.num_clients)]  # a request of each at a time
        pool = futures.ThreadPoolExecutor(case.num_clients)

        def work(mine: Ask, end: float) -> int:
            count = 0
            while time.perf_counter() < end:
                mine()
                count += 1
            return count

        def turn() -> int:
            end = time.perf_counter() + _TURN
            return sum(pool.map(work, asks, [end] * case.num_clients))

        return turn

    return start


ASKS: dict[str, Callable[[RequestCase, str], Ask]] = {
    "pyzmq": ask_pyzmq,
    "pyzmq, Unix socket": ask_pyzmq,
    "envbus": ask_envbus,
    "envbus, ZeroMQ": partial(ask_envbus, local_links=False),
    "envbus, TCP": ask_gateway,
    "envbus, WebSocket": ask_gateway,
    "http, Unix socket": ask_http,
    "grpc, Unix socket": ask_grpc,
}
TURNS: dict[str, Callable[[RequestCase, str], Turn]] = {
    "pyzmq": rate_zmq,
    "pyzmq, Unix socket": rate_zmq,
    "envbus": rate_local_links,
    "envbus, ZeroMQ": rate_zmq,
    "http, Unix socket": rate_threads(ask_http),
    "grpc, Unix socket": rate_threads(ask_grpc),
}


def _get_action(case: RequestCase, episode_id: str, request_id: int) -> list[bytes]:
    """Return the frames of a request, as the Python client sends them."""
    from envbus.actors.external.elements import to_wire

    request = GetAction(episode_id=episode_id, observation=to_wire(observation_of(case)))
    return [_header("GetAction", request_id), *map(bytes, encode(request))]


def _header(payload_type: str, request_id: int, to: str = BRIDGE) -> bytes:
    return encode_header(
        Header(PROTOCOL_VERSION, Kind.REQUEST, request_id, payload_type, TIMEOUT, 0, to)
    )


def _send(client: BridgeAsker, frames: list[bytes], request_id: int) -> None:
    client.send([_header("GetAction", request_id), *frames[1:]])


def _exchange(client: BridgeAsker, payload: Any, request_id: int, to: str) -> None:
    client.send([_header(type(payload).__name__, request_id, to), *encode(payload)])
    deadline = time.monotonic() + TIMEOUT
    while (frames := client.receive()) is None or decode_header(frames[0]).request_id != request_id:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{type(payload).__name__} was not answered")
        if frames is None:
            time.sleep(1e-4)
    if decode_header(frames[0]).kind is Kind.FAILURE:
        raise RuntimeError(f"{type(payload).__name__}: {bytes(frames[1])!r}")
