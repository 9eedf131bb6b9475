from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import zmq

from envbus.bus.gateway.host import Dealer
from envbus.bus.transport.curve_keys import Entrance

COUNT = 20_000


def read_all(router: zmq.Socket[bytes], came: list[int]) -> None:
    while len(came) < COUNT and router.poll(30_000):
        came.append(int(router.recv_multipart()[1]))
    router.send_multipart([b"id", b"done"])


async def send_all(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> int:
    """Send as fast as the other side takes it; return how often there was no room."""
    room, done = asyncio.Event(), asyncio.Event()
    dealer = Dealer(context, Entrance(endpoint), b"id", lambda frames: done.set(), room.set)
    refused = 0
    for number in range(COUNT):
        while not dealer.send([b"%d" % number]):
            refused += 1
            await asyncio.wait_for(room.wait(), 30.0)
            room.clear()
    await asyncio.wait_for(done.wait(), 30.0)
    dealer.close()
    return refused


def test_a_message_that_found_no_room_is_neither_lost_nor_sent_twice(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bus"
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, 10)
        router.bind(endpoint)
        came: list[int] = []
        reader = threading.Thread(target=read_all, args=(router, came))
        reader.start()
        refused = asyncio.run(send_all(context, endpoint))
        reader.join()
        router.close(0)
    assert came == list(range(COUNT))
    assert refused > 0
