"""Hostile peers of live brokers: these do not crash, hang or grow, and others go on."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from gymnasium import spaces

from envbus.actors import ExternalEnvClient
from envbus.bus.peer.client import Client
from envbus.bus.wire.codec import decode_header, encode_header
from envbus.bus.wire.messages import PROTOCOL_VERSION, Goodbye, Header, Kind, Shutdown
from envbus.runner import ExternalEnvBridge
from tests.fuzz.seeds import bombs, messages
from tests.integration.bus_programs import (
    Ask,
    RawPeer,
    RunningBroker,
    frames_of,
    hello_frames,
    worker,
)
from tests.integration.group_children import PATIENCE, wait_until
from tests.sources import ROOT

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import sys
import msgspec
from envbus.bus.broker.events import BrokerConfig
from envbus.bus.broker.standalone import serve_broker
sys.addaudithook(lambda event, _: event == "pickle.find_class" and sys.exit("unpickled"))
statistics = serve_broker(
    "tcp://127.0.0.1:*",
    config=BrokerConfig(max_message_bytes=1_000_000),
    on_ready=lambda ends: print(*ends, flush=True),
)
print(msgspec.json.encode(statistics).decode())
"""
#: Seconds in which an honest client gets its answer, whatever others do.
USABLE = 15.0
#: Bytes by which the broker may grow in the second half of the attack.
GROWTH = 6_000_000


