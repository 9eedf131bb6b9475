"""What clients do while their bridge, or broker, sends without end: what is asked ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import pytest
from gymnasium.spaces import Discrete

from envbus.actors import AsyncExternalEnvClient, ClientTimeouts
from envbus.actors.external.agreement import Agreement
from envbus.actors.external.conversation import Conversation
from envbus.actors.external.link import Link
from envbus.actors.external.protocol import (
    BridgeJoined,
    GetModel,
    JoinBridge,
    Logged,
    Model,
    StartEpisode,
)
from envbus.bus.errors import RequestTimeoutError
from envbus.bus.peer.client import _Loop
from envbus.bus.peer.session import HELLO_ID, PeerCall, PeerSession
from envbus.bus.peer.worker import Heartbeats
from envbus.bus.transport.local_first import LocalFirstPeer
from envbus.bus.transport.local_listener import INTRODUCTION, address_of
from envbus.bus.wire.codec import decode_header, encode, encode_header
from envbus.bus.wire.framing import StreamReader, pack_for_stream
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Hello, Kind, Payload, Welcome
from tests.integration.bus_programs import free_port
from tests.integration.simulators import in_thread

pytestmark = pytest.mark.timeout(60)

PATIENCE = 30.0
HELLO = Hello(name="me", heartbeat=2.0)
WELCOME = Welcome(lease=8.0, max_message_bytes=1 << 20)
SPACES = Agreement(Discrete(2), Discrete(2)).wire
JOINED = BridgeJoined(
    observation_space=SPACES[0],
    action_space=SPACES[1],
    multi_agent=False,
    policy_ids=[],
    lease=1.0,
    session="s",
    inference=[],
    episodes=[],
)


def reply(number: int, payload: Payload) -> list[Any]:
    header = Header(PROTOCOL_VERSION, Kind.REPLY, number, type(payload).__name__)
    return [encode_header(header), *encode(payload)]


class Flood:
    """A connection to who lets everybody join, and sends late answers without end."""

    identity = b"me"

    def __init__(self) -> None:
        self._answers: deque[list[Any]] = deque()
        self._junk = reply(10**9, Logged())
        self.has_joined = False

    def send(self, frames: Any) -> None:
        header = decode_header(frames[0])
        if header.payload_type == "Hello":
            self._answers.append(reply(HELLO_ID, WELCOME))
        elif header.payload_type == "JoinBridge":
            self._answers.append(reply(header.request_id, JOINED))
            self.has_joined = True

    def receive(self, timeout: float) -> list[Any]:
        del timeout
        return self._answers.popleft() if self._answers else self._junk

    def wait(self, timeout: float) -> bool:
        del timeout
        return True

    def watch(self, fd: int) -> None:
        pass

    def lost_for(self) -> float:
        return 0.0

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_a_client_of_a_bridge() -> None:
    before = threading.enumerate()
    talk = Conversation(HELLO, lambda _session: JoinBridge(client="me"), lambda _joined: None, 1.0)
    beats = Heartbeats(Flood, b"me", 0.01)
    link = Link("nowhere", cast("LocalFirstPeer", Flood()), talk, beats)
    link.connect(PATIENCE)
    outcome, _ = link.request(StartEpisode(), encode(StartEpisode()), timeout=0.05)
    assert isinstance(outcome, RequestTimeoutError)
    link.close()
    left = set(threading.enumerate()).difference(before)
    assert "envbus-heartbeat" not in [thread.name for thread in left]


@pytest.mark.slow
def test_a_client_of_a_bridge_in_an_event_loop() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    def flood(listener: socket.socket) -> None:
        with listener.accept()[0] as client, contextlib.suppress(OSError):
            peer, said = Flood(), StreamReader(1 << 30)
            while not peer.has_joined:
                for frames in said.feed(client.recv(65536)):
                    if frames[0] != INTRODUCTION:
                        peer.send(frames)
                        client.sendall(pack_for_stream(peer.receive(0.0)))
            while True:
                client.sendall(pack_for_stream(reply(10**9, Logged())) * 100_000)

    async def play() -> None:
        timeouts = ClientTimeouts(connect=PATIENCE, other=0.05)
        async with AsyncExternalEnvClient(endpoint, timeouts=timeouts) as client:
            with pytest.raises(RequestTimeoutError):
                await client.start_episode()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_of(endpoint) or b"")
        listener.listen()
        with in_thread(lambda: flood(listener)):
            asyncio.run(play())


@pytest.mark.slow
def test_a_client_of_a_broker() -> None:
    loop = _Loop(cast("Any", Flood), PeerSession(HELLO, identity=b"me"), 8)
    loop.start()
    loop.joined.result(PATIENCE)
    asked, now = GetModel(policy_id="x"), time.monotonic()
    future: Future[Model] = Future()
    settle = partial(loop.settle, future, 1)
    call = PeerCall(asked, encode(asked), None, now, now + 0.05, settle, "nobody")
    loop.submit(partial(loop.begin, call), "nobody")
    with pytest.raises(RequestTimeoutError):
        future.result(PATIENCE)
    loop.stop(os.getpid())
