from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from envbus.bus.broker.events import Complete, Notify, PeerLeft, PeerReady
from envbus.bus.descriptors import descriptors_in_use
from envbus.bus.errors import ConfigError, RestartLimitError, TransportError
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.gateway.config import STOP
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.process_group import ProcessGroup
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.zmq_sockets import HIGH_WATER_MARK
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.framing import pack, pack_for_stream
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    FailureCode,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Shutdown,
    Token,
    Welcome,
)
from tests.bus.gateway.bus import (
    PATIENCE,
    Bus,
    TcpClient,
    WebSocketClient,
    failure,
    hello,
    message,
    welcome,
)
from tests.bus.gateway.certificate import (
    CERTIFICATE,
    NEXT_CERTIFICATE,
    NEXT_PRIVATE_KEY,
    PRIVATE_KEY,
)
from tests.descriptors import no_more_files
from tests.integration.group_children import Driver, is_alive, wait_until

AnyClient = TcpClient | WebSocketClient


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    with Bus(tmp_path) as bus:
        yield bus


def client_of(bus: Bus, kind: str) -> AnyClient:
    if kind == "tcp":
        return TcpClient(bus.gateway.tcp[0])
    return WebSocketClient(bus.gateway.websocket[0])


def joined(bus: Bus, client: AnyClient, name: str) -> bytes:
    """Let `client` say hello, and return its routing id."""
    client.send(hello(name))
    bus.until(lambda: any(p.hello.name == name for p in bus.of(PeerReady)), f"{name} joins")
    assert welcome(client.receive()).lease > 0.0
    (peer,) = [p.peer for p in bus.of(PeerReady) if p.hello.name == name]
    return bytes(peer)