@contextlib.contextmanager
def broker_process(log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def push(raw: RawPeer, frames: list[bytes]) -> None:
    """Send unless the queue is full: whoever is cut off would wait for ever."""
    with contextlib.suppress(zmq.Again):
        raw.socket.send_multipart(frames, zmq.NOBLOCK)


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Return frames with some bytes changed, cut off, or doubled."""
    if not frames:
        return [b""]
    frames = list(frames)
    which = chance.randrange(len(frames))
    frame = bytearray(frames[which])
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(frame) + 1)
        match chance.randrange(3):
            case 0 if at < len(frame):
                frame[at] ^= chance.randrange(1, 256)
            case 1:
                del frame[at:]
            case 2:
                frame += frame[:at]
    frames[which] = bytes(frame)
    return frames


def attack(endpoint: str, canary: Path, chance: random.Random, client: Client) -> None:
    """Send some 20,000 messages from several peers; after each few hundred an honest one asks."""
    known = messages(canary)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(RawPeer(endpoint, b"raw-%d" % number)) for number in range(3)]
        twin = stack.enter_context(RawPeer(endpoint, b"raw-0"))  # the identity of another
        deaf = stack.enter_context(RawPeer(endpoint, b"deaf", read=False))
        for number, raw in enumerate(raws):
            hello = hello_frames(f"raw-{number}", heartbeat=30.0, services=["names"] * number)
            push(raw, hello)
        for _ in range(20):
            for raw in (*raws, twin):
                for _ in range(100):
                    push(raw, mutated(chance.choice(known), chance))
                for bomb in bombs(canary):  # through the broker to the worker
                    head = Header(PROTOCOL_VERSION, Kind.REQUEST, chance.randrange(99), "Ask", 0.5)
                    push(raw, [encode_header(head), bomb])
                    push(raw, [encode_header(Header(*_astuple(head), to="w")), bomb])
            for _ in range(400):
                push(deaf, frames_of(Kind.REQUEST, Ask(), to="w", ttl=1.0))
            push(raws[1], [b"x" * 2_000_000])  # over the limit: it is cut off, and connects again
            with socket.create_connection((host, int(port)), PATIENCE) as stray:
                stray.sendall(chance.randbytes(500))
            reply = client.ask("w", Ask(number=7), timeout=USABLE).result(USABLE + 1)
            assert reply.number == 7
        for raw in raws:
            while not raw.is_silent():
                raw.receive()


def _astuple(header: Header) -> tuple[int, Kind, int, str, float, int]:
    return (
        header.version,
        header.kind,
        header.request_id,
        header.payload_type,
        header.ttl,
        header.incarnation,
    )


@pytest.mark.slow
def test_hostile_peers_do_no_harm(tmp_path: Path) -> None:
    canary = tmp_path / "unpickled"
    chance = random.Random(5)
    with (
        broker_process(tmp_path / "log") as (process, endpoint),
        worker("w", endpoint, heartbeat=1.0, capacity=8, services=["honest"]),
        Client(endpoint) as client,
    ):
        memory = psutil.Process(process.pid).memory_info
        attack(endpoint, canary, chance, client)
        before = memory().rss
        for _ in range(2):
            attack(endpoint, canary, chance, client)
        assert memory().rss - before < GROWTH
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
    log = (tmp_path / "log").read_text()
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert log.count("\n") < 300, "strangers fill the log"
    statistics = json.loads(out)
    assert statistics["malformed"] > 1000
    assert statistics["stranger_frames"] > 1000
    assert not canary.exists()


def test_no_peer_of_a_standalone_broker_can_send_another_one_home() -> None:
    with (
        RunningBroker() as broker,
        worker("w", broker.endpoint, heartbeat=1.0, services=["names"]) as served,
        RawPeer(broker.endpoint, b"evil") as evil,
        Client(broker.endpoint) as client,
    ):
        evil.send(*hello_frames("evil", heartbeat=30.0))
        assert decode_header(evil.receive()[0]).payload_type == "Welcome"
        for notice in (Shutdown(), Goodbye()):
            for to in ("w", "names", client.name):
                evil.send(*frames_of(Kind.NOTICE, notice, to=to))
        wait_until(lambda: broker.statistics().blocked == 6, "all have come")
        assert client.ask("w", Ask(number=7), timeout=USABLE).result(USABLE).number == 7
        assert served.is_running


def test_a_client_of_a_bridge_reaches_its_owner_and_nobody_else() -> None:
    with (
        ExternalEnvBridge(spaces.Discrete(2), spaces.Discrete(2), local_links=False) as bridge,
        RawPeer(bridge.endpoints[0], b"evil") as evil,
        RawPeer(bridge.endpoints[0], b"honest") as honest,
    ):

        def poll_until(condition: Callable[[], object]) -> None:
            wait_until(lambda: bridge.poll(0.01) and condition(), "the bridge has seen it")

        services = [f"own-{number}" for number in range(8)]
        evil.send(*hello_frames("evil", heartbeat=30.0, services=services))
        honest.send(*hello_frames("honest", heartbeat=30.0))
        poll_until(lambda: bridge.broker_statistics().ready_peers_now == 2)
        assert decode_header(honest.receive()[0]).payload_type == "Welcome"
        evil.send(*frames_of(Kind.NOTICE, Shutdown(), to="honest"))
        for number in range(1, 401):
            to = "honest" if number % 2 else services[number % 8]
            evil.send(*frames_of(Kind.REQUEST, Ask(), number, to=to, ttl=600.0))
        poll_until(lambda: bridge.broker_statistics().blocked == 401)
        assert honest.is_silent()
        assert bridge.broker_statistics().backlog_now == 0
        assert bridge.broker_statistics().in_flight_now == 0
        assert decode_header(evil.receive()[0]).payload_type == "Welcome"
        assert b"no_peer" in evil.receive()[1]


def play(address: str, episodes: int) -> None:
    with ExternalEnvClient(address) as client:
        for _ in range(episodes):
            episode = client.start_episode()
            for _ in range(10):
                assert client.get_action(episode, 0) == 1
                client.log_returns(episode, 1.0)
            client.end_episode(episode, 0)


def malformed(bridge: ExternalEnvBridge) -> int:
    return bridge.broker_statistics().malformed


FLOOD = """
import sys
from tests.integration.bus_programs import RawPeer, hello_frames
with RawPeer(sys.argv[1], sys.argv[2].encode()) as raw:
    raw.send(*hello_frames(sys.argv[2], heartbeat=30.0))
    while True:
        raw.send(b"nonsense")
        while not raw.is_silent():
            raw.socket.recv_multipart()
"""


@pytest.mark.slow
def test_episodes_go_on_while_others_flood_a_bridge_and_these_are_counted() -> None:
    one = spaces.Discrete(2)
    with ExternalEnvBridge(one, one, local_links=False) as bridge, contextlib.ExitStack() as stack:
        for name in ("flood-1", "flood-2"):
            program = [sys.executable, "-c", FLOOD, bridge.address, name]
            flooder = subprocess.Popen(program, cwd=ROOT)
            stack.callback(flooder.wait, PATIENCE)
            stack.callback(flooder.kill)
        episodes = 5
        ended = 0

        def serve() -> bool:
            nonlocal ended
            result = bridge.poll(timeout=0.1)
            bridge.send_actions(
                {
                    episode: dict.fromkeys(agents, 1)
                    for episode, agents in result.observations.items()
                    if episode not in result.ended
                }
            )
            ended += len(result.ended)
            assert not result.faults
            return ended == episodes

        wait_until(lambda: bridge.poll(0.01) and malformed(bridge) > 100, "a flood")
        before = malformed(bridge)
        client = threading.Thread(target=play, args=(bridge.address, episodes))
        client.start()
        stack.callback(client.join, PATIENCE)
        wait_until(serve, "all episodes")
        assert malformed(bridge) > before
