"""ZMTP 1.0 and 2.0, and with them the requests of web pages, get no message into any endpoint."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium import spaces

from envbus.actors import ExternalEnvClient
from envbus.bus.peer.client import Client
from envbus.bus.transport.curve_keys import BrokerKeys, new_keys
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.runner import BusVectorEnv, ExternalEnvBridge
from envbus.runner.inference.policy_workers import PolicyWorkers
from tests.clients.browser import PROGRAMS, Page, find_browser
from tests.integration.bus_programs import RunningBroker, free_port, hello_frames
from tests.integration.envs.test_remote_actors import with_remote_actor
from tests.integration.group_children import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(120)

BROWSER = find_browser()
#: With which ZMTP 1.0, if it says its version at all, and all later ones begin.
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
DEALER = 5


def in_zmtp_1(frames: list[bytes]) -> bytes:
    """Return one message as versions 1.0 frame it."""
    last = len(frames) - 1
    framed = b""
    for number, frame in enumerate(frames):
        size = len(frame) + 1
        length = bytes([size]) if size < 255 else b"\xff" + size.to_bytes(8, "big")
        framed += length + bytes([number < last]) + frame
    return framed


def in_zmtp_2(frames: list[bytes]) -> bytes:
    """Return one message as versions 2.0 and 3.0 frame it."""
    last = len(frames) - 1
    return b"".join(
        bytes([(number < last) | 2]) + len(frame).to_bytes(8, "big") + frame
        for number, frame in enumerate(frames)
    )


def body_of_a_page(slide: int) -> bytes:
    """Return what a page posts: wherever the request's head leaves off, a Hello is read behind it.

    A pair of ones is an empty frame with more to follow. The head is as long as the browser likes,
    so that one of two lengths meets the pairs.
    """
    return b"\x01" * slide + b"\x01\x00" + in_zmtp_1(hello_frames("page", heartbeat=1.0))


def http(slide: int) -> bytes:
    body = body_of_a_page(slide)
    head = (
        f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: text/plain;charset=UTF-8\r\n"
        "User-Agent: Mozilla/5.0\r\nAccept: */*\r\nOrigin: http://example.org\r\n\r\n"
    )
    return head.encode() + body


HELLO = hello_frames("old", heartbeat=1.0)
OLD = {
    "ZMTP 1.0": in_zmtp_1([b"me"]) + in_zmtp_1(HELLO),
    "ZMTP 1.0 with its version": SIGNATURE + bytes([0, DEALER]) + in_zmtp_1([b"me"]) * 2,
    "ZMTP 2.0": SIGNATURE + bytes([1, DEALER]) + in_zmtp_2([b"me"]) + in_zmtp_2(HELLO),
    "HTTP": http(600),
    "HTTP, one byte longer": http(601),
}


def connected(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    connection.connect(address)
    return connection


def is_shut_out(endpoint: str, data: bytes) -> bool:
    """Whether the other side closes the connection of who sends that."""
    with connected(endpoint) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
    return True


def all_are_shut_out(endpoint: str) -> bool:
    return all(is_shut_out(endpoint, data) for data in OLD.values())


@contextlib.contextmanager
def routers(folder: Path) -> Iterator[dict[str, tuple[ZmqRouter, str]]]:
    """Each kind of endpoint that there is: its socket, and where it is."""
    _, client = new_keys(folder / "clients", "client")
    _, secret = new_keys(folder, "server")
    del client
    keys = BrokerKeys.load(secret, folder / "clients")
    with contextlib.ExitStack() as stack:
        plain = ZmqRouter(["tcp://127.0.0.1:*", f"ipc://{folder}/plain"])
        stack.callback(plain.close)
        guarded = ZmqRouter(["tcp://127.0.0.1:*"], private=[f"ipc://{folder}/private"], keys=keys)
        stack.callback(guarded.close)
        guarded.bind_private(f"ipc://{folder}/later")
        yield {
            "tcp": (plain, plain.endpoints[0]),
            "ipc": (plain, plain.endpoints[1]),
            "private, beside keys": (guarded, guarded.endpoints[0]),
            "private, bound later": (guarded, f"ipc://{folder}/later"),
            "with keys": (guarded, guarded.endpoints[1]),
        }


def test_no_endpoint_takes_a_message_of_an_old_version(tmp_path: Path) -> None:
    with routers(tmp_path) as known:
        for name, (router, endpoint) in known.items():
            for version, data in OLD.items():
                assert is_shut_out(endpoint, data), (name, version)
            assert router.receive() is None, name


def test_ordinary_peers_without_keys_come_in_by_zmtp_3(tmp_path: Path) -> None:
    def properties(**values: bytes) -> bytes:
        return b"".join(
            bytes([len(name)]) + name.encode() + len(value).to_bytes(4, "big") + value
            for name, value in ((name.replace("_", "-"), value) for name, value in values.items())
        )

    with routers(tmp_path) as known:
        for name in ("tcp", "ipc", "private, beside keys", "private, bound later"):
            router, endpoint = known[name]
            peer = ZmqPeer(endpoint, name.encode())
            try:
                peer.send([b"hello"])
                assert router.wait(PATIENCE), name
                received = router.receive()
                assert received is not None
                assert received[0] == name.encode()
                assert router.user_of(received[1]) == ""
            finally:
                peer.close()
            for minor in (0, 1):  # 3.0 is that of libzmq 4.0 and of many other libraries
                identity = f"{name}, {minor}".encode()
                ready = b"\x05READY" + properties(Socket_Type=b"DEALER", Identity=identity)
                with connected(endpoint) as other, other.makefile("rb") as answers:
                    null = b"NULL".ljust(20, b"\0")
                    other.sendall(SIGNATURE + bytes([3, minor]) + null + bytes(32))
                    assert len(answers.read(64)) == 64  # the router's greeting
                    other.sendall(bytes([4, len(ready)]) + ready)
                    assert answers.read(answers.read(2)[1]).startswith(b"\x05READY")
                    other.sendall(in_zmtp_2([b"hello"]))
                    assert router.wait(PATIENCE), (name, minor)
                    received = router.receive()
                    assert received is not None
                    assert received[0] == identity


@contextlib.contextmanager
def programs() -> Iterator[dict[str, tuple[str, Callable[[], bool]]]]:
    """Endpoints of a bridge, a broker and a pool, and whether they serve and saw nobody else."""
    with contextlib.ExitStack() as stack:
        bridge = ExternalEnvBridge(spaces.Discrete(2), spaces.Discrete(2))
        stack.callback(bridge.stop)
        broker = stack.enter_context(RunningBroker())
        remote = f"tcp://127.0.0.1:{free_port()}"
        stack.enter_context(with_remote_actor(remote))
        envs = BusVectorEnv(["CartPole-v1"] * 2, num_actors=2, remote_actors=1, bind=remote)
        stack.callback(envs.close)
        envs.reset(seed=1)

        def bridge_is_well() -> bool:
            with contextlib.ExitStack() as inner:
                joining = threading.Thread(target=lambda: inner.enter_context(client()))
                client = partial(ExternalEnvClient, bridge.endpoints[0])
                joining.start()
                while joining.is_alive():
                    bridge.poll(timeout=0.01)
                joining.join()
            counts = bridge.broker_statistics()
            return counts.malformed == counts.stranger_frames == 0

        def broker_is_well() -> bool:
            with Client(broker.endpoint):
                counts = broker.statistics()
            return counts.malformed == counts.stranger_frames == 0 and counts.ready_peers_now == 1

        def pool_is_well() -> bool:
            envs.step(envs.action_space.sample())
            return True

        yield {
            "bridge": (bridge.endpoints[0], bridge_is_well),
            "broker": (broker.endpoint, broker_is_well),
            "pool": (remote, pool_is_well),
        }


@pytest.mark.slow
def test_bridge_broker_and_pool_take_no_message_of_an_old_version() -> None:
    with programs() as known:
        for name, (endpoint, is_well) in known.items():
            assert all_are_shut_out(endpoint), name
            assert is_well(), name


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


POST = """
window.ended = 0
for (const slide of [600, 601]) {
  const body = new Uint8Array(BODIES[slide])
  const done = () => { window.ended += 1 }
  fetch("http://ADDRESS/", {method: "POST", mode: "no-cors", body}).then(done, done)
}
"""


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None,
    reason=f"no browser ({', '.join(PROGRAMS)}): make system-packages, or apt install chromium",
)
def test_what_a_web_page_posts_reaches_nobody(tmp_path: Path) -> None:
    assert BROWSER is not None
    bodies = {slide: list(body_of_a_page(slide)) for slide in (600, 601)}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Blank))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        known = stack.enter_context(programs())
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        page = stack.enter_context(Page(BROWSER, url, tmp_path))
        loaded = "location.href + document.readyState"
        wait_until(lambda: page.evaluate(loaded) == f"{url}complete", "the page is there")
        for name, (endpoint, is_well) in known.items():
            address = endpoint.removeprefix("tcp://")
            page.evaluate(POST.replace("BODIES", repr(bodies)).replace("ADDRESS", address))
            wait_until(lambda: page.evaluate("window.ended") == 2, f"the {name} cuts the page off")
            assert is_well(), name


def test_nothing_of_policy_workers_can_be_reached_over_a_network() -> None:
    before = psutil.Process().children(recursive=True)
    with PolicyWorkers(lambda: lambda texts: texts):
        ours = set(psutil.Process().children(recursive=True)).difference(before)
        assert ours
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                listening = [
                    connection
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                ]
                assert not listening, process.cmdline()