def drained(client: AnyClient) -> list[list[memoryview]]:
    """Return what comes until the other side closes."""
    came = []
    try:
        while True:
            came.append(client.receive())
    except (EOFError, ConnectionClosed, ConnectionResetError):
        return came


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_a_client_is_a_peer_like_others(bus: Bus, kind: str) -> None:
    with client_of(bus, kind) as client:
        peer = joined(bus, client, "sim")
        payload, buffer = b"payload", bytes(range(256)) * 400
        request_id = bus.broker.ask(peer, "Anything", [payload, buffer], timeout=PATIENCE)
        header, *frames = client.receive()
        asked = decode_header(header)
        assert (asked.payload_type, frames) == ("Anything", [payload, buffer])
        client.send(
            [encode_header(Header(1, Kind.REPLY, asked.request_id, "Done")), buffer, payload]
        )
        (end,) = bus.take(Complete)
        assert end.wire_id == request_id
        assert [bytes(frame) for frame in end.frames] == [buffer, payload]


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_the_broker_hears_at_once_of_a_connection_that_is_lost(bus: Bus, kind: str) -> None:
    client = client_of(bus, kind)
    joined(bus, client, "sim")
    client.close()
    (left,) = bus.take(PeerLeft)
    assert left.name == "sim"
    with client_of(bus, kind) as successor:
        joined(bus, successor, "sim")


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_thousands_of_messages_keep_their_order_while_the_broker_is_away(
    bus: Bus, kind: str
) -> None:
    count = 5000
    with client_of(bus, kind) as client:
        joined(bus, client, "sim")
        bus.outcomes.clear()
        notice = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "Numbered")
        sent = [[encode_header(notice), b"%d" % number] for number in range(count)]
        client.send(*sent[: count // 2])
        client.send(*sent[count // 2 :])
        came = [bytes(notify.frames[0]) for notify in bus.take(Notify, count)]
        assert came == [frames[1] for frames in sent]


@pytest.mark.parametrize("kind", [Kind.NOTICE, Kind.REQUEST])
def test_what_a_client_sends_while_the_broker_is_away_is_bounded_in_bytes(
    tmp_path: Path, kind: Kind
) -> None:
    chunk, count = bytes(1 << 18), 200
    with Bus(tmp_path, max_untaken_bytes=1 << 20) as bus, client_of(bus, "tcp") as client:
        joined(bus, client, "sim")
        bus.outcomes.clear()
        stream = memoryview(
            b"".join(
                pack_for_stream([encode_header(Header(1, kind, 1 + n, "Big", 60.0)), chunk])
                for n in range(count)
            )
        )
        client.socket.setblocking(False)
        sent = 0
        while select.select([], [client.socket], [], 0.5)[1]:  # until nobody reads
            sent += client.socket.send(stream[sent : sent + (1 << 20)])
        assert sent < 24 * 2**20  # most of it in the system's buffers
        while len(bus.of(Notify)) < count:
            if sent < len(stream) and select.select([], [client.socket], [], 0.0)[1]:
                sent += client.socket.send(stream[sent : sent + (1 << 20)])
            bus.poll(0.001)
        came = [notify.header.request_id for notify in bus.of(Notify)]
        assert came == list(range(1, 1 + count))
        client.socket.setblocking(True)
        (peer,) = {notify.peer for notify in bus.of(Notify)}
        bus.broker.ask(peer, "Next", [b""], timeout=PATIENCE)
        assert decode_header(client.receive()[0]).payload_type == "Next"  # no answer to a mark


def test_a_client_of_a_later_life_may_send_more_than_may_be_untaken_at_a_time(
    tmp_path: Path,
) -> None:
    with Bus(tmp_path, max_untaken_bytes=1 << 16) as bus, client_of(bus, "tcp") as client:
        client.send(message(Hello(name="sim", heartbeat=30.0), incarnation=2))
        notice = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "Big", incarnation=2)
        client.send(*[[encode_header(notice), bytes(1 << 15)]] * 10)
        bus.take(Notify, 10)


@pytest.mark.slow
def test_clients_that_come_and_go_while_the_broker_is_away_are_bounded_in_number(
    tmp_path: Path,
) -> None:
    notice = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "Small")
    many = pack_for_stream([encode_header(notice), b""]) * (HIGH_WATER_MARK + 200)
    refused = 0
    with Bus(tmp_path, max_connections=1) as bus:
        limit = GatewayConfig(tcp=("127.0.0.1:0",), max_connections=1).max_peers
        bus.poll()
        before = descriptors_in_use()
        for number in range(limit + 30):
            words = b""
            with TcpClient(bus.gateway.tcp[0]) as client, contextlib.suppress(OSError):
                first = message(Hello(name=f"sim-{number}", heartbeat=30.0), incarnation=number)
                client.socket.sendall(pack_for_stream(first) + many)
                client.socket.shutdown(socket.SHUT_WR)
                while data := client.socket.recv(1 << 16):  # until all was read
                    words += data
            refused += b"no room for one more client" in words
        assert descriptors_in_use() <= before + limit
        assert refused
        # What they sent is taken, and then they have gone.
        bus.until(lambda: descriptors_in_use() <= before + 1, "their descriptors")
        with client_of(bus, "tcp") as client:
            joined(bus, client, "successor")


def test_a_client_that_says_goodbye_itself_leaves_nothing_to_complain_of(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    bus.poll()
    before = descriptors_in_use()
    with client_of(bus, "tcp") as client:
        joined(bus, client, "sim")
        client.send(message(Goodbye(), Kind.NOTICE))
        bus.take(PeerLeft)
    bus.until(lambda: descriptors_in_use() <= before, "its way to the broker to be closed")
    assert caplog.messages == []
    assert bus.broker.statistics().stranger_frames <= 1  # the gateway's goodbye


def test_nobody_is_let_in_while_the_owner_has_hardly_a_descriptor_left(bus: Bus) -> None:
    """libzmq would end it for one more, and strangers at its TCP endpoints can take them all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client_of(bus, "tcp") as client:
        # Far from the least that must be left: what tests before have left may close meanwhile.
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_in_use() + 4, hard))
        try:
            client.send(hello("sim"))
            (words,) = drained(client)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "no room for one more client: Too many open files" in failure(words).message
    with client_of(bus, "tcp") as client:
        joined(bus, client, "sim")


def test_a_heartbeat_without_an_identity_counts(bus: Bus) -> None:
    with client_of(bus, "tcp") as client:
        peer = joined(bus, client, "sim")
        client.send(message(Heartbeat(), Kind.NOTICE))
        bus.broker.shut_down(peer)
        bus.poll()
        assert decode_header(client.receive()[0]).payload_type == Shutdown.__name__


def test_a_token_is_asked_for_in_each_way(tmp_path: Path) -> None:
    with Bus(tmp_path, token="secret") as bus:
        tcp, websocket = bus.gateway.tcp[0], bus.gateway.websocket[0]
        token = message(Token(token="secret"), Kind.NOTICE)
        for number, client in enumerate(
            [
                TcpClient(tcp),
                WebSocketClient(websocket),
                WebSocketClient(websocket, "/?token=secret"),
                WebSocketClient(websocket, additional_headers={"Authorization": "Bearer secret"}),
            ]
        ):
            with client:
                if number < 2:
                    client.send(token)
                joined(bus, client, f"sim-{number}")
        for stranger in (TcpClient(tcp), WebSocketClient(websocket)):
            with stranger:
                stranger.send(hello("stranger"))
                (words,) = drained(stranger)
                assert "a token is wanted" in failure(words).message
        with TcpClient(tcp) as guesser:
            guesser.send(message(Token(token="guess"), Kind.NOTICE))
            assert failure(drained(guesser)[0]).message == "the token is wrong"
        with pytest.raises(InvalidStatus, match="401"):
            WebSocketClient(websocket, "/?token=guess")
        assert len(bus.of(PeerReady)) == 4


def is_connected(bus: Bus, client: AnyClient, peer: bytes) -> bool:
    """Whether a client hears its broker still, which says farewell."""
    bus.broker.shut_down(peer)
    bus.poll()
    return decode_header(client.receive()[0]).payload_type == Shutdown.__name__


NUMBERS = itertools.count()


def is_let_in(bus: Bus, token: str) -> bool:
    """Say hello with a token, and go; by another name each time: a peer may not be missed yet."""
    with TcpClient(bus.gateway.tcp[0]) as client:
        name = f"sim-{next(NUMBERS)}"
        client.send(message(Token(token=token), Kind.NOTICE), hello(name))
        bus.poll()
        while True:
            with contextlib.suppress(TimeoutError):
                client.socket.settimeout(0.05)
                words = client.receive()
                break
            bus.poll()
        return decode_header(words[0]).payload_type == Welcome.__name__


def test_tokens_may_change_and_say_who_has_come_in(tmp_path: Path) -> None:
    with Bus(tmp_path, token={"alice": "first", "bob": "second"}) as bus:
        with TcpClient(bus.gateway.tcp[0]) as old:
            old.send(message(Token(token="first"), Kind.NOTICE))
            peer = joined(bus, old, "old")
            came_in = bus.gateway.client_of(peer)
            assert came_in is not None
            assert came_in.name == "alice"
            assert came_in.address == "{}:{}".format(*old.socket.getsockname())
            assert bus.gateway.client_of(b"gateway.anybody") is None
            bus.gateway.set_token({"alice": "third"})
            bus.until(lambda: not is_let_in(bus, "first"), "the token is withdrawn")
            assert not is_let_in(bus, "second")
            assert is_let_in(bus, "third")
            assert is_connected(bus, old, peer)
        with pytest.raises(ConfigError, match="two names have one token"):
            bus.gateway.set_token({"alice": "same", "bob": "same"})
        os.kill(bus.gateway.pid, signal.SIGKILL)
        bus.until(lambda: bus.gateway.restarts, "it is started again")
        assert is_let_in(bus, "third")
        assert not is_let_in(bus, "second")


def shown_certificate(bus: Bus) -> str:
    host, port = bus.gateway.tcp[0].split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=30.0)


def test_a_certificate_may_change_while_connections_stay(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with (
        Bus(tmp_path, certificate=str(certificate), private_key=str(key)) as bus,
        TcpClient(bus.gateway.tcp[0], trusting) as old,
    ):
        peer = joined(bus, old, "old")
        certificate.write_text(NEXT_CERTIFICATE)
        with pytest.raises(ConfigError, match="TLS cannot use"):  # its key is missing yet
            bus.gateway.reload_certificate()
        assert shown_certificate(bus) == CERTIFICATE
        key.write_text(NEXT_PRIVATE_KEY)
        bus.gateway.reload_certificate()
        bus.until(lambda: shown_certificate(bus) == NEXT_CERTIFICATE, "the next one is shown")
        assert is_connected(bus, old, peer)
        certificate.write_text("nothing of the kind")
        key.unlink()
        os.kill(bus.gateway.pid, signal.SIGKILL)
        bus.until(lambda: bus.gateway.restarts, "it is started again")
        assert shown_certificate(bus) == NEXT_CERTIFICATE


def test_a_change_reaches_a_gateway_whose_clients_have_left_no_descriptor(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    files = {"certificate": str(certificate), "private_key": str(key)}
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with (
        Bus(tmp_path, token="first", **files) as bus,
        TcpClient(bus.gateway.tcp[0], trusting) as old,
        contextlib.ExitStack() as strangers,
    ):
        old.send(message(Token(token="first"), Kind.NOTICE))
        peer = joined(bus, old, "old")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        folder = Path(f"/proc/{bus.gateway.pid}/fd")
        most = 1 + max(int(file.name) for file in folder.iterdir())
        resource.prlimit(bus.gateway.pid, resource.RLIMIT_NOFILE, (most, hard))
        where = "127.0.0.1", port(bus.gateway.tcp[0])
        for _ in range(most):
            strangers.enter_context(socket.create_connection(where, PATIENCE))
        bus.until(lambda: len(list(folder.iterdir())) == most, "no descriptor is left")
        certificate.write_text(NEXT_CERTIFICATE)
        key.write_text(NEXT_PRIVATE_KEY)
        bus.gateway.set_token("third")
        bus.gateway.reload_certificate()
        for _ in range(2):  # what it was told before was taken by then
            assert is_answered(bus, old, peer)
        resource.prlimit(bus.gateway.pid, resource.RLIMIT_NOFILE, (soft, hard))
        bus.until(lambda: shown_certificate(bus) == NEXT_CERTIFICATE, "the next one is shown")
        assert is_answered(bus, old, peer)
        assert not bus.gateway.restarts


def is_answered(bus: Bus, client: AnyClient, peer: bytes) -> bool:
    """Whether a request reaches a client, and its answer the broker."""
    bus.broker.ask(peer, "Anything", [b""], timeout=PATIENCE)
    bus.poll()
    asked = decode_header(client.receive()[0])
    client.send([encode_header(Header(1, Kind.REPLY, asked.request_id, "Done")), b""])
    return len(bus.take(Complete)) == 1


def test_tls_guards_both_framings(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with Bus(tmp_path, certificate=str(certificate), private_key=str(key)) as bus:
        tcp, websocket = bus.gateway.tcp[0], bus.gateway.websocket[0]
        with TcpClient(tcp, trusting) as client:
            joined(bus, client, "tcp")
        # Not by websockets' client: it reads and writes TLS in two threads, unguarded until 3.13.
        with TcpClient(websocket, trusting) as client:
            client.socket.sendall(UPGRADE)
            assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 101")
            frame = Frame(Opcode.BINARY, pack(hello("websocket")))
            client.socket.sendall(bytes(frame.serialize(mask=True)))
            bus.until(lambda: len(bus.of(PeerReady)) == 2, "websocket joins")
            assert Welcome.__name__.encode() in client.socket.recv(1 << 16)
        with TcpClient(tcp) as plain:
            plain.send(hello("plain"))
            assert drained_bytes(plain.socket) == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            TcpClient(tcp, ssl.create_default_context()).close()
        assert len(bus.of(PeerReady)) == 2


def test_a_hello_right_behind_the_upgrade_is_answered_behind_it(bus: Bus) -> None:
    frame = Frame(Opcode.BINARY, pack(hello("hasty")))
    with socket.create_connection(("127.0.0.1", port(bus.gateway.websocket[0]))) as sock:
        sock.sendall(UPGRADE + bytes(frame.serialize(mask=True)))
        bus.until(lambda: bus.of(PeerReady), "hasty joins")
        came = sock.recv(1 << 16)
        while Welcome.__name__.encode() not in came:
            came += sock.recv(1 << 16)
        assert came.startswith(b"HTTP/1.1 101")


def drained_bytes(sock: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := sock.recv(1 << 16):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def test_a_page_from_elsewhere_may_not_connect(bus: Bus) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        WebSocketClient(bus.gateway.websocket[0], origin="https://evil.example")
    with WebSocketClient(bus.gateway.websocket[0], origin="http://localhost:8000") as client:
        joined(bus, client, "page")


def test_who_says_nothing_for_too_long_is_told_so(tmp_path: Path) -> None:
    with Bus(tmp_path, handshake_timeout=0.3) as bus:
        with TcpClient(bus.gateway.tcp[0]) as silent:
            (words,) = drained(silent)
        assert failure(words).message == "no hello came within 0.3 s"
        with socket.create_connection(("127.0.0.1", port(bus.gateway.websocket[0]))) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n")
            assert drained_bytes(silent).startswith(b"HTTP/1.1 503")


def test_a_websocket_that_does_not_answer_pings_is_closed(tmp_path: Path) -> None:
    """That one which answers them stays: `test_host_connection.py`, where nobody can be late."""
    with (
        Bus(tmp_path, keepalive=0.3) as bus,
        socket.create_connection(("127.0.0.1", port(bus.gateway.websocket[0]))) as dead,
    ):
        dead.sendall(
            UPGRADE + bytes(Frame(Opcode.BINARY, pack(hello("dead"))).serialize(mask=True))
        )
        bus.until(lambda: bus.of(PeerReady), "dead joins")
        assert b"no sign of life for 0.6 s" in drained_bytes(dead)


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_one_client_too_many_is_told_so(tmp_path: Path) -> None:
    with Bus(tmp_path, max_connections=1) as bus:
        with TcpClient(bus.gateway.tcp[0]) as first:
            joined(bus, first, "first")
            with TcpClient(bus.gateway.tcp[0]) as second:
                second.send(hello("second"))
                refused = failure(drained(second)[0])
                assert refused.code is FailureCode.OVERLOADED
                assert "1 clients are connected, which is the limit" in refused.message
            with WebSocketClient(bus.gateway.websocket[0]) as other:
                other.send(hello("other"))
                assert failure(drained(other)[0]).code is FailureCode.OVERLOADED
        bus.take(PeerLeft)
        with TcpClient(bus.gateway.tcp[0]) as third:
            joined(bus, third, "third")


def test_strangers_keep_no_client_out(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    tls = {"certificate": str(certificate), "private_key": str(key)}
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with (
        Bus(tmp_path, max_connections=1, max_strangers=4, token="secret", **tls) as bus,
        contextlib.ExitStack() as stack,
    ):
        places = [*bus.gateway.tcp, *bus.gateway.websocket]
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port(place))))
            for place in places * 5
        ]
        for stranger in strangers[::2]:
            with contextlib.suppress(OSError):  # cut off already
                stranger.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of TLS
        wait_until(lambda: sum(map(is_closed, strangers)) == 6, "strangers are cut off")
        silent = stack.enter_context(TcpClient(bus.gateway.tcp[0], trusting))
        with TcpClient(bus.gateway.tcp[0], trusting) as client:
            client.send(message(Token(token="secret"), Kind.NOTICE))
            joined(bus, client, "sim")
            assert sum(map(is_closed, strangers)) == 8
            silent.send(message(Token(token="guess"), Kind.NOTICE))
            assert failure(drained(silent)[0]).message == "the token is wrong"


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_a_client_that_falls_silent_for_its_lease_makes_room(tmp_path: Path, kind: str) -> None:
    with Bus(tmp_path, max_connections=1) as bus:
        with client_of(bus, kind) as silent:  # a WebSocket's thread answers pings
            silent.send(message(Hello(name="silent", heartbeat=0.1)))
            bus.take(PeerReady)
            bus.until(lambda: bus.of(PeerLeft), "it is given up")
            told, words = drained(silent)
            assert welcome(told).lease == pytest.approx(0.4)
            assert failure(words).code is FailureCode.NOT_JOINED
        with client_of(bus, kind) as next_one:
            joined(bus, next_one, "next")


def test_a_client_that_neither_reads_nor_sends_any_more_makes_room(tmp_path: Path) -> None:
    with Bus(tmp_path, max_connections=1) as bus, TcpClient(bus.gateway.tcp[0]) as lazy:
        peer = joined(bus, lazy, "lazy")
        bus.broker.ask(peer, "Flood", [bytes(12 << 20)], timeout=PATIENCE)  # no window takes it
        bus.until(lambda: select.select([lazy.socket], [], [], 0.0)[0], "it has come here")
        lazy.socket.shutdown(socket.SHUT_WR)
        bus.until(lambda: [left.name for left in bus.of(PeerLeft)] == ["lazy"], "lazy is cut off")
        with TcpClient(bus.gateway.tcp[0]) as next_one:
            joined(bus, next_one, "next")


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_a_client_whose_hello_is_refused_makes_room(tmp_path: Path, kind: str) -> None:
    with Bus(tmp_path, max_connections=1) as bus:
        with client_of(bus, kind) as refused:
            refused.send(message(Hello(name="")))
            bus.poll(PATIENCE)
            (words,) = drained(refused)
            assert failure(words).code is FailureCode.PROTOCOL
        with client_of(bus, kind) as next_one:
            joined(bus, next_one, "next")


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_a_request_over_the_limit_that_welcome_told_is_failed_by_its_id(
    tmp_path: Path, kind: str
) -> None:
    with Bus(tmp_path, max_message_bytes=100_000) as bus, client_of(bus, kind) as client:
        client.send(hello("sim"))
        bus.take(PeerReady)
        assert welcome(client.receive()).max_message_bytes == 100_000
        # More than is read at a time, and no more than the system takes at once: its end is soon.
        client.send([encode_header(Header(1, Kind.REQUEST, 77, "Big", 30.0)), bytes(1_000_000)])
        frames = client.receive()
        assert decode_header(frames[0]).request_id == 77
        assert "is over the limit of 100000" in failure(frames).message
        if kind == "tcp":  # a WebSocket is closed behind it
            client.send([encode_header(Header(1, Kind.REQUEST, 78, "Small", 30.0)), b""])
            assert [note.header.request_id for note in bus.take(Notify)] == [78]


def test_a_client_that_does_not_read_is_cut_off_and_others_go_on(tmp_path: Path) -> None:
    with (
        Bus(tmp_path, max_unsent_bytes=1 << 20) as bus,
        TcpClient(bus.gateway.tcp[0]) as lazy,
        TcpClient(bus.gateway.tcp[0]) as busy,
    ):
        lazy_peer, busy_peer = joined(bus, lazy, "lazy"), joined(bus, busy, "busy")
        flood = bytes(1 << 20)
        for _ in range(24):
            bus.broker.ask(lazy_peer, "Flood", [flood], timeout=PATIENCE)
        bus.broker.ask(busy_peer, "Easy", [b""], timeout=PATIENCE)
        assert decode_header(busy.receive()[0]).payload_type == "Easy"
        bus.until(lambda: [left.name for left in bus.of(PeerLeft)] == ["lazy"], "lazy is cut off")


@pytest.mark.parametrize("kind", ["tcp", "websocket"])
def test_hostile_bytes_harm_only_their_own_connection(bus: Bus, kind: str) -> None:
    addresses = {"tcp": bus.gateway.tcp, "websocket": bus.gateway.websocket}
    chance = random.Random(7)
    good = b"".join(bytes(frame) for frame in hello("x"))
    with client_of(bus, kind) as honest:
        peer = joined(bus, honest, "honest")
        for _ in range(60):
            with socket.create_connection(("127.0.0.1", port(addresses[kind][0]))) as hostile:
                noise = chance.randbytes(chance.randrange(1, 400))
                start = chance.choice([b"", b"\x00\x00\x00\x40\x92", b"GET / HTTP/1.1\r\n", good])
                hostile.sendall(start + noise + b"\r\n\r\n")
        bus.broker.ask(peer, "Still", [b"there"], timeout=PATIENCE)
        assert honest.receive()[1] == b"there"
        assert bus.gateway.restarts == 0


def test_a_gateway_that_was_killed_is_followed_by_one_at_the_same_ports(bus: Bus) -> None:
    places = bus.gateway.tcp, bus.gateway.websocket
    with client_of(bus, "tcp") as client, client_of(bus, "websocket") as other:
        joined(bus, client, "sim-1")
        joined(bus, other, "sim-2")
        os.kill(bus.gateway.pid, signal.SIGKILL)
        assert drained(client) == drained(other) == []
    # Nobody serves now: who connects waits.
    with client_of(bus, "tcp") as client:
        bus.until(lambda: bus.gateway.restarts == 1, "a restart")
        joined(bus, client, "sim-1b")
    with client_of(bus, "websocket") as client:
        joined(bus, client, "sim-2b")
    assert (bus.gateway.tcp, bus.gateway.websocket) == places


def test_a_gateway_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    config = GatewayConfig(tcp=("127.0.0.1:0",))
    with Gateway(f"ipc://{tmp_path}/bus", config, RestartPolicy(max_restarts=1)) as gateway:
        os.kill(gateway.pid, signal.SIGKILL)
        wait_until(lambda: gateway.check() or gateway.restarts == 1, "a restart")
        os.kill(gateway.pid, signal.SIGKILL)
        with pytest.raises(RestartLimitError, match=r"after 1 restarts in a row.*: signal SIGKILL"):
            wait_until(gateway.check, "it is given up")
        host, _, port = gateway.tcp[0].rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 5.0)


def test_a_gateway_that_hangs_again_and_again_is_given_up(tmp_path: Path) -> None:
    config = GatewayConfig(tcp=("127.0.0.1:0",), hang_timeout=0.2)
    with Gateway(f"ipc://{tmp_path}/bus", config, RestartPolicy(max_restarts=1)) as gateway:
        for last in (False, True):
            with TcpClient(gateway.tcp[0]) as client:
                client.send([b"nonsense"])
                assert drained(client), "it serves"
            os.kill(gateway.pid, signal.SIGSTOP)
            if not last:
                wait_until(lambda: gateway.check() or gateway.restarts == 1, "a restart")
        with pytest.raises(RestartLimitError, match=r"after 1 restarts in a row.*: a hang"):
            wait_until(gateway.check, "it is given up")


def test_a_gateway_whose_owner_may_open_no_more_files_is_not_taken_for_hung(
    tmp_path: Path,
) -> None:
    with Bus(tmp_path, hang_timeout=3.0) as bus, client_of(bus, "tcp") as client:
        joined(bus, client, "sim-1")
        with no_more_files():  # as strangers at the broker's own endpoint can bring it about
            pipe = bus.gateway._child.pipe
            signs = pipe.next_expected
            bus.until(lambda: pipe.next_expected > signs, "a sign of life")
        assert bus.gateway.restarts == 0


def test_a_gateway_that_cannot_be_started_again_at_once_is_later(bus: Bus) -> None:
    os.kill(bus.gateway.pid, signal.SIGKILL)
    with no_more_files():
        bus.until(lambda: bus.gateway.restarts > 1, "a second try")
    with client_of(bus, "tcp") as client:
        joined(bus, client, "sim-1")


def test_a_gateway_whose_restart_ctrl_c_broke_off_is_started_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessGroup, "start", interrupted)
    os.kill(bus.gateway.pid, signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):
        bus.until(lambda: bus.gateway.restarts > 1, "the first try")
    bus.until(lambda: bus.gateway.restarts > 1, "a second try")
    with client_of(bus, "tcp") as client:
        joined(bus, client, "sim-1")


def test_a_client_that_is_gone_unnoticed_keeps_no_word_from_the_others(tmp_path: Path) -> None:
    with Bus(tmp_path, max_untaken_bytes=1 << 16) as bus, contextlib.ExitStack() as stack:
        gone = [stack.enter_context(TcpClient(bus.gateway.tcp[0])) for _ in range(2)]
        others = [stack.enter_context(TcpClient(bus.gateway.tcp[0])) for _ in range(4)]
        for number, client in enumerate(gone + others):
            joined(bus, client, f"sim-{number}")
        chunk = [encode_header(Header(1, Kind.NOTICE, 0, "Big")), bytes(1 << 16)]
        for client in gone:  # the gateway reads nothing of them any more, as nobody takes it
            client.socket.setblocking(False)
            while select.select([], [client.socket], [], 0.3)[1]:
                with contextlib.suppress(BlockingIOError):
                    client.socket.send(pack_for_stream(chunk))
            client.close()
        bus.gateway.close(PATIENCE)
        for client in others:
            (words,) = drained(client)
            assert failure(words).message == "the gateway ends"


def test_clients_are_told_of_an_orderly_end(bus: Bus) -> None:
    with client_of(bus, "tcp") as client, client_of(bus, "websocket") as other:
        joined(bus, client, "sim-1")
        joined(bus, other, "sim-2")
        pid = bus.gateway.pid
        bus.gateway.close(PATIENCE)
        for told in (client, other):
            (words,) = drained(told)
            assert failure(words).message == "the gateway ends"
        assert not is_alive(pid)
        bus.gateway.close()  # again


DRIVER = """
import json, os, signal, sys
from envbus.bus.gateway import Gateway, GatewayConfig

gateway = Gateway("ipc:///nowhere", GatewayConfig(tcp=("127.0.0.1:0",)))
print(json.dumps([gateway.pid, gateway.tcp[0]]), flush=True)
signal.pause()
"""


def test_ctrl_c_while_a_process_is_started_keeps_nothing_from_it_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    start, send = ProcessGroup.start, Pipe.send_bytes

    def start_and_raise(*args: Any) -> Any:
        child = start(*args)
        signal.raise_signal(signal.SIGINT)
        return child

    def note(pipe: Pipe, number: int, data: bytes) -> None:
        sent.append(data)
        send(pipe, number, data)

    monkeypatch.setattr(ProcessGroup, "start", start_and_raise)
    monkeypatch.setattr(Pipe, "send_bytes", note)
    with pytest.raises(KeyboardInterrupt):
        Gateway(f"ipc://{tmp_path}/bus", GatewayConfig(tcp=("127.0.0.1:0",)))
    assert len(sent) == 2
    assert sent[1] == STOP


@pytest.mark.slow
def test_a_gateway_dies_with_its_driver(tmp_path: Path) -> None:
    with Driver(DRIVER, tmp_path) as driver:
        pid, address = driver.read()
        with TcpClient(address):
            driver.kill()
        wait_until(lambda: not is_alive(pid), "the gateway is gone")
    # The kernel may still be at work on the driver's end, and the driver listens, too.
    wait_until(lambda: refuses(address), "nobody listens")


def refuses(address: str) -> bool:
    try:
        TcpClient(address).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


def test_an_address_in_use_or_elsewhere_is_told_at_once(bus: Bus, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=f"cannot listen at {bus.gateway.tcp[0]}"):
        Gateway("ipc:///nowhere", GatewayConfig(tcp=bus.gateway.tcp))
    missing = str(tmp_path / "missing.pem")
    config = GatewayConfig(tcp=("127.0.0.1:0",), certificate=missing, private_key=missing)
    with pytest.raises(ConfigError, match="TLS cannot use"):
        Gateway("ipc:///nowhere", config)


@pytest.mark.slow
def test_the_owner_may_have_a_descriptor_for_each_connection_or_it_is_an_error(
    tmp_path: Path,
) -> None:
    program = f"""
import resource
from envbus.bus.errors import StartError
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.descriptors import descriptors_in_use

config = GatewayConfig(tcp=("127.0.0.1:0",), max_connections=100)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
with Gateway("ipc://{tmp_path}/bus", config):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - descriptors_in_use() > 264)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
try:
    Gateway("ipc://{tmp_path}/bus", config)
except StartError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    allowed, refused = done.stdout.splitlines()
    assert allowed == "True"
    assert refused.startswith("max_connections=100 takes up to 264 descriptors of this process")
    assert "may have 256. Lower it, or allow" in refused
