"""Clients of a bridge on its own host: what they lose when their local link or their bridge is
gone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from envbus.actors import AsyncExternalEnvClient, ClientTimeouts, ExternalEnvClient
from envbus.bus.errors import PeerLostError
from envbus.bus.transport.local_listener import ADDRESSES_EXIST
from envbus.bus.transport.local_router import LocalRouter
from envbus.runner import ExternalEnvBridge
from tests.integration.bus_programs import free_port
from tests.integration.group_children import PATIENCE
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen
from tests.sources import ROOT

pytestmark = [
    pytest.mark.skipif(not ADDRESSES_EXIST, reason="no sockets without a file here"),
    pytest.mark.timeout(120),
]

BRIDGE = """
import sys
from envbus.runner import ExternalEnvBridge
from tests.integration.simulators import ACTION, OBSERVATION, Runner

with ExternalEnvBridge(OBSERVATION, ACTION, bind=sys.argv[1]) as bridge:
    print("ready", flush=True)
    Runner(bridge).serve(lambda: False)
"""


@contextmanager
def bridge_at(address: str) -> Iterator[subprocess.Popen[str]]:
    """A bridge in a process of its own, killed at the end."""
    command = [sys.executable, "-c", BRIDGE, address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def break_local_links(bridge: ExternalEnvBridge) -> int:
    """Cut all of them off; return how many."""
    router = bridge._broker._transport
    assert isinstance(router, LocalRouter)
    peers = list(router._links)
    for peer in peers:
        router.drop_local_link(peer)
    return len(peers)


def is_local(client: ExternalEnvClient) -> bool:
    return client._link._transport.is_local


@pytest.mark.parametrize("here", [True, False], ids=["the bridge's", "the client's"])
def test_either_side_may_do_without_local_links(here: bool) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address, local_links=here) as client:
            assert not is_local(client)
            client.start_episode("e")
            assert client.get_action("e", seen(3)) == 3

    with (
        ExternalEnvBridge(OBSERVATION, ACTION, local_links=not here) as bridge,
        in_thread(play) as sim,
    ):
        Runner(bridge).serve(sim.over)


def test_a_client_whose_local_link_breaks_goes_on_with_its_session() -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            assert is_local(client)
            client.start_episode("e")
            for number in range(200):
                assert client.get_action("e", seen(number)) == number
                client.log_returns("e", 1.0)
                if number % 50 == 25:
                    may_break.set()
                    broken.wait(PATIENCE)
                    broken.clear()
            client.end_episode("e", seen(200))

    may_break, broken = threading.Event(), threading.Event()
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge, in_thread(play) as sim:
        runner = Runner(bridge)
        count = 0

        def over() -> bool:
            nonlocal count
            if may_break.is_set():
                may_break.clear()
                count += break_local_links(bridge)
                broken.set()
            return sim.over() and bool(runner.ended)

        runner.serve(over)
    assert count >= 1
    assert not runner.faults
    rows = runner.rows("e")
    assert [row[0] for row in rows] == [float(number) for number in range(201)]
    assert {row[1] for row in rows[1:]} == {1.0}, "nothing was done twice"


def test_the_asyncio_client_goes_on_as_well() -> None:
    async def play() -> None:
        async with AsyncExternalEnvClient(bridge.address) as client:
            await client.start_episode("e")
            for number in range(60):
                assert await client.get_action("e", seen(number)) == number
            await client.end_episode("e", seen(60))

    with (
        ExternalEnvBridge(OBSERVATION, ACTION) as bridge,
        in_thread(lambda: asyncio.run(play())) as sim,
    ):
        runner = Runner(bridge)
        runner.serve(lambda: len(runner.rows("e")) > 20)
        assert break_local_links(bridge) == 1
        runner.serve(lambda: sim.over() and runner.ended)
    assert [row[0] for row in runner.rows("e")] == [float(number) for number in range(61)]


@pytest.mark.slow
def test_a_killed_bridge_is_noticed_and_the_next_one_is_reached_by_a_local_link() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with bridge_at(address):
        client = ExternalEnvClient(address, timeouts=ClientTimeouts(patience=2.0))
        assert is_local(client)
        client.start_episode("e")
        assert client.get_action("e", seen(1)) == 1
    with pytest.raises(PeerLostError, match="out of reach"):
        client.get_action("e", seen(2))
    with bridge_at(address):
        client.start_episode("e2")
        assert client.get_action("e2", seen(3)) == 3
        assert is_local(client)
        client.close()
