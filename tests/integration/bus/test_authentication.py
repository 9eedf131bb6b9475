"""Brokers with keys: who comes in, who is kept out, and what each side is told."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from gymnasium import spaces

from envbus.actors import ClientTimeouts, ExternalEnvClient
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import PeerReady
from envbus.bus.broker.loop import Broker
from envbus.bus.errors import (
    ConfigError,
    EnvbusError,
    NoPeerError,
    ProtocolError,
    RequestTimeoutError,
)
from envbus.bus.peer.client import Client
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.authentication import enable_curve
from envbus.bus.transport.curve_keys import BrokerKeys, PeerKeys, load_keys, new_keys
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.bus.wire.messages import Hello
from envbus.runner import ExternalEnvBridge
from tests.integration.bus_programs import (
    Name,
    Named,
    RunningBroker,
    hello_frames,
    kept_endpoint,
)
from tests.integration.group_children import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(120)

#: Seconds that somebody who is kept out tries.
SHORT = 0.6


class KeyRing(NamedTuple):
    """Files of keys; `clients` holds the public keys that are allowed."""

    clients: Path
    server: Path
    server_secret: Path
    #: Its public key is allowed.
    client_secret: Path
    stranger: Path
    stranger_secret: Path

    def broker(self, allow: Path | Callable[[str], bool] | None = None) -> BrokerKeys:
        keys = BrokerKeys.load(self.server_secret, allow or self.clients)
        assert keys is not None
        return keys

    def peer(self) -> PeerKeys:
        keys = PeerKeys.load(self.client_secret, self.server)
        assert keys is not None
        return keys


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    clients = tmp_path / "clients"
    _, client_secret = new_keys(clients, "client")
    return KeyRing(
        clients,
        *new_keys(tmp_path, "server"),
        client_secret,
        *new_keys(tmp_path, "stranger"),
    )


def stolen(ring: KeyRing, folder: Path) -> Path:
    """Return a file with the allowed client's public key and another secret."""
    mine, theirs = load_keys(ring.stranger_secret), load_keys(ring.client_secret)
    text = ring.stranger_secret.read_text().replace(mine.public.decode(), theirs.public.decode())
    forged = folder / "forged.key_secret"
    forged.touch(0o600)
    forged.write_text(text)
    assert load_keys(forged).public == theirs.public
    return forged


def told_in_vain(endpoint: str, expected: str, **settings: Any) -> str:
    """Return what a client is told that is kept out; it tries longer where the machine is busy."""
    for timeout in (SHORT, 5 * SHORT, PATIENCE):
        with pytest.raises(RequestTimeoutError) as caught:
            Client(endpoint, timeout=timeout, **settings)
        if expected in str(caught.value):
            break
    return str(caught.value)


@contextlib.contextmanager
def answering(broker: RunningBroker, keys: PeerKeys) -> Iterator[None]:
    """A worker with keys, in a thread."""
    served = Worker(
        ZmqPeer(broker.endpoint, b"worker", keys=keys),
        Hello(name="worker", services=["names"]),
        {Name: lambda request: Named(name="worker", number=request.number)},
    )
    served.join(PATIENCE)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        yield
    finally:
        served.stop()
        thread.join(PATIENCE)


def test_who_is_allowed_joins_and_the_broker_knows_their_key(ring: KeyRing) -> None:
    router = ZmqRouter(["tcp://127.0.0.1:*"], keys=ring.broker())
    broker = Broker(router, BrokerCore())
    with contextlib.closing(broker):
        with contextlib.closing(ZmqPeer(router.endpoints[0], b"p", keys=ring.peer())) as peer:
            peer.send(hello_frames("p"))
            outcomes: list[Any] = []
            while not outcomes:
                outcomes = broker.poll(PATIENCE)
            assert peer.receive(PATIENCE) is not None
            assert peer.lost_for() == 0.0
            assert peer.trouble() == ""
        assert isinstance(outcomes[0], PeerReady)
        assert outcomes[0].user.encode() == load_keys(ring.client_secret).public
        assert broker.statistics().refused_connections == 0


