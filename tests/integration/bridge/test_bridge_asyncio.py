"""The asyncio client of a bridge."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from gymnasium import spaces

from envbus.actors import (
    ActionTimeoutError,
    AsyncExternalEnvClient,
    ClientTimeouts,
    EpisodeLostError,
    EpisodeNotFoundError,
    SpaceMismatchError,
)
from envbus.bus.errors import ClosedError, ConfigError, PeerLostError, RequestTimeoutError
from envbus.runner import ExternalEnvBridge
from envbus.runner.policies import MlpPolicy, policy_from_weights
from envbus.runner.pool.agent_results import DUMMY_AGENT
from tests.integration.bus_programs import free_port
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[True, False], ids=["local link", "zmq"])
def bridge(request: pytest.FixtureRequest) -> Iterator[ExternalEnvBridge]:
    with ExternalEnvBridge(OBSERVATION, ACTION, local_links=request.param) as made:
        yield made


def test_tasks_play_episodes_side_by_side(
    bridge: ExternalEnvBridge, caplog: pytest.LogCaptureFixture
) -> None:
    async def one(client: AsyncExternalEnvClient, name: str) -> None:
        await client.start_episode(name)
        for number in range(10):
            assert await client.get_action(name, seen(number)) == number
            await client.log_returns(name, 1.0, {"n": number})
        await client.log_action(name, seen(10), 3)
        await client.end_episode(name, seen(11), truncated=True)

    async def play() -> None:
        async with AsyncExternalEnvClient(bridge.address, name="sim") as client:
            assert client.name == "sim"
            assert client.observation_space == OBSERVATION
            assert client.action_space == ACTION
            await asyncio.gather(*[one(client, f"e{i}") for i in range(5)])

    caplog.set_level(logging.INFO, "envbus.runner.bridge")
    runner = Runner(bridge)
    with in_thread(lambda: asyncio.run(play())) as sim:
        runner.serve(lambda: sim.over() and len(runner.ended) == 5)
    runner.serve(lambda: not bridge.statistics().clients_now)
    assert "client sim is gone: it said goodbye" in caplog.messages
    for i in range(5):
        rows = [(0.0, 0.0), *[(float(n), 1.0) for n in range(1, 11)], (11.0, 0.0)]
        assert runner.rows(f"e{i}") == rows


class ShortOfMemory(AsyncExternalEnvClient):
    """Has none at its first look at the socket when it is to."""

    is_short = False

    def _look(self) -> None:
        was_short, self.is_short = self.is_short, False
        if was_short:
            raise MemoryError
        super()._look()


def test_time_outs_are_kept_after_memory_ran_out(
    bridge: ExternalEnvBridge, caplog: pytest.LogCaptureFixture
) -> None:
    silent = threading.Event()

    async def play() -> None:
        async with ShortOfMemory(bridge.address) as client:
            await client.start_episode("e")
            silent.set()
            client.is_short = True
            while client.is_short:
                await asyncio.sleep(0)
            verb = client.get_action("e", seen(1), timeout=0.2)
            with pytest.raises(ActionTimeoutError):
                await asyncio.wait_for(verb, 30.0)

    with in_thread(lambda: asyncio.run(play())):
        Runner(bridge).serve(silent.is_set)
    assert [text for text in caplog.messages if "looks at its clock again" in text]


def test_refusals_and_time_outs_are_the_same_errors(bridge: ExternalEnvBridge) -> None:
    async def play() -> None:
        async with AsyncExternalEnvClient(bridge.address) as client:
            with pytest.raises(EpisodeNotFoundError):
                await client.log_returns("no", 1.0)
            await client.start_episode("e")
            with pytest.raises(ActionTimeoutError, match="episode e: no action"):
                await client.get_action("e", seen(1), timeout=0.2)
            waits = asyncio.ensure_future(client.get_action("e", seen(2)))
            await asyncio.to_thread(pass_time, 0.2)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            with pytest.raises(ConfigError):
                await client.get_action("e", seen(1), timeout=0.0)
        with pytest.raises(ClosedError):
            await client.start_episode()
        with pytest.raises(ClosedError):
            await client.connect()
        other = {"observation_space": OBSERVATION, "action_space": spaces.Discrete(2)}
        refused = AsyncExternalEnvClient(bridge.address, **other)
        with pytest.raises(SpaceMismatchError):
            await refused.connect()

    with in_thread(lambda: asyncio.run(play())) as sim:
        Runner(bridge).serve(sim.over, act=False)


@pytest.mark.slow_but_first
def test_heartbeats_keep_an_idle_client_there(bridge: ExternalEnvBridge) -> None:
    async def play() -> None:
        async with AsyncExternalEnvClient(bridge.address, heartbeat=0.4) as client:
            await client.start_episode("e")
            await asyncio.to_thread(pass_time, 2.0)  # over its lease of 4 heartbeats
            assert await client.get_action("e", seen(5)) == 5

    with in_thread(lambda: asyncio.run(play())) as sim:
        Runner(bridge).serve(sim.over)
    assert bridge.statistics().resumed == 0


@pytest.mark.slow
def test_it_comes_back_to_a_bridge_that_was_started_again() -> None:
    async def play(address: str) -> None:
        async with AsyncExternalEnvClient(address) as client:
            await client.start_episode("e")
            with pytest.raises(PeerLostError):
                await client.get_action("e", seen(1))
            await client.start_episode("e2")
            with pytest.raises(EpisodeLostError):
                await client.get_action("e", seen(1))
            assert await client.get_action("e2", seen(6)) == 6

    first = ExternalEnvBridge(OBSERVATION, ACTION)
    address = first.address
    with in_thread(lambda: asyncio.run(play(address))) as sim:
        Runner(first).serve(lambda: first.statistics().waiting_now, act=False)
        first.stop()
        with ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as second:
            Runner(second).serve(sim.over)


def test_it_waits_for_a_bridge_that_is_not_there_yet() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    async def play() -> None:
        async with AsyncExternalEnvClient(address) as client:
            await client.start_episode("e")
            assert await client.get_action("e", seen(4)) == 4

    with in_thread(lambda: asyncio.run(play())) as sim:
        pass_time(0.3)  # it has tried in vain
        with ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as bridge:
            Runner(bridge).serve(sim.over)


def test_a_bridge_that_is_not_there_is_a_clear_error() -> None:
    async def play() -> None:
        timeouts = ClientTimeouts(connect=0.2)
        begun = time.monotonic()
        with pytest.raises(RequestTimeoutError, match="no bridge was joined"):
            await AsyncExternalEnvClient("tcp://127.0.0.1:1", timeouts=timeouts).connect()
        assert time.monotonic() - begun < 30.0

    asyncio.run(play())


def test_an_action_that_was_not_awaited_any_more_when_it_came_is_told_as_not_taken(
    bridge: ExternalEnvBridge,
) -> None:
    asked, answered = threading.Event(), threading.Event()

    async def play() -> None:
        async with AsyncExternalEnvClient(bridge.address) as client:
            await client.start_episode("e")
            assert await client.get_action("e", seen(1)) == 1
            await client.log_returns("e", 1.0)
            waits = asyncio.ensure_future(client.get_action("e", seen(2)))
            await asyncio.sleep(0)  # it is sent
            asked.set()
            assert answered.wait(30.0)  # and nothing is read meanwhile
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            await client.log_returns("e", 2.0)
            for number in (3, 4):
                assert await client.get_action("e", seen(number)) == number
                await client.log_returns("e", 4.0)
            await client.end_episode("e", seen(5))

    runner = Runner(bridge)
    with in_thread(lambda: asyncio.run(play())) as sim:
        runner.serve(lambda: bridge.statistics().actions == 1)
        runner.serve(lambda: asked.is_set() and len(runner.rows("e")) == 2, act=False)
        bridge.send_actions({"e": {DUMMY_AGENT: 2}})
        answered.set()
        runner.serve(lambda: sim.over() and runner.ended)
    assert runner.rows("e") == [(1.0, 0.0), (2.0, 1.0), (3.0, 2.0), (4.0, 4.0), (5.0, 4.0)]
    assert [bool(result.unacted) for result in runner.results] == [False, False, True, False, False]


def test_verbs_that_are_cancelled_count_where_the_client_chooses_itself(
    bridge: ExternalEnvBridge,
) -> None:
    weights = MlpPolicy(OBSERVATION, ACTION).get_weights()
    bridge.publish("default_policy", weights=weights, version=1)

    async def cancelled(verb: Coroutine[Any, Any, Any]) -> None:
        begun = asyncio.ensure_future(verb)
        await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun

    async def play() -> None:
        async with AsyncExternalEnvClient(
            bridge.address, inference="client", policy=policy_from_weights
        ) as client:
            await client.start_episode("e")
            await client.get_action("e", seen(1))
            await cancelled(client.log_returns("e", 1.0))
            await cancelled(client.get_action("e", seen(2)))
            await cancelled(client.log_action("e", seen(3), 3))
            await cancelled(client.get_action("another", seen(3)))
            await cancelled(client.end_episode("e", seen(4)))
            await client.get_action("e", seen(4))
            await client.end_episode("e", seen(5))

    runner = Runner(bridge)
    with in_thread(lambda: asyncio.run(play())) as sim:
        runner.serve(lambda: sim.over() and runner.ended)
    assert runner.rows("e") == [(1.0, 0.0), (2.0, 1.0), (3.0, 0.0), (4.0, 0.0), (5.0, 0.0)]
    acted = [result.off_policy_actions.get("e") for result in runner.results]
    assert [bool(action) for action in acted] == [True, False, True, True, False]


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(1, 4))
def test_a_close_that_is_cancelled_has_closed_and_is_cancelled(
    bridge: ExternalEnvBridge, turns: int
) -> None:
    async def play() -> None:
        client = AsyncExternalEnvClient(bridge.address)
        await client.connect()
        closing = asyncio.ensure_future(client.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = closing.done()
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled() is not was_done
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with in_thread(lambda: asyncio.run(play())) as sim:
        Runner(bridge).serve(sim.over)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["asyncio.run(clients[0].close())", "clients.clear()"])
def test_a_client_may_outlive_its_loop(bridge: ExternalEnvBridge, end: str) -> None:
    program = f"""
