"""Hostile peers of a live standalone broker: it does not crash, hang or grow, and others go on."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from envbus.bus.client import Client
from envbus.bus.codec import encode_header
from envbus.bus.messages import PROTOCOL_VERSION, Header, Kind
from tests.fuzz.seeds import bombs, messages
from tests.integration.bus_programs import Ask, RawPeer, frames_of, hello_frames, worker
from tests.integration.nursery_children import PATIENCE

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import sys
import msgspec
from envbus.bus.broker_vocabulary import BrokerConfig
from envbus.bus.standalone import serve_broker
sys.addaudithook(lambda event, _: event == "pickle.find_class" and sys.exit("unpickled"))
statistics = serve_broker(
    "tcp://127.0.0.1:*",
    config=BrokerConfig(max_message_bytes=1_000_000),
    on_ready=lambda ends: print(*ends, flush=True),
)
print(msgspec.json.encode(statistics).decode())
"""
#: Seconds in which an honest client gets its answer, whatever others do.
USABLE = 5.0
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