INTRUDERS = {
    "unknown key": ("stranger_secret", "server", "does not allow this peer's public key"),
    "wrong server key": ("client_secret", "stranger", "probably server_key is not the broker's"),
    "stolen public key": ("forged", "server", "does not belong to its public one"),
    "no key": (None, None, "takes peers with keys only"),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("case", INTRUDERS)
def test_who_is_not_is_kept_out_counted_and_told_and_nobody_else_notices(
    case: str, ring: KeyRing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret, server, told = INTRUDERS[case]
    forged = stolen(ring, tmp_path)
    keys = forged if case == "stolen public key" else secret and getattr(ring, secret)
    with (
        caplog.at_level(logging.DEBUG),
        RunningBroker(keys=ring.broker()) as broker,
        Client(broker.endpoint, keys=ring.client_secret, server_key=ring.server) as client,
        answering(broker, ring.peer()),
    ):
        server_key = server and getattr(ring, server)
        found = told_in_vain(broker.endpoint, told, keys=keys, server_key=server_key)
        assert "authentication" in found
        assert told in found
        assert client.ask("names", Name(number=3), timeout=PATIENCE).result(PATIENCE).number == 3
        statistics = broker.statistics()
    assert statistics.refused_connections > 0
    assert statistics.malformed == statistics.stranger_frames == 0
    warnings = [r for r in caplog.records if r.name == "envbus.bus.transport.authentication"]
    texts = [r.getMessage() for r in warnings if r.levelno >= logging.WARNING]
    assert texts
    assert len({text.partition(" (")[0] for text in texts}) == len(texts), "each is told once"
    for file in (forged, ring.client_secret, ring.server_secret, ring.stranger_secret):
        assert load_keys(file).secret.decode() not in caplog.text


def test_a_worker_is_told_too(ring: KeyRing) -> None:
    with RunningBroker(keys=ring.broker()) as broker:
        peer = ZmqPeer(broker.endpoint, b"p")
        with contextlib.closing(peer):
            wait_until(lambda: peer.lost_for() and peer.trouble(), "it is turned away")
            with pytest.raises(RequestTimeoutError, match="authentication"):
                Worker(peer, Hello(name="p"), {}).join(SHORT)


def test_keys_for_a_broker_that_has_none_are_told(ring: KeyRing) -> None:
    keys: dict[str, Any] = {"keys": ring.client_secret, "server_key": ring.server}
    with RunningBroker() as broker:
        found = told_in_vain(broker.endpoint, "the broker has no keys", **keys)
    assert re.search("authentication failed: .*the broker has no keys", found)


def test_a_broker_that_ends_within_the_handshake_need_not_have_keys() -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)

    def hang_up() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):  # the client has closed it first
                connection.sendall(greeting)
                connection.recv(64)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=hang_up)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        found = told_in_vain(endpoint, "the handshake off")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    assert re.search("the handshake off; .*or was ending", found)


def test_who_is_allowed_while_they_try_comes_in(ring: KeyRing) -> None:
    refused = threading.Event()

    def allow(key: str) -> bool:
        asked_before = refused.is_set()
        refused.set()
        return asked_before

    with (
        RunningBroker(keys=ring.broker(allow)) as broker,
        Client(broker.endpoint, keys=ring.client_secret, server_key=ring.server) as client,
    ):
        assert broker.statistics().refused_connections == 1
        refused.clear()
        with answering(broker, ring.peer()):
            assert broker.statistics().refused_connections == 2
            assert client.ask("names", Name(), timeout=PATIENCE).result(PATIENCE).name == "worker"


class TextlessError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text either")