import asyncio, gc
from envbus.actors import AsyncExternalEnvClient
from tests.integration.simulators import seen

clients = []

async def play():
    client = AsyncExternalEnvClient("{bridge.address}")
    clients.append(client)
    await client.connect()
    episode = await client.start_episode()
    waits = asyncio.ensure_future(client.get_action(episode, seen(1)))
    await asyncio.sleep(0.0)
    asyncio.get_running_loop().stop()
    await waits

loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(play())
except RuntimeError:
    loop.close()
{end}
gc.collect()
print("over")
"""

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        return done.stdout

    with in_thread(run) as sim:
        Runner(bridge).serve(sim.over, act=False)
    assert sim.result == "over\n"


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["server", "client"])
def test_a_forked_copy_of_a_client_is_closed_and_harms_nobody(
    bridge: ExternalEnvBridge, inference: str
) -> None:
    weights = MlpPolicy(OBSERVATION, ACTION).get_weights()
    bridge.publish("default_policy", weights=weights, version=1)
    program = f"""
import asyncio, contextlib, os, sys
from envbus.actors import AsyncExternalEnvClient
from envbus.bus.errors import ClosedError
from envbus.runner.policies import policy_from_weights
from tests.integration.simulators import seen

asked = dict(inference="client", policy=policy_from_weights) if "{inference}" == "client" else {{}}

async def play():
    async with AsyncExternalEnvClient("{bridge.address}", **asked) as client:
        episode = await client.start_episode()
        await client.get_action(episode, seen(1))
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await client.get_action(episode, seen(3))
            await client.end_episode(episode, seen(4))
        else:
            with contextlib.suppress(ClosedError):
                await client.get_action(episode, seen(2))
                os._exit(1)
    if not child:
        os._exit(0)  # before its loop is closed: the owner's shares its epoll

asyncio.run(play())
print("over")
"""

    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        return done.stdout, done.stderr

    with in_thread(run) as sim:
        Runner(bridge).serve(sim.over)
    assert sim.result == ("over\n", "")