@pytest.mark.parametrize("answer", ["raises", "raises what has no text", "exits", "a coroutine"])
def test_a_function_that_cannot_tell_lets_nobody_in(
    answer: str, ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    def allow(key: str) -> bool:
        if answer == "raises":
            raise LookupError("the database is away")
        if answer == "raises what has no text":
            raise TextlessError
        if answer == "exits":
            raise SystemExit("the database is away")
        return "true"  # type: ignore[return-value]  # as truthy as the coroutine of `async def`

    keys: dict[str, Any] = {"keys": ring.client_secret, "server_key": ring.server}
    with RunningBroker(keys=ring.broker(allow)) as broker:
        assert "authentication" in told_in_vain(broker.endpoint, "authentication", **keys)
    texts = [
        r.getMessage() for r in caplog.records if r.name == "envbus.bus.transport.authentication"
    ]
    assert sum("could not be found out" in text for text in texts) == 1
    # Where the machine is busy, its time may have been over within a handshake.
    assert all("could not be found out" in text or "broke off" in text for text in texts)


def test_without_somebody_who_decides_the_door_is_shut(ring: KeyRing) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    enable_curve(router, ring.broker())
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with contextlib.closing(ZmqPeer(f"tcp://127.0.0.1:{port}", b"p", keys=ring.peer())) as peer:
        peer.send(hello_frames("p"))
        assert router.poll(1000 * SHORT) == 0
    router.close(0)
    context.term()


def only_own_comes_in(router: ZmqRouter) -> None:
    assert router.wait(PATIENCE)
    message = router.receive()
    assert message is not None
    assert message[0] == b"own"
    assert router.user_of(message[1]) == ""
    assert not router.wait(SHORT)


def test_private_endpoints_need_no_key_and_others_do(ring: KeyRing, tmp_path: Path) -> None:
    router = ZmqRouter(
        ["tcp://127.0.0.1:*"], private=[f"ipc://{tmp_path}/private"], keys=ring.broker()
    )
    private, public = router.endpoints
    with contextlib.closing(router):
        own, other = ZmqPeer(private, b"own"), ZmqPeer(public, b"other")
        with contextlib.closing(own), contextlib.closing(other):
            for peer in (own, other):
                peer.send([b"hi"])
            only_own_comes_in(router)
    with pytest.raises(ConfigError, match="would let other hosts join"):
        ZmqRouter([], private=["tcp://0.0.0.0:*"], keys=ring.broker())


def test_a_peer_that_is_turned_away_may_send_and_no_queue_is_called_full(ring: KeyRing) -> None:
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(
            contextlib.closing(ZmqRouter(["tcp://127.0.0.1:*"], keys=ring.broker()))
        )
        (public,) = router.endpoints
        peer = stack.enter_context(contextlib.closing(ZmqPeer(public, b"no keys")))
        turned_away = 0
        while turned_away < 100:  # long enough for it to connect again, too
            peer.send([b"header", b"payload"])
            peer.receive(0.005)  # libzmq takes the queue away a moment after it tells
            turned_away += bool(peer.trouble())
        assert "keys" in peer.trouble()
        assert not router.wait(0.0)


def test_a_private_endpoint_that_is_bound_later_opens_no_other_door(
    ring: KeyRing, tmp_path: Path
) -> None:
    private = f"ipc://{tmp_path}/private"
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(
            contextlib.closing(ZmqRouter(["tcp://127.0.0.1:*"], keys=ring.broker()))
        )
        (public,) = router.endpoints
        early = stack.enter_context(contextlib.closing(ZmqPeer(public, b"early")))
        early.send([b"hi"])
        router.bind_private(private)
        assert router.endpoints == (public,)
        late = stack.enter_context(contextlib.closing(ZmqPeer(public, b"late")))
        own = stack.enter_context(contextlib.closing(ZmqPeer(private, b"own")))
        keeper = stack.enter_context(
            contextlib.closing(ZmqPeer(public, b"keeper", keys=ring.peer()))
        )
        for peer in (late, own, keeper):
            peer.send([b"hi"])
        users = {}
        while len(users) < 2:
            assert router.wait(PATIENCE)
            message = router.receive()
            assert message is not None
            users[message[0]] = router.user_of(message[1])
        assert users == {b"own": "", b"keeper": load_keys(ring.client_secret).public.decode()}
        assert not router.wait(SHORT)
        with pytest.raises(ConfigError, match="would let other hosts join"):
            router.bind_private("tcp://0.0.0.0:*")


def test_the_owners_own_processes_have_keys_that_nobody_else_has(ring: KeyRing) -> None:
    with contextlib.ExitStack() as stack:
        router, former = [
            stack.enter_context(
                contextlib.closing(ZmqRouter(["tcp://127.0.0.1:*"], keys=ring.broker()))
            )
            for _ in range(2)
        ]
        assert router.own_tcp is not None
        assert former.own_tcp is not None
        endpoint, keys = router.own_tcp
        assert former.own_tcp.keys != keys
        for name, shown in (b"own", keys), (b"former", former.own_tcp.keys), (b"none", None):
            peer = ZmqPeer(endpoint, name, keys=shown)
            stack.enter_context(contextlib.closing(peer)).send([b"hi"])
        only_own_comes_in(router)


def test_a_router_with_keys_that_is_dropped_is_closed(ring: KeyRing) -> None:
    router = ZmqRouter(["tcp://127.0.0.1:*"], keys=ring.broker())
    dropped, port = weakref.ref(router), int(router.endpoints[0].rpartition(":")[2])
    del router
    gc.collect()
    assert dropped() is None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()


def test_a_bridge_with_keys_lets_its_own_processes_in_without_one(ring: KeyRing) -> None:
    space = spaces.Discrete(3)
    with ExternalEnvBridge(space, space, keys=ring.server_secret, allow=ring.clients) as bridge:
        joined = threading.Event()
        refused: list[BaseException] = []

        def join(endpoint: str) -> None:
            with ExternalEnvClient(endpoint) as client:
                assert client.observation_space == space
                joined.set()

        def join_without_key() -> None:
            try:
                ExternalEnvClient(bridge.address, timeouts=ClientTimeouts(connect=SHORT)).close()
            except BaseException as error:
                refused.append(error)

        for target, arguments in ((join, (bridge.private_endpoint,)), (join_without_key, ())):
            thread = threading.Thread(target=target, args=arguments)
            thread.start()
            while thread.is_alive():
                bridge.poll(0.02)
        assert joined.is_set()
        assert len(refused) == 1
        assert isinstance(refused[0], EnvbusError)
        assert bridge.statistics().clients_now <= 1


def test_with_keys_a_wide_bind_is_made(ring: KeyRing) -> None:
    with contextlib.closing(ZmqRouter(["tcp://0.0.0.0:*"], keys=ring.broker())) as router:
        port = router.endpoints[0].rpartition(":")[2]
        endpoint = f"tcp://127.0.0.1:{port}"
        with contextlib.closing(ZmqPeer(endpoint, b"p", keys=ring.peer())) as peer:
            peer.send([b"hi"])
            assert router.wait(PATIENCE)


def test_one_key_cannot_take_the_name_of_another(ring: KeyRing) -> None:
    (ring.clients / "stranger.key").write_bytes(ring.stranger.read_bytes())
    with (
        RunningBroker(keys=ring.broker()) as broker,
        Client(broker.endpoint, name="me", keys=ring.client_secret, server_key=ring.server),
        pytest.raises(ProtocolError, match="taken by another user"),
    ):
        Client(broker.endpoint, name="me", keys=ring.stranger_secret, server_key=ring.server)


def test_connections_that_say_nothing_or_nonsense_hold_nobody_up(ring: KeyRing) -> None:
    with RunningBroker(keys=ring.broker()) as broker, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(broker.endpoint.rpartition(":")[2]))
        for number in range(60):
            silent = stack.enter_context(socket.create_connection(address, PATIENCE))
            if number % 3 == 1:
                silent.sendall(b"GET / HTTP/1.1\r\n\r\n" * number)
            elif number % 3 == 2:  # ZMTP 1.0 has no handshake: an identity, then a message
                silent.sendall(b"\x03\x00id" + b"\x03\x00hi")
        client = Client(broker.endpoint, keys=ring.client_secret, server_key=ring.server)
        with client, pytest.raises(NoPeerError):
            client.ask("nobody", Name(), timeout=PATIENCE).result(PATIENCE)
        statistics = broker.statistics()
        assert statistics.malformed == statistics.stranger_frames == 0


def test_a_peer_whose_broker_comes_back_with_another_key_is_told_why(ring: KeyRing) -> None:
    first = RunningBroker(kept_endpoint(), keys=ring.broker())
    with Client(first.endpoint, keys=ring.client_secret, server_key=ring.server) as client:
        first.stop()
        other = BrokerKeys(load_keys(ring.stranger_secret), lambda _: True)
        with RunningBroker(first.endpoint, keys=other):
            told = ""
            while "authentication failed" not in told:  # the first ones wait for the old broker
                with pytest.raises(RequestTimeoutError) as caught:
                    client.ask("names", Name(), timeout=0.1).result(PATIENCE)
                told = str(caught.value)
